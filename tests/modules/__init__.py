"""Tests of attention_jax/modules/."""
