"""Fields and methods that Transformer encoders and decoders share."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.modules.attention import Attention
from attention_jax.modules.differential import INITIAL_LAMBDA, lambda_of_layer
from attention_jax.modules.heads import check_heads
from attention_jax.modules.linear import Dense
from attention_jax.modules.positions import Positions, parse_position
from attention_jax.modules.transformer import EPSILON, FeedForward, Residual, make_norm, self_attention_mask
from attention_jax.specs import Count, Fraction, Positive, Size


class Stack(nn.Module):
  """Base class of Transformer encoders and decoders.

  The initial variance of the last kernel of every sublayer is divided by the number of sublayers of all layers (Radford
  et al. 2019, section 2.3). Initially attention is almost uniform and adds nearly the same vector at all positions in
  every layer. Without the smaller variance, the sum of these vectors would dominate the differences between positions.

  Attributes:
    features: width D of the layers.
    layers: number of layers.
    heads: number N of heads.
    hidden: features of the hidden layer of feed-forward networks.
    score, alignment, implementation, kv_heads: fields of self-attention; see modules.attention.
    head_dim: features of a head of self-attention; 0 stands for features / heads.
    scale_embeddings: whether embeddings are multiplied by √D before positions are added.
    normalize_embeddings: whether embeddings with their positions are normalised, as in BERT and BART.
    position: a spec of POSITIONS.
    window, sinks: arguments of `self_attention_mask` for self-attention.
    norm: a key of NORMS.
    norm_first: whether to normalise the inputs of sublayers; see Residual.
    normalize_last: whether to normalise the result of the last layer even if `norm_first` is False, as
      torch.nn.Transformer does.
    epsilon: added to the variance (layer) or mean square (rms) in normalisation.
    bias, differential, gate: fields of self-attention; see modules.attention.
    lambda_by_layer: whether λ₀ of differential attention is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l = 1, 2, ..., as in
      the models of Ye et al. 2025, instead of 0.8 in all layers.
    activation: a key of ACTIVATIONS.
    dropout: dropout rate of the results of sublayers; that of embeddings is a field of their module.
    attention_dropout: dropout rate of the weights of self-attention.
    layer_dropout: probability that a layer is skipped for a whole batch during training (LayerDrop, Fan, Grave & Joulin
      2020). A skipped layer is computed nevertheless.
    remat: whether the backward pass computes each layer again from its inputs, in place of storing its inner values:
      a third more products, for the memory of one layer at a time, and of its parameters if they are sharded.
  """

  features: Size = 512
  layers: Size = 6
  heads: Size = 8
  hidden: Size = 2048
  score: str = 'scaled_dot'
  alignment: str = 'softmax'
  implementation: str = 'auto'
  kv_heads: Count = 0
  attention_dropout: Fraction = 0.0
  layer_dropout: Fraction = 0.0
  scale_embeddings: bool = True
  normalize_embeddings: bool = False
  position: str = 'sinusoidal'
  window: Count = 0
  sinks: Count = 0
  norm: str = 'layer'
  norm_first: bool = False
  normalize_last: bool = False
  epsilon: Positive = EPSILON
  bias: bool = False
  differential: bool = False
  gate: bool = False
  activation: str = 'relu'
  dropout: Fraction = 0.0
  remat: bool = False
  head_dim: Count = 0
  lambda_by_layer: bool = False
  dtype: jnp.dtype = jnp.float32
  sublayers = 2  # per layer

  def prepare(self, *, causal: bool) -> None:
    """Creates the modules that encoders and decoders share; called by `setup`.

    Raises:
      UserError: for options that contradict each other, an unknown position, and an unknown norm of the last layer.
    """
    check_heads('transformer', self.head_dim * self.heads or self.features, self.heads)
    if self.lambda_by_layer and not self.differential:
      raise UserError('transformer: lambda_by_layer must be False without differential=True, got lambda_by_layer=True')
    if self.sinks and not self.window:
      raise UserError(f'transformer: sinks must be 0 without a window (window=0), got sinks={self.sinks}')
    self.bidirectional = not causal
    self.self_mask = self_attention_mask(causal=causal, window=self.window, sinks=self.sinks)
    cls, _ = parse_position(self.position)
    is_made_per_layer = cls.in_attention and not cls.shared_across_layers
    self.positions = Positions() if is_made_per_layer else self._make_positions()
    if self.norm_first or self.normalize_last:
      self.final_norm = make_norm(self.norm, self.dtype, self.epsilon)
    if self.normalize_embeddings:
      self.embedding_norm = make_norm(self.norm, self.dtype, self.epsilon)

  def _make_positions(self) -> Positions:
    cls, options = parse_position(self.position)
    return cls(self.heads, self.head_dim or self.features // self.heads, self.bidirectional, **options)

  def _attention_positions(self) -> Positions | None:
    """Positions of the self-attention of one layer; None if positions are added to embeddings."""
    cls, _ = parse_position(self.position)
    if not cls.in_attention:
      return None
    return self.positions if cls.shared_across_layers else self._make_positions()

  @property
  def packs(self) -> bool:
    """Whether self-attention permits rows of several segments; sinks are positions of the first one."""
    return not self.sinks and Attention(self.score, self.alignment, parent=None).supports_segments

  @property
  def residual_scale(self) -> float:
    """Factor of the initial variance of the last kernel of a sublayer."""
    return 1 / (self.layers * self.sublayers)

  def self_attention(self, layer: int) -> Attention:
    """Returns the self-attention of one layer, 0 for the first one."""
    attention = Attention(
      self.score,
      self.alignment,
      self.features,
      self.heads,
      self.kv_heads,
      self.implementation,
      self.attention_dropout,
      project_values=True,
      positions=self._attention_positions(),
      bias=self.bias,
      differential=self.differential,
      gate=self.gate,
      output_scale=self.residual_scale,
      head_dim=self.head_dim,
      initial_lambda=lambda_of_layer(layer + 1) if self.lambda_by_layer else INITIAL_LAMBDA,
      dtype=self.dtype,
    )
    return require_backprop(attention)

  def feed_forward(self) -> FeedForward:
    """Returns the feed-forward network of one layer."""
    return FeedForward(self.features, self.hidden, self.activation, self.residual_scale, self.dtype)

  def layer_class(self, layer: type[nn.Module], deterministic: int) -> type[nn.Module]:
    """Returns the class of a layer, with `remat`; `deterministic` is the position of this argument of its call."""
    return nn.remat(layer, static_argnums=(deterministic,)) if self.remat else layer

  @property
  def residual(self) -> Callable[[], Residual]:
    """Function that makes the residual connection of one sublayer."""
    return functools.partial(Residual, self.norm, self.norm_first, self.dropout, self.dtype, self.epsilon)

  def embed_inputs(self, embeddings: jax.Array, positions: jax.Array) -> jax.Array:
    """Projects embeddings [B, T, E] to D, scales by √D (Vaswani et al. 2017, section 3.4), and adds positions.

    `scale_embeddings` and `normalize_embeddings` may change it. Positions are [T], or [B, T] if rows have different
    ones. Embeddings of D features are not projected. Positions that attention applies are not added here.
    """
    scale = self.features**0.5 if self.scale_embeddings else 1.0
    x = self.positions.embed(self._widen(embeddings).astype(self.dtype) * scale, positions)
    return self.embedding_norm(x) if self.normalize_embeddings else x

  @nn.compact
  def _widen(self, embeddings: jax.Array) -> jax.Array:
    """Projects embeddings to the width of the layers if it differs."""
    if embeddings.shape[-1] == self.features:
      return embeddings
    return Dense(self.features, use_bias=False, dtype=self.dtype, name='widen')(embeddings)

  def apply_layer_drop(self, x: jax.Array, layer_output: jax.Array, deterministic: bool) -> jax.Array:
    """Returns `layer_output`, the result of a layer with input x, or x if the layer is skipped.

    Args:
      x: inputs of the layer, [B, T, D].
      layer_output: its result, [B, T, D].
      deterministic: whether to use test-time behaviour, which skips no layer; otherwise the rng 'dropout' is consumed.
    """
    if deterministic or not self.layer_dropout:
      return layer_output
    return jnp.where(jax.random.bernoulli(self.make_rng('dropout'), self.layer_dropout), x, layer_output)

  def finalize(self, x: jax.Array) -> jax.Array:
    """Normalises the result of the last layer if `norm_first` or `normalize_last` is set."""
    return self.final_norm(x) if self.norm_first or self.normalize_last else x


def require_backprop(attention: Attention, name: str = 'transformer') -> Attention:
  """Returns the attention.

  Raises:
    UserError: with `name` as its prefix, if backpropagation alone does not train the alignment.
  """
  row = attention.resolved_alignment
  if not row.trains_by_backprop:
    requirement = 'a sum over positions' if row.latent else f'the auxiliary loss {row.required_loss!r}'
    raise UserError(
      f'{name}: the alignment must train by backpropagation alone; {attention.alignment!r} needs {requirement}, '
      "which only recurrent decoders support (expected for example 'gumbel')"
    )
  return attention
