"""Losses and objectives of training."""
