"""Tests of attention_jax/losses/."""
