"""The suites of experiments/benchmark.py and the implementations that they compare with."""
