"""Attention through several layers of self-attention: rollout and flow. Abnar & Zuidema 2020."""

import numpy as np

from attention_jax.errors import UserError

CAPACITY_UNITS = 2**20  # integer units of a capacity of 1, because maximum_flow of scipy takes whole numbers
TOLERANCE = 1e-2  # by which a weight may exceed 1, as weights that were rounded to bfloat16 do


def rollout(weights: np.ndarray) -> np.ndarray:
  """Ã₁ = A₁, Ãₗ = Aₗ Ãₗ₋₁, with A = ½ W + ½ I for the residual connection. Abnar & Zuidema 2020, section 3.

  Args:
    weights: [L, S, S], of the layers from the lowest to the highest, averaged over heads; 0 at masked positions.

  Returns:
    [L, S, S]: in row t of layer l, the share of each input in position t. Rows sum to 1 if those of the weights do.

  Raises:
    UserError: if the weights have another shape, or are not from 0 to 1.
  """
  layers = _with_residual(weights)
  result = [layers[0]]
  for layer in layers[1:]:
    result.append(layer @ result[-1])
  return np.stack(result)


def flow(weights: np.ndarray) -> np.ndarray:
  """Maximum flow from each position of the highest layer to each input. Abnar & Zuidema 2020, section 3.

  Layers are joined by edges whose capacities are A = ½ W + ½ I. The flow along a path is limited by its narrowest
  edge, and paths that share an edge share its capacity; rollout multiplies the weights of a path instead.

  Args:
    weights: [L, S, S], as for `rollout`.

  Returns:
    [S, S]: in row t, the flow from position t of the highest layer to each input, exact to 10⁻⁶ per edge.

  Raises:
    UserError: if the weights have another shape, or are not from 0 to 1.
  """
  from scipy.sparse import csr_array
  from scipy.sparse.csgraph import maximum_flow

  layers = np.rint(_with_residual(weights) * CAPACITY_UNITS).astype(np.int32)
  depth, size, _ = layers.shape
  capacities = np.zeros([(depth + 1) * size] * 2, np.int32)  # node l S + s is position s above layer l; l = 0: inputs
  for number, layer in enumerate(layers):
    above = slice((number + 1) * size, (number + 2) * size)
    below = slice(number * size, (number + 1) * size)
    capacities[above, below] = layer
  graph = csr_array(capacities)
  flows = [[maximum_flow(graph, depth * size + t, s).flow_value for s in range(size)] for t in range(size)]
  return np.array(flows) / CAPACITY_UNITS


def _with_residual(weights: np.ndarray) -> np.ndarray:
  """½ W + ½ I of every layer. A masked position, whose weights are all 0, has ½ of itself and nothing of the others."""
  weights = np.asarray(weights, np.float64)
  if weights.ndim != 3 or weights.shape[1] != weights.shape[2] or not weights.size:
    raise UserError(f'weights must be [L, S, S], of at least one layer of self-attention, got {list(weights.shape)}')
  if not (weights.min() >= 0 and weights.max() <= 1 + TOLERANCE):  # False for NaN
    raise UserError(f'weights must be from 0 to 1, got {weights.min():g} to {weights.max():g}')
  return 0.5 * weights + 0.5 * np.eye(weights.shape[-1])
