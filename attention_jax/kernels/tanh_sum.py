"""Σ_f v_f tanh(q_tf + k_sf) for all t and s, without the array [T, S, F].

The loops evaluate no transcendental function, unless the keys have a very wide range. With a = e^{2q} and b = e^{2k},
computed once per query and once per key, tanh(q + k) = 1 - 2u and its slope is 4 u (1 - u), where u = 1 / (1 + a b).
The fractions of a group are added over a common denominator, v₁/y₁ + v₂/y₂ = (v₁ y₂ + v₂ y₁) / (y₁ y₂), so that one
division serves several terms of a sum.

Safe for any input. Weights v and cotangents are divided by the largest of them. Keys are centred, feature by feature,
on the middle of their range (the centre is subtracted from the keys and added to the query), and a b is capped where
tanh is 1 to the last bit. This requires that no feature of the keys spans more than 60 (in float32; twice
`Limits.key`); for wider ranges the same loops use tanh itself. In float32 the error of a tanh is at most about
(2 + |q'| + |k'|) 2⁻²³, where q' and k' are the centred q and k, and |q'| is clipped to 40.5.

Under vmap the loops get leading axes, the same for all arrays. It has first derivatives in reverse
mode only.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attention_jax.functional.masking import accumulation_dtype, vary_alike, vary_like
from attention_jax.kernels.derivatives import reverse_mode_only

UNROLL = 16  # maximum number of terms added in one pass over the result: memory traffic is then negligible
GROUP_VALUE = 4  # fractions per division in sums of tanh; all group sizes are powers of 2
GROUP_SLOPE = 2  # the same in sums of slopes of tanh


class Limits(NamedTuple):
  """Ranges of a floating type.

  Attributes:
    key: the largest |k'| for which the loops use exponentials.
    saturation: an x from which on tanh(x) is 1 to the last bit.
  """

  key: float
  saturation: float


LIMITS = {jnp.dtype(jnp.float32): Limits(30.0, 10.5), jnp.dtype(jnp.float64): Limits(150.0, 20.0)}


def scores(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the sums for all queries and keys. Masked keys do not influence the results of the other keys.

  Args:
    q: [T, F].
    k: [S, F].
    v: [F].
    mask: [S], True = unmasked.

  Returns:
    [T, S], float32 or float64; entries of masked keys have no meaning.
  """
  dtype = accumulation_dtype(q, k, v)
  unmasked = mask[:, None]
  k = k.astype(dtype)
  constant_k = jax.lax.stop_gradient(k)
  high = jnp.max(jnp.where(unmasked, constant_k, -jnp.inf), axis=0)
  low = jnp.min(jnp.where(unmasked, constant_k, jnp.inf), axis=0)
  has_unmasked = jnp.any(mask)
  # False also if an unmasked key is not finite: tanh itself is then right for infinities and propagates NaN.
  in_range = jnp.all(jnp.where(has_unmasked, high - low, 0.0) <= 2 * LIMITS[jnp.dtype(dtype)].key)
  centre = jnp.where(has_unmasked & in_range, (low + high) / 2, 0.0)
  centred = jnp.where(unmasked, k - centre[None], 0.0)
  inputs = reverse_mode_only('factored', (q.astype(dtype) + centre[None], centred, v.astype(dtype), in_range))
  return tanh_sum(*vary_alike(inputs))


@jax.custom_vjp
def tanh_sum(q: jax.Array, k: jax.Array, v: jax.Array, in_range: jax.Array) -> jax.Array:
  """Returns the sums; `q` and `k` are shifted by the centre of the keys, in opposite directions.

  Args:
    q: [T, F].
    k: [S, F], centred if `in_range`, else not shifted.
    v: [F].
    in_range: bool [], whether |k| is at most its limit everywhere.

  Returns:
    [T, S].
  """
  return _value(q, k, v, in_range)


def _tanh_sum_fwd(q, k, v, in_range):
  return _value(q, k, v, in_range), (q, k, v, in_range)


def _tanh_sum_bwd(residuals, g):
  return *_gradients(*residuals, g), None


tanh_sum.defvjp(_tanh_sum_fwd, _tanh_sum_bwd)


class Terms(NamedTuple):
  """Terms (x, y, w) -> (numerator, denominator) of sums of fractions.

  x and y are entries of a query and of a key, in either order: their exponentials in FACTORED, the entries themselves
  in PLAIN. The weight w is an entry of v or of a cotangent.

  Attributes:
    half: w (1 - tanh) / 2.
    slope: w tanh' / 4.
  """

  half: Callable
  slope: Callable


def _capped_product(x, y):
  """The product a b of exponentials, capped where tanh is 1."""
  return jnp.minimum(x * y, jnp.exp(2 * jnp.asarray(LIMITS[x.dtype].saturation, x.dtype)))


def _factored_half(x, y, w):
  return w, 1 + _capped_product(x, y)


def _factored_slope(x, y, w):
  product = _capped_product(x, y)
  return w * product, (1 + product) ** 2


def _plain_half(x, y, w):
  tanh = jnp.tanh(x + y)
  return w * (1 - tanh) / 2, jnp.ones_like(tanh)


def _plain_slope(x, y, w):
  tanh = jnp.tanh(x + y)
  return w * (1 - tanh**2) / 4, jnp.ones_like(tanh)


FACTORED = Terms(_factored_half, _factored_slope)  # of the exponentials a and b of queries and keys
PLAIN = Terms(_plain_half, _plain_slope)  # of queries and keys themselves


def _sum_fractions(fractions: Sequence) -> jax.Array:
  """The sum of fractions (numerator, denominator) with a single division; their number is a power of 2."""
  while len(fractions) > 1:
    pairs = zip(fractions[::2], fractions[1::2], strict=True)
    fractions = [(n1 * d2 + n2 * d1, d1 * d2) for (n1, d1), (n2, d2) in pairs]
  numerator, denominator = fractions[0]
  return numerator / denominator


