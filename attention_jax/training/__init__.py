"""Training of any flax model: state, update, loop, hooks, checkpoints. Imports no model, data set or loss."""
