"""Tests of attention_jax/decoding/."""
