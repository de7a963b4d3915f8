"""What ``kvtide bench store`` measures: the pool's speed beside the machine's own."""
