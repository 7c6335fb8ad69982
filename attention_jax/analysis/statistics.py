"""Statistics of the weights of one sequence: how often positions are attended to, and from how far. NumPy only."""

import numpy as np


def coverage(weights: np.ndarray) -> np.ndarray:
  """cₛ = Σₜ wₜₛ: how much attention each position got in total. Tu et al. 2016.

  Args:
    weights: [T, S]; 0 at masked positions.

  Returns:
    [S]; 1 everywhere where each position is attended to once.
  """
  return np.asarray(weights, np.float64).sum(0)


def distance(weights: np.ndarray, centres: np.ndarray | None = None) -> np.ndarray:
  """dₜ = Σₛ wₜₛ |s - cₜ| / Σₛ wₜₛ: the mean distance of the positions attended to. Vig & Belinkov 2019.

  Args:
    weights: [T, S]; 0 at masked positions.
    centres: [T], the position that the distances of each query are measured from: `np.arange(T)` in self-attention. By
      default the diagonal from the first position to the last.

  Returns:
    [T], in positions; NaN for a query without any weight.
  """
  weights = np.asarray(weights, np.float64)
  queries, positions = weights.shape
  if centres is None:
    centres = np.linspace(0, positions - 1, queries)
  distances = np.abs(np.arange(positions)[None, :] - np.asarray(centres)[:, None])
  total = weights.sum(1)
  return np.where(total > 0, (weights * distances).sum(1), np.nan) / np.where(total > 0, total, 1.0)
