"""What ``kvtide bench serve`` does: a load, its answers, and what they were worth."""
