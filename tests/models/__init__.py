"""Tests of attention_jax/models/."""
