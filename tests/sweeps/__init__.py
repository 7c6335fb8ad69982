"""Tests of attention_jax/sweeps/."""
