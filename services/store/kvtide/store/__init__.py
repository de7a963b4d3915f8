"""The pool on one host: slots, leases, gossip, and the arena that holds the bytes."""
