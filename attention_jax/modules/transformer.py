"""Transformer layers: a sequence looks at itself, by any score and any alignment, and then each position by itself.

Both methods of a decoder layer, all steps at once and one step with a cache, are the same three sublayers; they differ
in what is handed to them as the way to attend.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.attend import Memory
from attention_jax.functional.masking import window_mask
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import Dense
from attention_jax.modules.positions import Positions, parse_position
from attention_jax.specs import Count, Fraction, Size

EPSILON = 1e-5  # of normalisations


class Norm(NamedTuple):
  """A row of NORMS: what it does, in one line, and the module."""

  description: str
  module: Callable[..., nn.Module]


NORMS: Mapping[str, Norm] = {
  'layer': Norm('g (x - mean x) / std x + b. Ba, Kiros & Hinton 2016.', nn.LayerNorm),
  'rms': Norm('g x / √mean x². Zhang & Sennrich 2019.', nn.RMSNorm),
}


class Activation(NamedTuple):
  """A row of ACTIVATIONS, of feed-forward networks: what it does, in one line; gated, whether as act(x U) * (x W)."""

  description: str
  fn: Callable[[jax.Array], jax.Array]
  gated: bool = False


gelu = functools.partial(jax.nn.gelu, approximate=False)
ACTIVATIONS: Mapping[str, Activation] = {
  'relu': Activation('max(0, x U + b) V + c. Vaswani et al. 2017, equation 2.', jax.nn.relu),
  'gelu': Activation('gelu(x U + b) V + c, gelu(x) = x Φ(x). Hendrycks & Gimpel 2016.', gelu),
  'swiglu': Activation('(silu(x U) * x W) V. Shazeer 2020, equation 6.', jax.nn.silu, gated=True),
  'geglu': Activation('(gelu(x U) * x W) V. Shazeer 2020, equation 6.', gelu, gated=True),
}


def visibility_mask(at: jax.Array, size: int, *, causal: bool, window: int = 0, sinks: int = 0) -> jax.Array:
  """[T, S]: which of the positions 0 ... size - 1 the queries at `at` may see.

  Args:
    causal: nothing that comes after them.
    window: no position that is further away than this; 0 is no bound.
    sinks: the first positions, which are seen however far away (Xiao et al. 2024).
  """
  after = 0 if causal else size
  near = window_mask(size, window or size, min(window or size, after), at)
  return near | (window_mask(size, size, after, at) & (jnp.arange(size) < sinks)[None, :])


class FeedForward(nn.Module):
  """act(x U + b) V + c, for each position by itself. Vaswani et al. 2017, equation 2. No b and c where it is gated.

  Attributes: scale, of the variance of V at first.
  """

  features: int
  hidden: int
  activation: str = 'relu'
  scale: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    _, act, gated = ACTIVATIONS[choose(self.activation, ACTIVATIONS, 'activation')]
    glorot = lambda scale: nn.initializers.variance_scaling(scale, 'fan_avg', 'uniform')
    layer = lambda features, scale=1.0: Dense(features, not gated, self.dtype, kernel_init=glorot(scale))
    hidden = act(layer(self.hidden)(x))
    return layer(self.features, self.scale)(hidden * layer(self.hidden)(x) if gated else hidden)


class Residual(nn.Module):
  """x + drop(f(x)), normalised afterwards (Vaswani et al. 2017, section 3.1), or with f of the normalised x instead.

  Attributes: norm, a row of NORMS; first, whether to normalise what goes into f (Xiong et al. 2020, pre-norm).
  """

  norm: str = 'layer'
  first: bool = False
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, fn: Callable[[jax.Array], tuple[jax.Array, Any]], x: jax.Array, deterministic: bool):
    """fn(x) -> (y, anything); returns the new x and anything."""
    norm = normalise(self.norm, self.dtype)
    y, beside = fn(norm(x) if self.first else x)
    x = x + Dropout(self.dropout)(y, deterministic=deterministic)
    return (x if self.first else norm(x)), beside


def normalise(name: str, dtype) -> nn.Module:
  return NORMS[choose(name, NORMS, 'norm')].module(epsilon=EPSILON, dtype=dtype)


class EncoderLayer(nn.Module):
  """A sequence looks at itself, then each position by itself."""

  attention: Attention
  feed: FeedForward
  residual: Callable[[], Residual]

  def setup(self):
    self.residuals = [self.residual() for _ in range(2)]

  def __call__(self, x: jax.Array, mask: jax.Array, at: jax.Array, deterministic: bool) -> jax.Array:
    """x [B, S, D]; mask [B, S] or [B, S, S]; at [S]."""

    def look(x):
      return self.attention.parallel(x, self.attention.remember(x, mask, at), deterministic, at, return_weights=False)

    x, _ = self.residuals[0](look, x, deterministic)
    return self.residuals[1](lambda x: (self.feed(x), None), x, deterministic)[0]


class LayerCarry(NamedTuple):
  """What one step of a decoder layer hands to the next: keys and values of the steps so far [B, G, L, F], and the
  carries of its attentions, () where their queries may come in any order."""

  key: jax.Array
  value: jax.Array
  own: Any
  cross: Any


class DecoderLayer(nn.Module):
  """A sequence looks at itself, at the memory, then each position by itself."""

  attention: Attention
  cross: Attention
  feed: FeedForward
  residual: Callable[[], Residual]

  def setup(self):
    self.residuals = [self.residual() for _ in range(3)]

  def remember(self, encoded: jax.Array, mask: jax.Array, value: jax.Array) -> Memory:
    """What is looked at in every step, prepared once: encoded and value [B, S, D], mask [B, S]."""
    return self.cross.remember(encoded, mask, value=value)

  def start(self, memory: Memory, size: int, features: int) -> LayerCarry:
    """The carry before the first of `size` steps."""
    batch = memory.key.shape[0]
    nothing = jnp.zeros((batch, 1, features), self.attention.dtype)
    one = self.attention.remember(nothing, jnp.ones((batch, 1), bool), jnp.zeros((1,), jnp.int32))
    room = lambda x: jnp.zeros((*x.shape[:2], size, x.shape[-1]), x.dtype)
    cache = Memory(room(one.key), room(one.value), one.mask)
    carry_of = lambda attention, memory: attention.init_carry(memory) if attention.is_recurrent else ()
    return LayerCarry(cache.key, cache.value, carry_of(self.attention, cache), carry_of(self.cross, memory))

  def __call__(self, x: jax.Array, memory: Memory, mask: jax.Array, at: jax.Array, deterministic: bool):
    """All steps: x [B, T, D], mask [B, T, T] -> x, weights over the memory [B, N, T, S]."""

    def own(x):
      return self.attention.parallel(x, self.attention.remember(x, mask, at), deterministic, at, return_weights=False)

    def cross(x):
      context, weights = self.cross.parallel(x, memory, deterministic)
      return context, with_head_axis(weights, self.cross.heads)

    x, _, weights = self._through(x, own, cross, deterministic)
    return x, weights

  def step(self, carry: LayerCarry, x: jax.Array, memory: Memory, mask: jax.Array, at: jax.Array, deterministic: bool):
    """One step: x [B, D], mask [B, L], at [] -> the next carry, x, weights over the memory [B, N, S]."""

    def own(x):
      new = self.attention.remember(x[:, None], jnp.ones((x.shape[0], 1), bool), at[None])
      put = lambda cache, new: jax.lax.dynamic_update_slice_in_dim(cache, new, at, axis=2)
      cache = Memory(put(carry.key, new.key), put(carry.value, new.value), mask[:, None])
      after, context = attend_single_query(self.attention, carry.own, x, cache, deterministic, at)[:2]
      return context, (cache, after)

    def cross(x):
      after, context, weights = attend_single_query(self.cross, carry.cross, x, memory, deterministic)
      return context, (after, with_head_axis(weights, self.cross.heads))

    x, (cache, own_after), (cross_after, weights) = self._through(x, own, cross, deterministic)
    return LayerCarry(cache.key, cache.value, own_after, cross_after), x, weights

  def _through(self, x: jax.Array, own: Callable, cross: Callable, deterministic: bool):
    x, of_own = self.residuals[0](own, x, deterministic)
    x, of_cross = self.residuals[1](cross, x, deterministic)
    x, _ = self.residuals[2](lambda x: (self.feed(x), None), x, deterministic)
    return x, of_own, of_cross


def with_head_axis(weights: jax.Array, heads: int) -> jax.Array:
  """[B, N, ..., S] however many heads there are."""
  return weights if heads > 1 else weights[:, None]


def attend_single_query(
  attention: Attention, carry: Any, query: jax.Array, memory: Memory, deterministic: bool, at=None
):
  """-> the next carry, () if there is none to hand on, context, weights."""
  after, attended = attention(carry or attention.init_carry(memory), query, memory, deterministic, at)
  return (after if attention.is_recurrent else ()), *attended


class Stack(nn.Module):
  """What Transformer encoders and decoders share.

  What sublayers add is small at first: the variance of their last kernels is divided by how many there are (Radford et
  al. 2019, section 2.3). Without that, what all positions have in common, which attention that looks everywhere adds in
  every layer, drowns what tells them apart.

  Attributes:
    features, layers, heads: D, how many layers, and N.
    hidden: of the feed-forward networks.
    score, alignment, implementation, kv_heads: of the attention of a sequence to itself; see modules.attention.
    position: a spec of POSITIONS.
    window, sinks: of the attention of a sequence to itself, see `visibility_mask`.
    norm, norm_first, activation: rows of NORMS and ACTIVATIONS, and where norms stand; see Residual.
    dropout: on embeddings, before positions are added, and on what every sublayer gives.
    attention_dropout: on the weights of the attention to its own sequence.
    layer_dropout: how likely a whole layer is left out of a batch while training (Fan, Grave & Joulin 2020, LayerDrop).
      What it would have given is computed all the same.
  """

  features: Size = 512
  layers: Size = 6
  heads: Size = 8
  hidden: Size = 2048
  score: str = 'scaled_dot'
  alignment: str = 'softmax'
  implementation: str = 'xla'
  kv_heads: Count = 0
  attention_dropout: Fraction = 0.0
  layer_dropout: Fraction = 0.0
  position: str = 'sinusoidal'
  window: Count = 0
  sinks: Count = 0
  norm: str = 'layer'
  norm_first: bool = False
  activation: str = 'relu'
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32
  sublayers = 2  # of a layer

  def prepare(self, *, causal: bool) -> None:
    """Makes what both have in `setup`. Raises: UserError for options that do not go together."""
    if self.features % self.heads:
      raise UserError(f'transformer: features={self.features} cannot be divided among heads={self.heads}')
    if self.sinks and not self.window:
      raise UserError(f'transformer: sinks={self.sinks} are seen beyond a window, and window=0 sees everything')
    cls, given = parse_position(self.position)
    make = functools.partial(cls, self.heads, self.features // self.heads, not causal, **given)
    each = cls.in_attention and not cls.shared_across_layers  # every layer has its own, and the embeddings none
    self.positions = Positions() if each else make()
    self.inside = make if each else lambda: self.positions if cls.in_attention else None
    if self.norm_first:
      self.final_norm = normalise(self.norm, self.dtype)

  @property
  def residual_scale(self) -> float:
    """One of how many sublayers."""
    return 1 / (self.layers * self.sublayers)

  def self_attention(self) -> Attention:
    """The attention of one layer to its own sequence."""
    attention = Attention(
      self.score,
      self.alignment,
      self.features,
      self.heads,
      self.kv_heads,
      self.implementation,
      self.attention_dropout,
      project_values=True,
      positions=self.inside(),
      joined=self.residual_scale,
      dtype=self.dtype,
    )
    return require_backprop(attention)

  def feed_forward(self) -> FeedForward:
    return FeedForward(self.features, self.hidden, self.activation, self.residual_scale, self.dtype)

  @property
  def residual(self) -> Callable[[], Residual]:
    return functools.partial(Residual, self.norm, self.norm_first, self.dropout, self.dtype)

  def embed_inputs(self, embeddings: jax.Array, at: jax.Array) -> jax.Array:
    """Embeddings [B, T, E] at positions [T] -> x [B, T, D]: times √D, as in Vaswani et al. 2017, section 3.4."""
    return self.positions.embed(self._fitted(embeddings).astype(self.dtype) * self.features**0.5, at)

  @nn.compact
  def _fitted(self, embeddings: jax.Array) -> jax.Array:
    """Embeddings as wide as the layers, by a projection where they are not."""
    if embeddings.shape[-1] == self.features:
      return embeddings
    return Dense(self.features, use_bias=False, dtype=self.dtype, name='widen')(embeddings)

  def apply_layer_drop(self, x: jax.Array, after: jax.Array, deterministic: bool) -> jax.Array:
    """What goes on from a layer that makes `after` of x: x itself where the layer is left out."""
    if deterministic or not self.layer_dropout:
      return after
    return jnp.where(jax.random.bernoulli(self.make_rng('dropout'), self.layer_dropout), x, after)

  def finalize(self, x: jax.Array) -> jax.Array:
    """What comes out of the last layer, normalised once more where layers normalise what goes in."""
    return self.final_norm(x) if self.norm_first else x


def require_backprop(attention: Attention, who: str = 'transformer') -> Attention:
  """The attention, if gradients are enough for it. Raises: UserError, in the name of `who` asks, if not."""
  row = attention.resolved_alignment
  if not row.trains_by_backprop:
    what = 'sums over positions' if row.latent else f'learns by the loss {row.required_loss!r}'
    raise UserError(
      f'{who}: alignment {attention.alignment!r} {what}, which recurrent decoders alone offer; '
      "expected one that learns by gradients alone, such as 'gumbel'"
    )
  return attention
