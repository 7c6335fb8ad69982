"""Transformer layers: self-attention, attention over a memory, and feed-forward networks.

A decoder layer computes all steps at once or one step with a cache. Both are the same three sublayers and differ only
in the functions that attend.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import choose
from attention_jax.functional.attend import Memory
from attention_jax.functional.mask import Mask
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import Dense
from attention_jax.specs import Fraction

EPSILON = 1e-5  # default number added to the variance (layer) or mean square (rms)


class Norm(NamedTuple):
  """A row of NORMS.

  Attributes:
    description: the formula and the paper, in one line.
    module: the flax module.
  """

  description: str
  module: Callable[..., nn.Module]


NORMS: Mapping[str, Norm] = {
  'layer': Norm('g (x - mean x) / std x + b. Ba, Kiros & Hinton 2016.', nn.LayerNorm),
  'rms': Norm('g x / √mean x². Zhang & Sennrich 2019.', nn.RMSNorm),
}


class Activation(NamedTuple):
  """A row of ACTIVATIONS, a kind of feed-forward network.

  Attributes:
    description: the formula and the paper, in one line.
    fn: the activation function.
    gated: whether the hidden layer is act(x U) * (x W), without biases.
  """

  description: str
  fn: Callable[[jax.Array], jax.Array]
  gated: bool = False


gelu = functools.partial(jax.nn.gelu, approximate=False)
gelu_new = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: Mapping[str, Activation] = {
  'relu': Activation('max(0, x U + b) V + c. Vaswani et al. 2017, equation 2.', jax.nn.relu),
  'gelu': Activation('gelu(x U + b) V + c, gelu(x) = x Φ(x). Hendrycks & Gimpel 2016.', gelu),
  'gelu_new': Activation('gelu with the approximation by tanh. Hendrycks & Gimpel 2016, section 2.', gelu_new),
  'silu': Activation('silu(x U + b) V + c, silu(x) = x σ(x). Ramachandran, Zoph & Le 2017.', jax.nn.silu),
  'swiglu': Activation('(silu(x U) * x W) V. Shazeer 2020, equation 6.', jax.nn.silu, gated=True),
  'geglu': Activation('(gelu(x U) * x W) V. Shazeer 2020, equation 6.', gelu, gated=True),
  'geglu_new': Activation('geglu with gelu_new, as T5 1.1.', gelu_new, gated=True),
}


def self_attention_mask(*, causal: bool, window: int = 0, sinks: int = 0) -> Mask:
  """Returns the mask of self-attention.

  Args:
    causal: whether positions after a query are masked.
    window: largest distance of an unmasked position that is not a sink; 0 for no limit.
    sinks: number of initial positions that are unmasked at any distance (Xiao et al. 2024).
  """
  mask = Mask.window(window, window, sinks) if window else Mask()
  return mask & Mask.causal() if causal else mask


class FeedForward(nn.Module):
  """act(x U + b) V + c at each position, or (act(x U) * x W) V for a gated activation, see ACTIVATIONS.

  Attributes:
    features: features of the result.
    hidden: features of the hidden layer.
    activation: a key of ACTIVATIONS.
    scale: factor of the initial variance of V.
  """

  features: int
  hidden: int
  activation: str = 'relu'
  scale: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    activation = ACTIVATIONS[choose(self.activation, ACTIVATIONS, 'activation')]

    def dense(features: int, scale: float = 1.0) -> nn.Module:
      init = nn.initializers.variance_scaling(scale, 'fan_avg', 'uniform')
      return Dense(features, not activation.gated, self.dtype, kernel_init=init)

    # flax numbers the layers in the order of their construction: U, V, W.
    hidden_layer = dense(self.hidden)
    output_layer = dense(self.features, self.scale)
    hidden = activation.fn(hidden_layer(x))
    if activation.gated:
      hidden = hidden * dense(self.hidden)(x)
    return output_layer(hidden)


class Residual(nn.Module):
  """norm(x + drop(f(x))) (Vaswani et al. 2017, section 3.1), or x + drop(f(norm(x))).

  Attributes:
    norm: a key of NORMS.
    norm_first: whether to normalise the input of f (pre-norm, Xiong et al. 2020) instead of the sum.
    dropout: dropout rate of f(x).
    epsilon: added to the variance (layer) or mean square (rms).
  """

  norm: str = 'layer'
  norm_first: bool = False
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32
  epsilon: float = EPSILON

  @nn.compact
  def __call__(self, fn: Callable[[jax.Array], tuple[jax.Array, Any]], x: jax.Array, deterministic: bool):
    """Returns the new x, and the auxiliary result of fn(x) -> (y, auxiliary)."""
    norm = make_norm(self.norm, self.dtype, self.epsilon)
    y, auxiliary = fn(norm(x) if self.norm_first else x)
    x = x + Dropout(self.dropout)(y, deterministic=deterministic)
    return (x if self.norm_first else norm(x)), auxiliary


def make_norm(name: str, dtype, epsilon: float = EPSILON) -> nn.Module:
  """Returns the normalisation layer that a row of NORMS describes.

  Args:
    name: a key of NORMS.
    dtype: dtype of the computation.
    epsilon: added to the variance (layer) or mean square (rms).

  Raises:
    UserError: for an unknown name.
  """
  return NORMS[choose(name, NORMS, 'norm')].module(epsilon=epsilon, dtype=dtype)


class EncoderLayer(nn.Module):
  """Self-attention and a feed-forward network.

  Attributes:
    attention: self-attention.
    feed: the feed-forward network.
    residual: makes the residual connection of a sublayer.
  """

  attention: Attention
  feed: FeedForward
  residual: Callable[[], Residual]

  def setup(self):
    self.residuals = [self.residual() for _ in range(2)]

  def __call__(self, x: jax.Array, mask: Mask, positions: jax.Array, deterministic: bool) -> jax.Array:
    """Computes the layer; x [B, S, D], positions [S]."""

    def self_attend(x):
      return self.attention.parallel(
        x, self.attention.remember(x, mask, positions), deterministic, positions, return_weights=False
      )

    x, _ = self.residuals[0](self_attend, x, deterministic)
    return self.residuals[1](lambda x: (self.feed(x), None), x, deterministic)[0]


class LayerCarry(NamedTuple):
  """Carry of a decoder layer from one step to the next.

  Attributes:
    key, value: cached keys and values of self-attention at L positions, [B, G, L, H] for G heads of keys and values of
      H features; values have 2 H features if the attention is `differential`.
    self_attention, cross: carries of both attentions; () for an attention that needs none.
  """

  key: jax.Array
  value: jax.Array
  self_attention: Any
  cross: Any


class DecoderLayer(nn.Module):
  """Self-attention, attention over the memory, and a feed-forward network.

  Attributes:
    attention: self-attention.
    cross: attention over the memory.
    feed: the feed-forward network.
    residual: makes the residual connection of a sublayer.
  """

  attention: Attention
  cross: Attention
  feed: FeedForward
  residual: Callable[[], Residual]

  def setup(self):
    self.residuals = [self.residual() for _ in range(3)]

  def remember(self, encoded: jax.Array, mask: jax.Array | Mask, value: jax.Array) -> Memory:
    """Prepares the memory that all steps attend to; encoded and value [B, S, D].

    Args:
      encoded: vectors that queries are compared with.
      mask: the mask of the memory, as `Attention.remember` takes it.
      value: vectors that contexts are made of.
    """
    return self.cross.remember(encoded, mask, value=value)

  def start(self, memory: Memory, size: int, features: int) -> LayerCarry:
    """Returns the carry before the first of `size` steps.

    Args:
      memory: the memory, as `remember` returns it.
      size: number L of positions of the cache.
      features: features D of the inputs of a step.
    """
    batch = memory.key.shape[0]
    zeros = jnp.zeros((batch, 1, features), self.attention.dtype)
    one_step = self.attention.remember(zeros, jnp.ones((batch, 1), bool), jnp.zeros((1,), jnp.int32))

    def empty_cache(x: jax.Array) -> jax.Array:
      return jnp.zeros((*x.shape[:2], size, x.shape[-1]), x.dtype)

    def init_carry(attention: Attention, memory: Memory) -> Any:
      return attention.init_carry(memory) if attention.needs_carry else ()

    cache = Memory(empty_cache(one_step.key), empty_cache(one_step.value), one_step.mask)
    return LayerCarry(cache.key, cache.value, init_carry(self.attention, cache), init_carry(self.cross, memory))

  def __call__(self, x: jax.Array, memory: Memory, mask: Mask, positions: jax.Array, deterministic: bool):
    """Computes all steps.

    Args:
      x: inputs, [B, T, D].
      memory: memory, as `remember` returns it.
      mask: mask of self-attention.
      positions: positions of the inputs, [T].
      deterministic: whether to use test-time behaviour.

    Returns:
      x [B, T, D], and weights over the memory [B, N, T, S].
    """

    def self_attend(x):
      return self.attention.parallel(
        x, self.attention.remember(x, mask, positions), deterministic, positions, return_weights=False
      )

    def cross_attend(x):
      context, weights = self.cross.parallel(x, memory, deterministic)
      return context, with_head_axis(weights, self.cross.heads)

    x, _, weights = self._sublayers(x, self_attend, cross_attend, deterministic)
    return x, weights

  def step(self, carry: LayerCarry, x: jax.Array, memory: Memory, mask: Mask, position: jax.Array, deterministic: bool):
    """Computes one step.

    Args:
      carry: carry of the previous step.
      x: inputs, [B, D].
      memory: memory, as `remember` returns it.
      mask: mask of the cached positions.
      position: position of the inputs, [].
      deterministic: whether to use test-time behaviour.

    Returns:
      The next carry, x [B, D], and weights over the memory [B, N, S].
    """

    def self_attend(x):
      new = self.attention.remember(x[:, None], jnp.ones((x.shape[0], 1), bool), position[None])
      key = jax.lax.dynamic_update_slice_in_dim(carry.key, new.key, position, axis=2)
      value = jax.lax.dynamic_update_slice_in_dim(carry.value, new.value, position, axis=2)
      cache = Memory(key, value, mask)
      new_carry, context, _ = attend_single_query(
        self.attention, carry.self_attention, x, cache, deterministic, position
      )
      return context, (cache, new_carry)

    def cross_attend(x):
      new_carry, context, weights = attend_single_query(self.cross, carry.cross, x, memory, deterministic)
      return context, (new_carry, with_head_axis(weights, self.cross.heads))

    x, (cache, self_carry), (cross_carry, weights) = self._sublayers(x, self_attend, cross_attend, deterministic)
    return LayerCarry(cache.key, cache.value, self_carry, cross_carry), x, weights

  def _sublayers(self, x: jax.Array, self_attend: Callable, cross_attend: Callable, deterministic: bool):
    """Returns x after all sublayers, and the auxiliary results of both attentions."""
    x, self_auxiliary = self.residuals[0](self_attend, x, deterministic)
    x, cross_auxiliary = self.residuals[1](cross_attend, x, deterministic)
    x, _ = self.residuals[2](lambda x: (self.feed(x), None), x, deterministic)
    return x, self_auxiliary, cross_auxiliary


def with_head_axis(weights: jax.Array, heads: int) -> jax.Array:
  """Returns weights [B, N, ..., S], with an axis of heads even for one head."""
  return weights if heads > 1 else weights[:, None]


def attend_single_query(
  attention: Attention, carry: Any, query: jax.Array, memory: Memory, deterministic: bool, position=None
):
  """Attends with one query [B, D]; the carry is () if the attention needs none.

  Args:
    attention: attention over the memory.
    carry: carry of the previous query; () before the first one, and if the attention needs none.
    query: queries, [B, D].
    memory: the memory, as `attention.remember` returns it.
    deterministic: whether to use test-time behaviour.
    position: position of the query, int32 []; None for an attention without a module of positions.

  Returns:
    The next carry, the context, and the weights.
  """
  new_carry, attended = attention(carry or attention.init_carry(memory), query, memory, deterministic, position)
  return (new_carry if attention.needs_carry else ()), attended.context, attended.weights
