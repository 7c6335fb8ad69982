"""Local alignments, which assign weights inside a window of positions only. Positions count from 0.

Here `local_m` and `local_p` take the scores of all positions and mask those outside the window. Implementation 'window'
computes the scores of the window only, from the `LocalWindow` of the table row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float, Int
from attention_jax.errors import UserError
from attention_jax.functional.dense import Mask, Scores, Weights, check_single_query, smoothed, softmax
from attention_jax.functional.masking import at_least_float32


class Window(NamedTuple):
  """The window of one query: all positions whose distance from the centre is at most `reach`.

  Attributes:
    centre: a position, not necessarily a whole number.
    reach: the greatest distance.
    compute_weights: (scores, mask, offset) -> weights, for any set of positions that contains the window, where
      offset = position - centre.
  """

  centre: Float[Array, ''] | Int[Array, '']
  reach: int
  compute_weights: Callable[..., Weights]


@check_single_query
def local_m(scores: Scores, mask: Mask, *, step: Int[Array, ''], width: int = 10) -> Weights:
  """softmax over |s - t| ≤ D, t the index of the query ('monotonic'). Luong et al. 2015, section 3.2.

  D is `width`. A query whose window contains no unmasked position gets zero weights.

  Raises:
    UserError: if the width is negative or not a whole number.
  """
  return _weights_of_all(window_m(*unmasked_extent(mask), step=step, width=width), scores, mask)


@check_single_query
def local_p(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, ' Dq'],
  w: Float[Array, 'Dq F'],
  v: Float[Array, ' F'],
  width: int = 10,
) -> Weights:
  """softmax over |s - p| ≤ D, times exp(-(s - p)² / 2σ²), σ = D/2, p = S sigmoid(vᵀ tanh(Wᵀ q)) ('predictive').

  Luong et al. 2015, equations 9 and 10. D is `width`, and S is the number of unmasked positions. p is counted from the
  first of them. The weights are not normalised again, so that they sum to at most 1.

  Raises:
    UserError: if the width is less than 1 or not a whole number.
  """
  return _weights_of_all(window_p(*unmasked_extent(mask), query=query, w=w, v=v, width=width), scores, mask)


def unmasked_extent(mask: Bool[Array, '... S']) -> tuple[Int[Array, '...'], Int[Array, '...']]:
  """Returns the number of unmasked positions, and the first of them: the positional arguments of `LocalWindow.fn`."""
  return mask.sum(-1), jnp.argmax(mask, axis=-1)


def window_m(size: Int[Array, ''], first: Int[Array, ''], *, step: Int[Array, ''], width: int = 10) -> Window:
  """Returns the window of `local_m`.

  Arguments: see `window_p` and `local_m`; `size` and `first` are not used.

  Raises:
    UserError: if the width is negative or not a whole number.
  """
  check_width('local_m', width, 0)
  return Window(step, width, _softmax_inside(width))


def window_p(
  size: Int[Array, ''],
  first: Int[Array, ''],
  *,
  query: Float[Array, ' Dq'],
  w: Float[Array, 'Dq F'],
  v: Float[Array, ' F'],
  width: int = 10,
) -> Window:
  """Returns the window of `local_p`.

  Args:
    size: the number of unmasked positions.
    first: the first unmasked position.
    query: as in `local_p`.
    w: as in `local_p`.
    v: as in `local_p`.
    width: as in `local_p`.

  Raises:
    UserError: if the width is less than 1 or not a whole number.
  """
  check_width('local_p', width, 1)
  query = at_least_float32(query)
  w = at_least_float32(w)
  v = at_least_float32(v)
  centre = first.astype(query.dtype) + size.astype(query.dtype) * jax.nn.sigmoid(jnp.tanh(query @ w) @ v)

  def compute_weights(scores, mask, offset):
    inside = mask & (jnp.abs(offset) <= width)
    # Offsets outside the window, where the weights are 0, are replaced by 0 so that their squares cannot overflow.
    gaussian = jnp.exp(-2.0 * (jnp.where(inside, offset, 0.0) / width) ** 2)
    return softmax(scores, inside) * gaussian.astype(at_least_float32(scores).dtype)

  return Window(centre, width, compute_weights)


@check_single_query
def windowed(
  scores: Scores, mask: Mask, *, previous: Float[Array, ' S'], width: int = 50, smooth: bool = False
) -> Weights:
  """softmax (with `smooth`, normalised sigmoids) over m - D ≤ s < m + D, m the median position of the previous weights.

  Chorowski et al. 2015 (windowing). D is `width`. For the first query, and after a query without weight, m is 0.

  Raises:
    UserError: if the width is less than 2 or not a whole number.
  """
  check_width('windowed', width, 2)  # a window of width 1 could never move forward
  total = jnp.sum(previous)
  median = jnp.sum(jnp.cumsum(previous) < total / 2)
  positions = jnp.arange(scores.size)
  inside = mask & (positions >= median - width) & (positions < median + width)
  return smoothed(scores, inside) if smooth else softmax(scores, inside)


def check_width(name: str, width: int, minimum: int) -> None:
  """Checks the width of a window.

  Args:
    name: name of the alignment, for the error message.
    width: the width, in positions.
    minimum: the smallest allowed width.

  Raises:
    UserError: unless `width` is a whole number of at least `minimum`.
  """
  if not isinstance(width, int) or isinstance(width, bool) or width < minimum:
    raise UserError(f'{name}: width must be a whole number of at least {minimum}, got {width!r}')


def _softmax_inside(width: int) -> Callable[..., Weights]:
  return lambda scores, mask, offset: softmax(scores, mask & (jnp.abs(offset) <= width))


def _weights_of_all(window: Window, scores: Scores, mask: Mask) -> Weights:
  """Weights of all positions, zeros outside of the window."""
  positions = jnp.arange(scores.size).astype(window.centre.dtype)
  return window.compute_weights(scores, mask, positions - window.centre)
