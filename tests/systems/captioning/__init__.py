"""Tests of attention_jax/systems/captioning/."""
