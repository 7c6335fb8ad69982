"""Tests of attention_jax/analysis/."""
