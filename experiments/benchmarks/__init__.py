"""What experiments/benchmark.py measures, and beside what."""
