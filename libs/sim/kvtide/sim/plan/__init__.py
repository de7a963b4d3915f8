"""Whether pooling and disaggregation pay for a workload, and what with."""
