"""Training: state, losses, optimisers, the step, the loop and what happens around it (floor 4)."""
