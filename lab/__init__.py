"""Measurements of this repository and the generator of its documentation site; run in a clone, never installed."""
