"""Floor 2: flax.linen modules that own the parameters of the pure functions below."""
