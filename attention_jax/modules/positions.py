"""Positions of tokens: vectors added to embeddings, or functions of distances or contents in self-attention.

Every module of POSITIONS has the same methods; the default of each has no effect:

- check(size): raises UserError if sequences of this size are too long;
- embed(x [B, T, D], positions [T] or [B, T]) -> x: adds positions to embeddings, before the first layer;
- rotate(x [B, N, T, F], positions [T]) -> x: rotates projected queries and keys;
- annotate(encoded [B, S, D], heads) -> [B, G, S, `annotations`]: numbers that `bias` needs of every key of G heads;
- bias(query [B, N, T, F], key [B, G, S, F + `annotations`], positions [T], mask [B, 1 or T, S]) -> [N, T, S] or
  [B, N, T, S], added to the scores; what reads the content of keys skips those that are masked for the query;
- shift(weights [B, N, T, S], positions [T]) -> [B, N, T, F], added to the contexts of the heads.

`positions` are the positions of the tokens or queries, counted from 0. In rows of several segments, those of `embed`
restart in each segment; those in attention, where distances alone matter, do not. N is the number of heads, in `rotate`
those of queries or of keys; F is the number of features of a head.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.errors import UserError
from attention_jax.functional.masking import accumulation_dtype
from attention_jax.modules.linear import Dense
from attention_jax.specs import Range, Size, bind, schema_of


class Positions(nn.Module):
  """No positions: without a causal mask or a window, attention is independent of the order of the tokens.

  Attributes:
    heads, features: number N of heads, and features F of each.
    bidirectional: whether queries may attend to later positions.
    requires_rotation_invariance: whether the score must be unchanged by a common rotation of the projected query
      and key.
    depends_on: which of `heads` and `features` must equal those of the attention.
    in_attention: whether attention applies the positions; otherwise they are added to embeddings.
    annotations: number of features that `annotate` appends to every key, which scores do not read.
    needs_weights: whether `shift` needs the weights.
    keys_in_order: whether the keys of every sequence must be at positions 0 ... S - 1.
    shared_across_layers: whether all layers share the parameters of positions in attention.
  """

  heads: Size = 1
  features: Size = 64
  bidirectional: bool = True
  requires_rotation_invariance = False
  depends_on = ()
  in_attention = False
  annotations = 0
  needs_weights = False
  keys_in_order = False
  shared_across_layers = False

  def check(self, size: int) -> None:
    """Raises UserError if sequences of this size are too long."""

  def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Adds positions [T] or [B, T] to embeddings x [B, T, D]."""
    return x

  def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates projected queries or keys x [B, N, T, F] at positions [T] or [B, T]."""
    return x

  def annotate(self, encoded: jax.Array, heads: int) -> jax.Array:
    """Returns the annotations of keys, [B, G, S, `annotations`].

    Args:
      encoded: the vectors that keys are projected from, [B, S, D].
      heads: number G of heads of keys.
    """
    raise NotImplementedError

  def bias(
    self,
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    key_positions: jax.Array | None = None,
  ) -> jax.Array | None:
    """Returns the bias of the scores, [N, T, S] or [B, N, T, S], or None.

    Args:
      query: projected queries, [B, N, T, F].
      key: projected keys with their annotations, [B, G, S, F + `annotations`]; N is a multiple of G.
      positions: positions of the queries, int32 [T] or [B, T].
      mask: True = may be attended to, [B, T, S] or, if all queries share it, [B, 1, S].
      key_positions: positions of the keys, int32 [S] or [B, S]; None for 0 ... S - 1.
    """
    return None

  def shift(self, weights: jax.Array, positions: jax.Array, key_positions: jax.Array | None = None) -> jax.Array | None:
    """Returns an offset of the contexts, [B, N, T, F], or None. Arguments: see `bias`."""
    return None


class Sinusoidal(Positions):
  """x_t + [sin(t / 10000^(2i/D)); cos(t / 10000^(2i/D))]. Vaswani et al. 2017, section 3.5.

  All sines precede all cosines, as in the published code of the paper; its text interleaves them.
  """

  def embed(self, x, positions):
    return x + _sinusoids(jnp.atleast_2d(positions), x.shape[-1]).astype(x.dtype)


class LearnedPositions(Positions):
  """x_t + p_t, a learned vector for each position. Gehring et al. 2017, section 3.1.

  Attributes:
    max_positions: number of learned vectors.
  """

  max_positions: Size = 512

  def check(self, size):
    if size > self.max_positions:
      raise UserError(
        f"position 'learned': sequences must have at most max_positions={self.max_positions} positions, got {size}"
      )

  @nn.compact
  def embed(self, x, positions):
    self.check(positions.shape[-1])
    table = self.param('table', nn.initializers.normal(x.shape[-1] ** -0.5), (self.max_positions, x.shape[-1]))
    return x + table.astype(x.dtype)[jnp.atleast_2d(positions)]


class Shaw(Positions):
  """e_ts = (q_t · (k_s + a_{s-t})) / √F and z_t = Σ_s w_ts (v_s + b_{s-t}). Shaw et al. 2018, equations 3 and 4.

  Distances are clipped at max_distance; the heads of a layer share the vectors a and b. The term q_t · a_{s-t} / √F is
  added as a bias here, so that it can be combined with every score.
  """

  max_distance: Size = 16
  depends_on = ('features',)
  in_attention = True
  needs_weights = True

  def setup(self):
    init = nn.initializers.glorot_uniform()
    shape = (2 * self.max_distance + 1, self.features)
    self.of_keys = self.param('of_keys', init, shape)
    self.of_values = self.param('of_values', init, shape)

  def _distance_index(self, positions, size, key_positions):
    """Row of the tables for each query and position, [T, S] or [B, T, S]."""
    offsets = _offsets(positions, size, key_positions)
    return jnp.clip(offsets, -self.max_distance, self.max_distance) + self.max_distance

  def bias(self, query, key, positions, mask, key_positions=None):
    # In float32, as the gradient of each product is a sum over all positions at its distance.
    dtype = accumulation_dtype(query)
    products = jnp.einsum('bntf,rf->bntr', query, self.of_keys.astype(query.dtype), preferred_element_type=dtype)
    products = products * query.shape[-1] ** -0.5
    index = _for_all_heads(self._distance_index(positions, key.shape[-2], key_positions))
    return jnp.take_along_axis(products, jnp.broadcast_to(index, (*query.shape[:2], *index.shape[2:])), axis=-1)

  def shift(self, weights, positions, key_positions=None):
    index = self._distance_index(positions, weights.shape[-1], key_positions)
    # Cast here and not in the table, so that the gradients of equal distances are added in float32.
    vectors = self.of_values[index].astype(weights.dtype)
    rows = 'b' if index.ndim == 3 else ''
    return jnp.einsum(f'bnts,{rows}tsf->bntf', weights, vectors)


class Buckets(Positions):
  """A learned scalar for each head and bucket of distances, added to the scores. Raffel et al. 2020, section 2.1.

  Half of the buckets hold one distance each; the others grow logarithmically up to max_distance, as in the published
  code of the paper. All layers share the parameters.
  """

  buckets: Size = 32
  max_distance: Size = 128
  depends_on = ('heads',)
  in_attention = True
  shared_across_layers = True

  @nn.compact
  def bias(self, query, key, positions, mask, key_positions=None):
    min_buckets = 4 if self.bidirectional else 2
    if self.buckets < min_buckets or self.max_distance <= self.buckets // min_buckets:
      raise UserError(
        f"position 't5': buckets must be at least {min_buckets} and max_distance greater than buckets / {min_buckets}, "
        f'got buckets={self.buckets} and max_distance={self.max_distance}'
      )
    table = self.param('table', nn.initializers.normal(self.features**-0.5), (self.heads, self.buckets))
    offsets = _offsets(positions, key.shape[-2], key_positions)
    buckets = bucket_of(offsets, self.buckets, self.max_distance, self.bidirectional)
    return jax.vmap(lambda of_head: of_head[buckets], out_axes=-3)(table)


class Rotary(Positions):
  """q and k with each pair of features (i, i + F/2) rotated by t / base^(2i/F). Su et al. 2021, equation 34.

  The paper pairs neighbouring features. Most implementations pair the two halves instead, which differs by a fixed
  permutation of the features.
  """

  base: Annotated[float, Range(1)] = 10000.0
  requires_rotation_invariance = True
  in_attention = True

  def rotate(self, x, positions):
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
      raise UserError(f"position 'rope': the number of features per head must be even, got {x.shape[-1]}")
    table = _for_all_heads(_sinusoids(positions, x.shape[-1], self.base))
    sin = table[..., :half]
    cos = table[..., half:]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Alibi(Positions):
  """e_ts - m_n |t - s|, m_n = 2^(-8 n / N) of head n = 1 ... N. Press, Smith & Lewis 2022, section 3.

  If N is not a power of 2, see `alibi_slopes`. The paper has causal attention only; in bidirectional attention, later
  positions are penalised by their distance, like earlier ones.
  """

  depends_on = ('heads',)
  in_attention = True

  def bias(self, query, key, positions, mask, key_positions=None):
    distances = jnp.abs(_offsets(positions, key.shape[-2], key_positions))
    return jax.vmap(lambda slope: -slope * distances, out_axes=-3)(jnp.asarray(alibi_slopes(self.heads), jnp.float32))


class Forgetting(Positions):
  """e_ts + Σ_{s<l≤t} log f_l, f_l = σ(w · x_l + b): a forget gate per head. Lin et al. 2025, Forgetting Transformer.

  The input x_l of the layer determines how much every later query forgets of what precedes l. The paper has causal
  attention only; in bidirectional attention, the gates between query and position count in both directions. Gates of
  positions that are masked for the query do not count. Heads that share their keys share a gate. The position of a
  query must be one of 0 ... S - 1; others have a bias of NaN.
  """

  in_attention = True
  keys_in_order = True
  annotations = 1

  @nn.compact
  def annotate(self, encoded, heads):
    gates = Dense(heads, True, accumulation_dtype(encoded), name='gate')(encoded)
    return jax.nn.log_sigmoid(gates).swapaxes(1, 2)[..., None]

  def bias(self, query, key, positions, mask, key_positions=None):
    log_gates = key[..., None, :, -1].astype(accumulation_dtype(key))
    totals = jnp.cumsum(jnp.where(mask[:, None], log_gates, 0.0), axis=-1)  # [B, G, 1 or T, S]
    totals = jnp.broadcast_to(totals, (*totals.shape[:2], positions.shape[-1], totals.shape[-1]))
    index = _for_all_heads(positions[..., None])
    of_queries = jnp.take_along_axis(totals, index, axis=-1, mode='fill', fill_value=jnp.nan)
    forgotten = -jnp.abs(jnp.where(index < 0, jnp.nan, of_queries) - totals)  # by default, -1 is the last position
    return jnp.repeat(forgotten, query.shape[1] // key.shape[1], axis=1)


class Contextual(Positions):
  """e_ts + q_t · c_p / √F, p = Σ_{s≤l≤t} σ(q_t · k_l / √F): counts positions that match. Golovneva et al. 2024, CoPE.

  The vector c_p is interpolated between the learned vectors of the two nearest integers, of which there are
  max_positions. The heads of a layer share these vectors, which are zeros initially, as in the published code. The
  paper has causal attention only; in bidirectional attention, p of a later position s counts the positions from t + 1
  to s. Positions that are masked for the query do not count.

  Attributes:
    max_positions: number of learned vectors.
  """

  max_positions: Size = 64
  depends_on = ('features',)
  in_attention = True
  keys_in_order = True

  @nn.compact
  def bias(self, query, key, positions, mask, key_positions=None):
    dtype = accumulation_dtype(query)
    table = self.param('table', nn.initializers.zeros_init(), (self.max_positions, self.features))
    key = jnp.repeat(key, query.shape[1] // key.shape[1], axis=1)
    query = query * query.shape[-1] ** -0.5
    gates = jax.nn.sigmoid(jnp.einsum('bntf,bnsf->bnts', query, key, preferred_element_type=dtype))
    gates = jnp.where(mask[:, None], gates, 0.0)
    is_later = _for_all_heads(_offsets(positions, key.shape[-2], key_positions)) > 0
    count = jax.lax.cumsum(jnp.where(is_later, 0.0, gates), axis=3, reverse=True)
    if self.bidirectional:
      count = jnp.where(is_later, jax.lax.cumsum(jnp.where(is_later, gates, 0.0), axis=3), count)
    count = jnp.minimum(count, self.max_positions - 1)
    products = jnp.einsum('bntf,pf->bntp', query, table.astype(query.dtype), preferred_element_type=dtype)
    lower = jnp.floor(jax.lax.stop_gradient(count)).astype(jnp.int32)
    share = count - lower
    at_lower, at_upper = (
      jnp.take_along_axis(products, jnp.minimum(index, self.max_positions - 1), axis=-1) for index in (lower, lower + 1)
    )
    return (1 - share) * at_lower + share * at_upper


POSITIONS: Mapping[str, type[Positions]] = {
  'none': Positions,
  'sinusoidal': Sinusoidal,
  'learned': LearnedPositions,
  'shaw': Shaw,
  't5': Buckets,
  'rope': Rotary,
  'alibi': Alibi,
  'forgetting': Forgetting,
  'contextual': Contextual,
}


def segment_positions(segments: jax.Array) -> jax.Array:
  """Returns the position of each token in its segment, for segments [B, T] of adjacent tokens with equal ids."""
  positions = jnp.arange(segments.shape[1])[None]
  is_first = jnp.diff(segments, axis=1, prepend=-1) != 0
  return positions - jax.lax.cummax(jnp.where(is_first, positions, 0), axis=1)


SET_BY_ATTENTION = ('heads', 'features', 'bidirectional')  # fields that no spec string may set


def parse_position(spec: str) -> tuple[type[Positions], dict[str, Any]]:
  """Returns the row of POSITIONS that a spec string such as 't5(buckets=16)' selects, and its options.

  Raises:
    UserError: as `specs.bind`.
  """
  _, cls, options = bind(spec, POSITIONS, 'position', lambda cls: schema_of(cls, {*SET_BY_ATTENTION, 'parent', 'name'}))
  return cls, options


def alibi_slopes(heads: int) -> list[float]:
  """Returns the slopes of N heads, 2^(-8 n / N) for n = 1 ... N.

  If N is not a power of 2, let P be the largest power of 2 below N. The slopes are those of P heads, followed by the
  first N - P of the slopes 1, 3, 5, ... of 2 P heads.
  """

  def geometric(n: int) -> list[float]:
    return [2.0 ** (-8 * (i + 1) / n) for i in range(n)]

  lower_power = 2 ** (heads.bit_length() - 1)
  return geometric(lower_power) + geometric(2 * lower_power)[0::2][: heads - lower_power]


def bucket_of(offset: jax.Array, buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
  """Returns the bucket of each offset s - t. Raffel et al. 2020, section 2.1, and the published code of the paper.

  Args:
    offset: s - t, position minus query, int32 of any shape.
    buckets: number of buckets.
    max_distance: distance from which on all offsets of a direction are in one bucket.
    bidirectional: whether half of the buckets are for later positions (s > t); otherwise those count as distance 0.

  Returns:
    Indices of buckets from 0, of the shape of `offset`.
  """
  first_bucket = 0
  if bidirectional:
    buckets //= 2
    first_bucket = jnp.where(offset > 0, buckets, 0)
    distance = jnp.abs(offset)
  else:
    distance = jnp.maximum(-offset, 0)
  exact = buckets // 2
  logarithmic = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
  logarithmic = jnp.minimum(exact + logarithmic.astype(jnp.int32), buckets - 1)
  return first_bucket + jnp.where(distance < exact, distance, logarithmic)


def _offsets(positions: jax.Array, size: int, key_positions: jax.Array | None) -> jax.Array:
  """Returns s - t for queries and keys at these positions, [T, S] or [B, T, S]; the keys of None at 0 ... size - 1."""
  keys = jnp.arange(size) if key_positions is None else key_positions
  if positions.ndim != keys.ndim:
    positions, keys = jnp.atleast_2d(positions), jnp.atleast_2d(keys)
  return keys[..., None, :] - positions[..., :, None]


def _for_all_heads(x: jax.Array) -> jax.Array:
  """Returns x [T, S] or [B, T, S] as [1 or B, 1, T, S]."""
  return x.reshape(-1, 1, *x.shape[-2:])


def _sinusoids(positions: jax.Array, features: int, base: float = 10000.0) -> jax.Array:
  """Sines, then cosines, of positions [..., T]: [..., T, features]; always float32."""
  half = -(-features // 2)
  frequencies = base ** (-2.0 / features * jnp.arange(half, dtype=jnp.float32))
  angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[..., :features]
