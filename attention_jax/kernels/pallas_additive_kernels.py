"""Pallas kernels of implementation 'pallas_additive': functions of references to blocks.

A reference is indexed like an array; a block is in vector memory on a TPU and in device memory on a GPU. The tile, and
`has_dropout` of `context_kernel`, come before the references and are fixed when a program is compiled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention_jax.functional.masking import min_finite


class Tile(NamedTuple):
  """Sizes of the blocks of a program, all powers of 2, as a GPU requires. Products on a GPU need at least 16 rows.

  For the gradient of the keys, `pair_sums_kernel` takes keys in place of queries, and queries in place of keys.

  Attributes:
    queries: queries of a program.
    keys: keys of one step of a program.
    features: features of one step of a program; in `pair_sums_kernel`, features of a program.
    span: largest number of keys of a program, over all its steps; `split_keys` returns the actual one.
    values: columns of the values that one product covers.
  """

  queries: int
  keys: int
  features: int
  span: int
  values: int

  def split_keys(self, size: int) -> tuple[int, int]:
    """Splits `size` keys into equal spans, padded to whole steps; returns their number and the keys of each."""
    spans = -(-size // self.span)
    return spans, round_up(-(-size // spans), self.keys)


def context_kernel(has_dropout: bool, tile: Tile, q, k, v, masked_bias, value, *refs) -> None:
  """Computes the sums of a softmax online, over a span of keys, for a block of queries.

  Args:
    has_dropout: whether `refs` begin with the factors of dropout [rows, span].
    tile: sizes of the blocks.
    q, k, v, masked_bias, value: inputs, see `pallas_additive.attended`.
    *refs: outputs, after any factors: the sum of values weighted by exponentials times factors [rows, V], the largest
      score [rows, 1], the sum of exponentials relative to it [rows, 1] and, if weights are requested, the scores
      [rows, span], -inf where masked.
  """
  factors = refs[0] if has_dropout else None
  value_sums, max_scores, exp_sums, *scores_refs = refs[1:] if has_dropout else refs
  rows, width = value_sums.shape
  value_tiles = [pl.ds(first, tile.values) for first in range(0, width, tile.values)]

  def step(i, carry):
    max_score, exp_sum, sums = carry
    columns = _slice_of(i, tile.keys)
    scores, unmasked = _scores(tile, q, k, v, masked_bias, columns)
    if scores_refs:
      scores_refs[0][:, columns] = jnp.where(unmasked, scores, -jnp.inf)
    block_max = jnp.max(jnp.where(unmasked, scores, min_finite(scores.dtype)), axis=1, keepdims=True)
    new_max = jnp.maximum(max_score, block_max)
    exps = jnp.where(unmasked, jnp.exp(jnp.where(unmasked, scores - new_max, 0.0)), 0.0)
    rescale = jnp.exp(max_score - new_max)
    exps_after_dropout = exps if factors is None else exps * factors[:, columns]
    exp_sum = exp_sum * rescale + jnp.sum(exps, axis=1, keepdims=True)
    terms = [
      jax.lax.dot(exps_after_dropout, value[columns, values], precision=jax.lax.Precision.HIGHEST)
      for values in value_tiles
    ]
    return new_max, exp_sum, tuple(total * rescale + term for total, term in zip(sums, terms, strict=True))

  start = (
    jnp.full((rows, 1), min_finite(jnp.float32), jnp.float32),
    jnp.full((rows, 1), 0.0, jnp.float32),
    tuple(jnp.zeros((rows, tile.values), jnp.float32) for _ in value_tiles),
  )
  max_score, exp_sum, sums = jax.lax.fori_loop(0, k.shape[0] // tile.keys, step, start)
  for values, total in zip(value_tiles, sums, strict=True):
    value_sums[:, values] = total
  max_scores[:, :] = max_score
  exp_sums[:, :] = exp_sum


def exponentials_kernel(tile: Tile, q, k, v, masked_bias, max_score, exps) -> None:
  """Computes exp(score - max_score) [rows, keys], 0 where masked.

  Args:
    tile: sizes of the blocks.
    q, k, v, masked_bias: inputs, see `pallas_additive.attended`.
    max_score: the largest score of each query [rows, 1].
    exps: output [rows, keys].
  """
  scores, unmasked = _scores(tile, q, k, v, masked_bias, pl.ds(0, tile.keys))
  # `max_score` comes from the forward pass. A recomputed score may exceed it by a rounding error, which is large for
  # large scores.
  relative = jnp.minimum(jnp.where(unmasked, scores - max_score[:, :], 0.0), 0.0)
  exps[:, :] = jnp.where(unmasked, jnp.exp(relative), 0.0)


def pair_sums_kernel(tile: Tile, x, y, g, slope_sums, *tanh_sums) -> None:
  """Computes Σ_j g_ij tanh'(x_i + y_j) and, if there is a second output, Σ_j g_ij tanh(x_i + y_j).

  Args:
    tile: sizes of the blocks.
    x: [rows, features].
    y: [span, features].
    g: [rows, span].
    slope_sums: output [rows, features].
    *tanh_sums: no output, or one [rows, features].
  """

  def step(i, totals):
    columns = _slice_of(i, tile.keys)
    tanh = jnp.tanh(x[:, :][:, None, :] + y[columns, :][None, :, :])
    weight = g[:, columns][:, :, None]
    terms = [weight * (1 - tanh * tanh)]
    if tanh_sums:
      terms.append(weight * tanh)
    return tuple(total + jnp.sum(term, axis=1) for total, term in zip(totals, terms, strict=True))

  outputs = (slope_sums, *tanh_sums)
  start = tuple(jnp.zeros(output.shape, jnp.float32) for output in outputs)
  totals = jax.lax.fori_loop(0, y.shape[0] // tile.keys, step, start)
  for output, total in zip(outputs, totals, strict=True):
    output[:, :] = total


def _scores(tile: Tile, q, k, v, masked_bias, columns) -> tuple[jax.Array, jax.Array]:
  """Scores of a block of queries and the keys in `columns`, and which of them are unmasked: [rows, keys] each."""

  def step(i, total):
    features = _slice_of(i, tile.features)
    tanh = jnp.tanh(q[:, features][:, None, :] + k[columns, features][None, :, :])
    return total + v[:, features][None, :, :] * tanh

  start = jnp.zeros((q.shape[0], tile.keys, tile.features), jnp.float32)
  total = jnp.sum(jax.lax.fori_loop(0, q.shape[1] // tile.features, step, start), axis=2)
  bias = jnp.broadcast_to(masked_bias[:, columns], total.shape)
  unmasked = bias > -jnp.inf
  return total + jnp.where(unmasked, bias, 0.0), unmasked


def _slice_of(i, size: int):
  """The i-th slice of `size` entries."""
  return pl.ds(pl.multiple_of(i * size, size), size)


def round_up(size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple
