"""Losses and objectives: what training minimises."""
