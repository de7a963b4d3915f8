"""What both kinds of workers stand on. Import from its modules: some load torch."""
