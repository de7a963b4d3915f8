"""The decode worker: pulls KV, batches, makes tokens."""
