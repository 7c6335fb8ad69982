"""Tests of attention_jax/systems/glimpsing/."""
