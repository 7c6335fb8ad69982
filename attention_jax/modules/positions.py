"""Where a token stands: what is added to its embedding, or what attention of a sequence to itself makes of distances.

Every module of POSITIONS has the same methods, each of which leaves things as they are unless it says otherwise:

- check(size): raises a UserError if there are no positions for so long a sequence;
- embed(x [B, T, D], at [T]) -> x: of the tokens that stand at `at`, before the first layer;
- rotate(x [B, N, T, F], at [T]) -> x: of projected queries and keys;
- bias(query [B, N, T, F], at [T], size) -> [N, T, S] or [B, N, T, S], added to the scores of positions 0 ... size - 1;
- shift(weights [B, N, T, S], at [T]) -> [B, N, T, F], added to the contexts of the heads.

Positions count from 0. N heads, F features of each.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.errors import UserError
from attention_jax.functional.masking import relative_positions
from attention_jax.specs import Positive, Size, bind, schema_of


class Positions(nn.Module):
  """No positions: what is attended to is a set.

  Attributes:
    heads, features: N and F of the attention that asks.
    bidirectional: whether queries see what comes after them.
    requires_product: whether it works on products q . k alone, where q and k are the projected query and key.
    in_attention: whether attention has to ask it; if not, it is the embeddings that tell of positions.
    needs_weights: whether `shift` needs the weights.
    shared_across_layers: whether all layers have the same parameters.
  """

  heads: Size = 1
  features: Size = 64
  bidirectional: bool = True
  requires_product = False
  in_attention = False
  needs_weights = False
  shared_across_layers = False

  def check(self, size: int) -> None:
    """Raises: UserError where there are no positions for sequences of this size."""

  def embed(self, x: jax.Array, at: jax.Array) -> jax.Array:
    return x

  def rotate(self, x: jax.Array, at: jax.Array) -> jax.Array:
    return x

  def bias(self, query: jax.Array, at: jax.Array, size: int) -> jax.Array | None:
    return None

  def shift(self, weights: jax.Array, at: jax.Array) -> jax.Array | None:
    return None


class Sinusoidal(Positions):
  """x_t + [sin(t / 10000^(2i/D)); cos(t / 10000^(2i/D))]. Vaswani et al. 2017, section 3.5.

  Sines stand before cosines instead of between them, as in the paper's own program.
  """

  def embed(self, x, at):
    return x + _sinusoids(at, x.shape[-1]).astype(x.dtype)[None]


class LearnedPositions(Positions):
  """x_t + p_t, a learned vector for each position. Gehring et al. 2017, section 3.1.

  Attributes: max_positions, how many there are.
  """

  max_positions: Size = 512

  def check(self, size):
    if size > self.max_positions:
      raise UserError(f"position 'learned': max_positions={self.max_positions}, got a sequence of {size}")

  @nn.compact
  def embed(self, x, at):
    self.check(at.shape[0])
    table = self.param('table', nn.initializers.normal(x.shape[-1] ** -0.5), (self.max_positions, x.shape[-1]))
    return x + table.astype(x.dtype)[at][None]


class Shaw(Positions):
  """e_ts = (q_t · (k_s + a_{s-t})) / √F and z_t = Σ_s w_ts (v_s + b_{s-t}). Shaw et al. 2018, equations 3 and 4.

  Distances are clipped at max_distance; the heads of a layer share vectors. What q_t · a adds is a bias here, so that
  it goes with every score.
  """

  max_distance: Size = 16
  in_attention = True
  needs_weights = True

  def setup(self):
    init, shape = nn.initializers.glorot_uniform(), (2 * self.max_distance + 1, self.features)
    self.of_keys = self.param('of_keys', init, shape)
    self.of_values = self.param('of_values', init, shape)

  def _distances(self, at, size):
    return jnp.clip(relative_positions(at, size), -self.max_distance, self.max_distance) + self.max_distance

  def bias(self, query, at, size):
    measured = jnp.einsum('bntf,rf->bntr', query, self.of_keys.astype(query.dtype)) * query.shape[-1] ** -0.5
    index = jnp.broadcast_to(self._distances(at, size)[None, None], (*query.shape[:2], at.shape[0], size))
    return jnp.take_along_axis(measured, index, axis=-1)

  def shift(self, weights, at):
    vectors = self.of_values.astype(weights.dtype)[self._distances(at, weights.shape[-1])]
    return jnp.einsum('bnts,tsf->bntf', weights, vectors)


class Buckets(Positions):
  """A learned number for each head and bucket of distances, added to the scores. Raffel et al. 2020, section 2.1.

  Half of the buckets are one distance each, the others grow with its logarithm up to max_distance, as in the program of
  the paper. All layers share them.
  """

  buckets: Size = 32
  max_distance: Size = 128
  in_attention = True
  shared_across_layers = True

  @nn.compact
  def bias(self, query, at, size):
    least = 4 if self.bidirectional else 2
    if self.buckets < least or self.max_distance <= self.buckets // least:
      possible = f'{least} buckets or more, and more than 1 / {least} of them as max_distance'
      raise UserError(f"position 't5': buckets={self.buckets}, max_distance={self.max_distance}; expected {possible}")
    table = self.param('table', nn.initializers.normal(self.features**-0.5), (self.heads, self.buckets))
    return table[:, bucket_of(relative_positions(at, size), self.buckets, self.max_distance, self.bidirectional)]


class Rotary(Positions):
  """q and k with each pair of features (i, i + F/2) turned by t / base^(2i/F). Su et al. 2021, equation 34.

  Pairs are halves instead of neighbours, as in most programs since: a fixed permutation of the features.
  """

  base: Positive = 10000.0
  requires_product = True
  in_attention = True

  def rotate(self, x, at):
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
      raise UserError(f"position 'rope' turns pairs of features; got {x.shape[-1]} features a head")
    table = _sinusoids(at, x.shape[-1], self.base)[None, None]
    sin, cos = table[..., :half], table[..., half:]
    one, two = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x.dtype)


class Alibi(Positions):
  """e_ts - m_n |t - s|, m_n = 2^(-8 n / N) of head n = 1 ... N. Press, Smith & Lewis 2022, section 3.

  The paper looks back only; where queries see what comes after them too, that counts as far as what came before.
  """

  in_attention = True

  def bias(self, query, at, size):
    slopes = jnp.asarray(alibi_slopes(self.heads), jnp.float32)
    return -slopes[:, None, None] * jnp.abs(relative_positions(at, size))[None]


POSITIONS: Mapping[str, type[Positions]] = {
  'none': Positions,
  'sinusoidal': Sinusoidal,
  'learned': LearnedPositions,
  'shaw': Shaw,
  't5': Buckets,
  'rope': Rotary,
  'alibi': Alibi,
}


SET_BY_ATTENTION = ('heads', 'features', 'bidirectional')  # fields of positions that attention says


def parse_position(spec: str) -> tuple[type[Positions], dict[str, Any]]:
  """The row of POSITIONS that a spec such as 't5(buckets=16)' names, and the options it is to be made with.

  Raises: UserError for an unknown name or option.
  """
  _, cls, options = bind(spec, POSITIONS, 'position', lambda cls: schema_of(cls, {*SET_BY_ATTENTION, 'parent', 'name'}))
  return cls, options


def alibi_slopes(heads: int) -> list[float]:
  """The slopes of N heads. Where N is no power of 2: those of the power below, and of twice as many every other one."""
  geometric = lambda n: [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
  below = 2 ** (heads.bit_length() - 1)
  return geometric(below) + geometric(2 * below)[0::2][: heads - below]


def bucket_of(offset: jax.Array, buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
  """The bucket of each offset s - t. Raffel et al. 2020, section 2.1, and the program of the paper."""
  ahead = 0
  if bidirectional:
    buckets //= 2
    ahead = jnp.where(offset > 0, buckets, 0)
    distance = jnp.abs(offset)
  else:
    distance = jnp.maximum(-offset, 0)
  exact = buckets // 2
  far = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
  far = jnp.minimum(exact + far.astype(jnp.int32), buckets - 1)
  return ahead + jnp.where(distance < exact, distance, far)


def _sinusoids(at: jax.Array, features: int, base: Positive = 10000.0) -> jax.Array:
  """[T, features]: sines, then cosines; float32 whatever else is."""
  half = -(-features // 2)
  angles = at[:, None].astype(jnp.float32) * base ** (-2.0 / features * jnp.arange(half, dtype=jnp.float32))[None]
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[:, :features]
