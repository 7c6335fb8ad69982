"""Implementations of the mathematics of `functional` in less time or memory. `api.attend` is the entry point."""
