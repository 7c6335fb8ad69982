"""The suites of lab/benchmark.py and the implementations that they compare with."""
