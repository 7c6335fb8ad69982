"""Tests of attention_jax/inference/."""
