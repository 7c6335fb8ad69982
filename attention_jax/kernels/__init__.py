"""Faster implementations of the mathematics of `functional`, in time and memory. `api.attend` is the entry point."""
