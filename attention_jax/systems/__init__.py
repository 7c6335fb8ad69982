"""Systems: models with their data, losses and metrics; training experiments and opening trained runs."""
