"""Command-line programs. The absl flags of the project are defined here and nowhere else."""
