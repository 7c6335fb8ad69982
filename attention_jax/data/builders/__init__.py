"""Builders of generated data sets. Every example is a pure function of (split, seed)."""
