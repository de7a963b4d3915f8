"""Plain engines of others as workers: their cache in the index, requests by HTTP."""
