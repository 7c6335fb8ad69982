"""Sweeps: grids and searches over config fields, resumed after interruptions, and reported with error bars."""
