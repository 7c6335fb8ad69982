"""Encoders, decoders, and the models that combine them."""
