"""Builders of generated data sets. The examples of a split are a pure function of its name, options and seed."""
