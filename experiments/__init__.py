"""Command-line programs. The absl flags of the project are defined here and nowhere else."""

import os

# jax logs alarms about slow compilation as errors, which no user can act on. It reads the level when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
