"""Tests of attention_jax/training/."""
