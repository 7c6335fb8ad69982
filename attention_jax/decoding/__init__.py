"""Decoding: beam and greedy search, ranking, sampling, prefix constraints, ensembles and streaming."""
