"""Sweeps that measure claims of the literature again, one file per claim; docs/claims/ has their results."""
