"""Tests of attention_jax/systems/recall/."""