def _contract(term: Callable, group_size: int, *arrays: jax.Array) -> jax.Array:
  """Σ_i term(*(x[i] for x in arrays)), in passes of at most UNROLL terms over the whole result.

  Args:
    term: (*entries) -> (numerator, denominator).
    group_size: number of fractions per division, a power of 2.
    *arrays: arrays of the same length; the last holds weights, for which 0 gives a term of 0.
  """
  size = arrays[0].shape[0]
  # At least 2 passes: XLA unrolls a loop of one pass, and then stores intermediate arrays.
  passes = max(2, -(-size // UNROLL))
  terms_per_pass = group_size * max(1, -(-size // (passes * group_size)))
  missing = passes * terms_per_pass - size
  padded = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in arrays]
  parts = [x.reshape(passes, terms_per_pass, *x.shape[1:]) for x in padded]
  result = jax.eval_shape(lambda: _sum_fractions([term(*(x[0] for x in padded))]))

  def add_pass(total, part):
    fractions = [term(*(x[i] for x in part)) for i in range(terms_per_pass)]
    groups = [fractions[i : i + group_size] for i in range(0, terms_per_pass, group_size)]
    return total + sum(_sum_fractions(group) for group in groups), None

  start = vary_like(jnp.zeros(result.shape, result.dtype), *arrays)
  return jax.lax.scan(add_pass, start, parts)[0]


def _half_sum(terms: Terms, q, k, v) -> jax.Array:
  """Σ_f v_f (1 - tanh) / 2: [..., T, S]. Each pass adds some features to the whole result."""
  q = jnp.moveaxis(q, -1, 0)[..., None]
  k = jnp.moveaxis(k, -1, 0)[..., None, :]
  v = jnp.moveaxis(v, -1, 0)[..., None, None]
  return _contract(terms.half, GROUP_VALUE, q, k, v)


def _gradient_sums(terms: Terms, q, k, g) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Σ_s g tanh' / 4 [..., T, F], Σ_t g tanh' / 4 [..., S, F], Σ_ts g (1 - tanh) / 2 [..., F]."""
  queries = jnp.moveaxis(q, -2, 0)[..., None, :]  # [T, ..., 1, F]
  g_by_query = jnp.moveaxis(g, -2, 0)[..., None]  # [T, ..., S, 1]
  keys = jnp.moveaxis(k, -2, 0)[..., None, :]  # [S, ..., 1, F]
  g_by_key = jnp.moveaxis(g, -1, 0)[..., None]  # [S, ..., T, 1]
  dk = _contract(lambda x, w: terms.slope(x, k, w), GROUP_SLOPE, queries, g_by_query)
  dq = _contract(lambda x, w: terms.slope(x, q, w), GROUP_SLOPE, keys, g_by_key)
  halves = _contract(lambda x, w: terms.half(x, q, w), GROUP_VALUE, keys, g_by_key)
  return dq, dk, halves.sum(-2)


def _factored_or_plain(sums: Callable, q, k, in_range, *args):
  """sums(terms, q, k, *args), with exponentials if the keys of all sequences are in range, else with tanh itself."""
  limits = LIMITS[q.dtype]
  # Computed outside of the branches: XLA would fuse exponentials into the loops and recompute them in each pass.
  # Clipping q changes no tanh: beyond it tanh is ±1 for every key in range.
  limit = limits.key + limits.saturation
  exp_q = jnp.exp(2 * jnp.clip(q, -limit, limit))
  exp_k = jnp.exp(2 * jnp.clip(k, -limits.key, limits.key))

  def factored(q, k, exp_q, exp_k, *args):
    return sums(FACTORED, exp_q, exp_k, *args)

  def plain(q, k, exp_q, exp_k, *args):
    return sums(PLAIN, q, k, *args)

  return jax.lax.cond(jnp.all(in_range), factored, plain, q, k, exp_q, exp_k, *args)


def _max_abs(x: jax.Array, *axes: int) -> jax.Array:
  """The largest |x| over some axes; 1 where that is 0 or not finite, or the axes are empty."""
  largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0.0)
  return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)


def _batched(fn: Callable) -> Callable:
  """Wraps a function of arrays with leading axes: vmap adds one more, so that `cond` is not turned into a select."""
  batched_fn = custom_vmap(fn)

  @batched_fn.def_vmap
  def rule(size, is_mapped, *args):
    arrays = [
      x if mapped else jnp.broadcast_to(x[None], (size, *x.shape)) for x, mapped in zip(args, is_mapped, strict=True)
    ]
    results = batched_fn(*arrays)
    return results, jax.tree.map(lambda _: True, results)

  return batched_fn


@_batched
def _value(q, k, v, in_range):
  """Σ_f v_f tanh = Σ_f v_f - 2 Σ_f v_f (1 - tanh) / 2: [..., T, S]."""
  largest = _max_abs(v, -1)  # large weights would overflow: numerators are products with several denominators
  halves = _factored_or_plain(_half_sum, q, k, in_range, v / largest)
  return jnp.sum(v, -1)[..., None, None] - 2 * largest[..., None] * halves


@_batched
def _gradients(q, k, v, in_range, g):
  """The gradients of q, k and v, from g [..., T, S]."""
  largest = _max_abs(g, -1, -2)
  dq, dk, halves = _factored_or_plain(_gradient_sums, q, k, in_range, g / largest)
  scale = 4 * v[..., None, :] * largest
  return scale * dq, scale * dk, jnp.sum(g, (-1, -2))[..., None] - 2 * largest[..., 0] * halves
