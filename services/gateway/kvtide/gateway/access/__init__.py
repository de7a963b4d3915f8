"""Who may ask: keys, the tenants that they stand for, and the book of what was done."""
