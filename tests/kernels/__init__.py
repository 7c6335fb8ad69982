"""Tests of attention_jax/kernels/."""
