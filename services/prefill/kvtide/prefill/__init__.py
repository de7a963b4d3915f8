"""The prefill worker: makes KV, reuses what there is, hands it over."""
