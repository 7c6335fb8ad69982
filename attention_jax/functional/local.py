"""Local alignments: they look through a window of the memory. Positions count from 0.

`local_m` and `local_p` are masks over all scores here; implementation 'window' computes the scores of the window alone,
from what `Row.window` says of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention_jax.errors import UserError
from attention_jax.functional.dense import check_single_query, smoothed, softmax
from attention_jax.functional.masking import at_least_float32

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']


class Window(NamedTuple):
  """Where one query looks: the positions within `reach` of `centre`.

  `compute_weights(scores, mask, offset)` gives the weights of any positions that include them, offset = position - centre.
  """

  centre: Float[Array, ''] | Int[Array, '']
  reach: int
  compute_weights: Callable[..., Weights]


@check_single_query
def local_m(scores: Scores, mask: Mask, *, step: Int[Array, ''], width: int = 10) -> Weights:
  """softmax over |s - t| ≤ D, t the number of the query ('monotonic'). Luong et al. 2015, section 3.2.

  A query whose window holds no position gets zero weights. Raises: UserError for a negative width.
  """
  return _over_all(window_m(*unmasked_extent(mask), step=step, width=width), scores, mask)


@check_single_query
def local_p(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, 'Dq'],
  w: Float[Array, 'Dq F'],
  v: Float[Array, 'F'],
  width: int = 10,
) -> Weights:
  """softmax over |s - p| ≤ D, times exp(-(s - p)² / 2σ²), σ = D/2, where p = S σ(vᵀ tanh(Wᵀ q)) ('predictive').

  Luong et al. 2015, equations 9 and 10. S counts the unmasked positions, and p is counted from the first of them; the
  weights are not normalised again, so that they sum to less than 1. Raises: UserError unless width ≥ 1.
  """
  return _over_all(window_p(*unmasked_extent(mask), query=query, w=w, v=v, width=width), scores, mask)


def unmasked_extent(mask: Bool[Array, '... S']) -> tuple[Int[Array, '...'], Int[Array, '...']]:
  """How many positions are unmasked, and which is the first: what the window of a row may depend on."""
  return mask.sum(-1), jnp.argmax(mask, axis=-1)


def window_m(size: Int[Array, ''], first: Int[Array, ''], *, step: Int[Array, ''], width: int = 10) -> Window:
  """The window of `local_m`."""
  check_width('local_m', width, 0)
  return Window(step, width, _softmax_inside(width))


def window_p(
  size: Int[Array, ''],
  first: Int[Array, ''],
  *,
  query: Float[Array, 'Dq'],
  w: Float[Array, 'Dq F'],
  v: Float[Array, 'F'],
  width: int = 10,
) -> Window:
  """The window of `local_p` in a memory of `size` unmasked positions, the `first` of which is here."""
  check_width('local_p', width, 1)
  query, w, v = (at_least_float32(x) for x in (query, w, v))
  centre = first.astype(query.dtype) + size.astype(query.dtype) * jax.nn.sigmoid(jnp.tanh(query @ w) @ v)

  def compute_weights(scores, mask, offset):
    # Outside the window the exponent is not looked at: far away its square would overflow.
    inside = mask & (jnp.abs(offset) <= width)
    fall = jnp.exp(-2.0 * (jnp.where(inside, offset, 0.0) / width) ** 2)
    return softmax(scores, inside) * fall.astype(at_least_float32(scores).dtype)

  return Window(centre, width, compute_weights)


@check_single_query
def windowed(
  scores: Scores, mask: Mask, *, previous: Float[Array, 'S'], width: int = 50, smooth: bool = False
) -> Weights:
  """softmax (with `smooth`, normalised sigmoids) over m - D ≤ s < m + D, m the median position of the weights before.

  Chorowski et al. 2015 (windowing). The first query looks from position 0 on.
  """
  check_width('windowed', width, 2)  # with 1 it could never move on
  total = jnp.sum(previous)
  median = jnp.sum(jnp.cumsum(previous) < total / 2)
  positions = jnp.arange(scores.size)
  inside = mask & (positions >= median - width) & (positions < median + width)
  return smoothed(scores, inside) if smooth else softmax(scores, inside)


def _softmax_inside(width: int) -> Callable[..., Weights]:
  return lambda scores, mask, offset: softmax(scores, mask & (jnp.abs(offset) <= width))


def _over_all(window: Window, scores: Scores, mask: Mask) -> Weights:
  return window.compute_weights(scores, mask, jnp.arange(scores.size).astype(window.centre.dtype) - window.centre)


def check_width(name: str, width: int, least: int) -> None:
  """Raises UserError for a width that is none."""
  if not isinstance(width, int) or isinstance(width, bool) or width < least:
    raise UserError(f'{name}: width must be a whole number of at least {least}, got {width!r}')
