"""Tests of attention_jax/data/."""
