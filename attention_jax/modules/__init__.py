"""Modules of flax.linen that own the parameters of the functions in `functional`; attention also in NNX and Equinox."""
