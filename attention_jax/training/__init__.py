"""Training of any flax model: state, update, loop, checkpoints. Imports no model, data set or loss."""
