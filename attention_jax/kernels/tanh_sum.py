"""Σ_f v_f tanh(q_tf + k_sf) for all t and s, without the array [T, S, F] and without a transcendental in its loops.

With a = e^{2q} and b = e^{2k}, computed once per query and once per key, tanh(q + k) = 1 - 2u and its slope is
4 u (1 - u), where u = 1 / (1 + a b). Fractions are added in groups before they are divided: v₁/y₁ + v₂/y₂ =
(v₁ y₂ + v₂ y₁) / (y₁ y₂), so that one division serves several features.

Safe for any input. Weights v and cotangents are divided by the largest of them. Keys are centred, feature by feature,
on the middle of their range (what is taken from the key is added to the query), and a b is capped where tanh is 1 to
the last bit. That is exact while no feature of the keys spans more than 2 LIMIT = 60 (float32); for wider ones the
same loops run with tanh itself. The error of a tanh is at most about (2 + |q'| + |k'|) 2⁻²³, q' and k' centred, where
|q'| counts for no more than LIMIT + 10.

Under vmap the loops get leading axes, the same for all arrays. Derivatives of the gradient are not offered.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attention_jax.functional.masking import accumulation_dtype, vary_like

UNROLL = 16  # terms of a contraction in one pass over its result: enough that traffic does not count
LIMITS = {jnp.dtype(jnp.float32): (30.0, 10.5), jnp.dtype(jnp.float64): (150.0, 20.0)}  # of |k'|; where tanh is 1


def scores(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """q [T, F], k [S, F], v [F], mask [S] -> [T, S], float32 or float64. What is masked has no influence on the rest."""
  dtype = accumulation_dtype(q, k, v)
  seen, x = mask[:, None], k.astype(dtype)
  fixed = jax.lax.stop_gradient(x)
  high = jnp.max(jnp.where(seen, fixed, -jnp.inf), axis=0)
  low = jnp.min(jnp.where(seen, fixed, jnp.inf), axis=0)
  some = jnp.any(mask)
  # False also for what is not finite, which then takes the path of the plain formula and shows.
  safe = jnp.all(jnp.where(some, high - low, 0.0) <= 2 * LIMITS[jnp.dtype(dtype)][0])
  centre = jnp.where(some & safe, (low + high) / 2, 0.0)
  centred = jnp.where(seen, x - centre[None], 0.0)
  return tanh_sum(q.astype(dtype) + centre[None], centred, v.astype(dtype), safe)


@jax.custom_vjp
def tanh_sum(q: jax.Array, k: jax.Array, v: jax.Array, safe: jax.Array) -> jax.Array:
  """q [T, F], centred k [S, F], v [F] -> [T, S]; safe [], whether |k| stays below its LIMIT."""
  return _value(q, k, v, safe)


def _forward(q, k, v, safe):
  return _value(q, k, v, safe), (q, k, v, safe)


def _backward(saved, g):
  return *_slopes(*saved, g), None


tanh_sum.defvjp(_forward, _backward)


class Terms(NamedTuple):
  """Terms of sums as fractions (numerator, denominator): half is w (1 - tanh) / 2, slope is w tanh' / 4."""

  half: Callable
  slope: Callable


def _ratio(x, y):
  return jnp.minimum(x * y, jnp.exp(2 * jnp.asarray(LIMITS[x.dtype][1], x.dtype)))


def _factored_slope(x, y, w):
  ratio = _ratio(x, y)
  return w * ratio, (1 + ratio) ** 2


def _plain_half(x, y, w):
  tanh = jnp.tanh(x + y)
  return w * (1 - tanh) / 2, jnp.ones_like(tanh)


def _plain_slope(x, y, w):
  tanh = jnp.tanh(x + y)
  return w * (1 - tanh**2) / 4, jnp.ones_like(tanh)


FACTORED = Terms(lambda x, y, w: (w, 1 + _ratio(x, y)), _factored_slope)
PLAIN = Terms(_plain_half, _plain_slope)


def _divide(fractions: list) -> jax.Array:
  """The sum of fractions with one division."""
  while len(fractions) > 1:
    pairs = zip(fractions[::2], fractions[1::2], strict=True)
    fractions = [(n1 * d2 + n2 * d1, d1 * d2) for (n1, d1), (n2, d2) in pairs]
  return fractions[0][0] / fractions[0][1]


