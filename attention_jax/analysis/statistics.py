"""Statistics of the weights of one sequence: coverage, distance and lag of the positions attended to. NumPy only."""

import numpy as np


def coverage(weights: np.ndarray) -> np.ndarray:
  """cₛ = Σₜ wₜₛ: how much attention each position got in total. Tu et al. 2016.

  Args:
    weights: [T, S]; 0 at masked positions.

  Returns:
    [S]; 1 for a position that is attended to once.
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


def average_lagging(weights: np.ndarray, source_length: int, target_length: int) -> float:
  """Mean number of source tokens by which a streaming decoder lags behind an ideal one. Ma et al. 2019, equations 8, 9.

  AL = 1 / τ Σ_{t ≤ τ} (g(t) - (t - 1) |x| / |y|), where g(t) is the number of source tokens that were read before
  target token t was emitted, and τ the first t for which that is the whole source (|y| if there is none). The ideal
  decoder emits |y| tokens evenly while it reads |x|.

  Args:
    weights: [T, S], T >= |y|, of an alignment that reads up to the last position with weight, or to the end for a row
      without any.
    source_length: |x|, the number of source tokens without EOS.
    target_length: |y|, the number of target tokens without EOS.

  Returns:
    AL in source tokens; NaN if one of the lengths is 0.
  """
  if not source_length or not target_length:
    return float('nan')
  has_weight = np.asarray(weights)[:target_length] > 0
  last = has_weight.shape[1] - np.argmax(has_weight[:, ::-1], axis=1)
  read = np.minimum(np.where(has_weight.any(1), last, source_length), source_length)
  read = np.maximum.accumulate(read)
  steps = int(np.argmax(read == source_length)) + 1 if read[-1] == source_length else target_length
  ideal = np.arange(steps) * source_length / target_length
  return float(np.mean(read[:steps] - ideal))
