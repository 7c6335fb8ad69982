"""Tests of attention_jax/systems/classification/."""
