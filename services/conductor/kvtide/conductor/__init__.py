"""The conductor: places each request by what is cached and how loaded workers are."""
