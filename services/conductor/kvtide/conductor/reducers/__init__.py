"""What a conductor knows, one noun each. Pure: events in, answers out."""
