"""Tests of attention_jax/systems/translation/."""
