"""Floor 5: the programs. absl flags live here and nowhere else."""