def _contract(term: Callable, group: int, *moving: jax.Array) -> jax.Array:
  """Σ_i term(*(x[i] for x in moving)), in passes of at most UNROLL terms over the whole result."""
  size = moving[0].shape[0]
  passes = max(2, -(-size // UNROLL))  # of one pass the compiler would make no loop, and keep what passes share
  terms = group * max(1, -(-size // (passes * group)))
  missing = passes * terms - size
  padded = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in moving]  # a weight of 0 adds 0
  parts = [x.reshape(passes, terms, *x.shape[1:]) for x in padded]
  result = jax.eval_shape(lambda: _divide([term(*(x[0] for x in padded))]))

  def one_pass(total, part):
    fractions = [term(*(x[i] for x in part)) for i in range(terms)]
    return total + sum(_divide(fractions[i : i + group]) for i in range(0, terms, group)), None

  start = vary_like(jnp.zeros(result.shape, result.dtype), *moving)
  return jax.lax.scan(one_pass, start, parts)[0]


def _half_sum(terms: Terms, q, k, v) -> jax.Array:
  """Σ_f v_f (1 - tanh) / 2: [..., T, S]. Each pass adds some features to the whole of it."""
  first = lambda x: jnp.moveaxis(x, -1, 0)
  return _contract(terms.half, 4, first(q)[..., None], first(k)[..., None, :], first(v)[..., None, None])


def _slope_sums(terms: Terms, q, k, g) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Σ_s g tanh' / 4 [..., T, F], Σ_t g tanh' / 4 [..., S, F], Σ_ts g (1 - tanh) / 2 [..., F]."""
  each = lambda x: jnp.moveaxis(x, -2, 0)[..., None, :]  # [n, ..., 1, F]
  over_t = each(q), jnp.moveaxis(g, -2, 0)[..., None]
  over_s = each(k), jnp.moveaxis(g, -1, 0)[..., None]
  to_k = _contract(lambda x, w: terms.slope(x, k, w), 2, *over_t)
  to_q = _contract(lambda x, w: terms.slope(x, q, w), 2, *over_s)
  return to_q, to_k, _contract(lambda x, w: terms.half(x, q, w), 4, *over_s).sum(-2)


def _either(sums: Callable, q, k, safe, *rest):
  """sums(terms, q, k, *rest) of exponentials where all keys are in range, of the plain formula where some are not."""
  limit, one = LIMITS[q.dtype]
  # Out here, or they would be fused into the loops and computed in each pass. tanh is ±1 for queries behind the clip.
  a = jnp.exp(2 * jnp.clip(q, -limit - one, limit + one))
  b = jnp.exp(2 * jnp.clip(k, -limit, limit))
  factored = lambda q, k, a, b, *rest: sums(FACTORED, a, b, *rest)
  plain = lambda q, k, a, b, *rest: sums(PLAIN, q, k, *rest)
  return jax.lax.cond(jnp.all(safe), factored, plain, q, k, a, b, *rest)


def _largest(x: jax.Array, *axes: int) -> jax.Array:
  """The largest |x| over some axes; 1 where that is 0 or not finite, or there is none."""
  size = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0.0)
  return jnp.where((size > 0) & jnp.isfinite(size), size, 1.0)


def _value_of(q, k, v, safe):
  size = _largest(v, -1)  # numerators are products with several denominators: large weights would overflow them
  return jnp.sum(v, -1)[..., None, None] - 2 * size[..., None] * _either(_half_sum, q, k, safe, v / size)


def _slopes_of(q, k, v, safe, g):
  size = _largest(g, -1, -2)
  to_q, to_k, halves = _either(_slope_sums, q, k, safe, g / size)
  scale = 4 * v[..., None, :] * size
  return scale * to_q, scale * to_k, jnp.sum(g, (-1, -2))[..., None] - 2 * size[..., 0] * halves


def _batched(fn: Callable) -> Callable:
  """`fn`, which takes leading axes, under vmap as itself with one more, so that `cond` stays a choice."""
  mapped = custom_vmap(fn)

  @mapped.def_vmap
  def rule(size, axes, *args):
    whole = [x if on else jnp.broadcast_to(x[None], (size, *x.shape)) for x, on in zip(args, axes, strict=True)]
    out = mapped(*whole)
    return out, jax.tree.map(lambda _: True, out)

  return mapped


_slopes = _batched(_slopes_of)
_value = _batched(_value_of)
