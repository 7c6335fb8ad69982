"""Pure functions on arrays, which work under jit, vmap, grad, scan and shard_map."""
