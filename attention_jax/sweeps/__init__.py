"""Sweeps: grids and searches over config fields, run to the end whatever happens, and reported with error bars."""
