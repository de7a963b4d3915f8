"""What a cluster would do with a load: TTFT, TBT, goodput, in virtual time."""
