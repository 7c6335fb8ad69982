"""flax.linen modules, which own the parameters of the pure functions in `functional`."""
