"""Which KV is kept: order of eviction, reuse, reservation, recompute budget."""
