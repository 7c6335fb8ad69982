"""Tests of attention_jax/functional."""
