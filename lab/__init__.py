"""Measurements of this repository and the generator of its documentation site; run in a clone, never installed."""

import experiments  # noqa: F401 - hides alarms of the compiler, before jax is imported
