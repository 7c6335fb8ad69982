"""Heads of a trained model: how important each is, and the same model without some of them. Michel, Levy & Neubig 2019.

The result of a head is a linear function of its rows of the output projection. A gate ξ of the head is therefore a
factor of these rows, and a model without a head is the same model with other parameters. In differential attention two
heads have one result, their difference: there each pair counts as a head.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.errors import UserError

Gates = Mapping[str, jax.Array]  # [N] for each attention with several heads, by the path of its parameters
SEPARATOR = '/'
QUERY = ('query_kernel', 'kernel')  # [N, D, F]: F features of each head
JOIN = ('join', 'kernel')  # [N F, N F]: F rows for each head
DIFFERENCE = ('difference', 'query_1')  # only of differential attention


def open_gates(params: Any) -> dict[str, jax.Array]:
  """Returns gates of 1 for every head of the parameters of a model; an attention with a single head has no gate."""
  from flax.traverse_util import flatten_dict

  flat = flatten_dict(params)
  heads = {path[:-2]: kernel.shape[0] for path, kernel in flat.items() if path[-2:] == QUERY}
  heads = {path: count // 2 if (*path, *DIFFERENCE) in flat else count for path, count in heads.items()}
  return {
    SEPARATOR.join(path): jnp.ones(count) for path, count in heads.items() if (*path, *JOIN) in flat and count > 1
  }


def gate_heads(params: Any, gates: Gates) -> Any:
  """Returns the parameters with the result of each head multiplied by its gate; 0 prunes a head.

  Args:
    params: parameters of a model.
    gates: gates by path, as `open_gates` returns them.
  """
  from flax.traverse_util import flatten_dict, unflatten_dict

  flat = flatten_dict(params)
  for name, gate in gates.items():
    path = (*filter(None, name.split(SEPARATOR)), *JOIN)
    kernel = flat[path]
    rows = kernel.reshape(gate.shape[0], -1, kernel.shape[-1])
    flat[path] = (rows * gate[:, None, None].astype(kernel.dtype)).reshape(kernel.shape)
  return unflatten_dict(flat)


def head_sensitivity(loss: Callable[[Any], jax.Array], params: Any) -> dict[str, jax.Array]:
  """|∂L/∂ξₕ| at ξ = 1: its mean over examples is the importance Iₕ of a head. Michel et al. 2019.

  Args:
    loss: params -> the loss of one example. The mean of absolute values needs one example at a time.
    params: parameters of a model.

  Returns:
    [N] by path of each attention with several heads.
  """
  return jax.tree.map(jnp.abs, jax.grad(lambda gates: loss(gate_heads(params, gates)))(open_gates(params)))


def prune_heads(params: Any, importance: Mapping[str, jax.Array], count: int) -> Any:
  """Returns the parameters with a gate of 0 for the `count` least important heads. Michel et al. 2019.

  Args:
    params: parameters of a model.
    importance: means of `head_sensitivity`; those of each attention are divided by their norm first, as in the paper.
    count: number of heads with a gate of 0; shapes do not change.

  Raises:
    UserError: for a count below 0 or above the number of heads.
  """
  normalised = {path: np.asarray(values) / (np.linalg.norm(values) or 1.0) for path, values in importance.items()}
  ranked = sorted((value, path, head) for path, values in normalised.items() for head, value in enumerate(values))
  if not 0 <= count <= len(ranked):
    raise UserError(f'count must be from 0 to {len(ranked)}, the number of heads, got {count}')
  gates = {path: np.ones(len(values), np.float32) for path, values in normalised.items()}
  for _, path, head in ranked[:count]:
    gates[path][head] = 0.0
  return gate_heads(params, {path: jnp.asarray(gate) for path, gate in gates.items()})
