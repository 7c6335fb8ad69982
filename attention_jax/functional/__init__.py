"""Floor 0: arrays in, arrays out. Everything works under jit, vmap, grad, scan and shard_map."""
