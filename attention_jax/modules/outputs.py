"""Output layers: from the result of a decoder step to float32 logits of the next token.

An output layer has
- copies: whether it can emit words of the source, including out-of-vocabulary words;
- generates: whether it can emit words of the vocabulary, including words that the source does not contain;
- remember(memory [B, S, D], mask [B, S], source [B, S] ids) -> what the layer needs of a source, once per source;
- a call: (features [..., D], copy_inputs) -> LinearLogits or Mixture, both with `logits()` and `linear`. Layers that do
  not copy ignore `copy_inputs`.

Logits of a layer that copies are [..., V + S]: those of the vocabulary, then those of the source's out-of-vocabulary
words, each at the position of its first occurrence. See functional.copying.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional import copying
from attention_jax.modules.linear import ConcatDense, Dense, product
from attention_jax.tokens import EOS


class LinearLogits(NamedTuple):
  """Logits before they are computed: features [..., D] @ kernel [D, V] + bias [V].

  Losses read the factors, so that the logits of a whole batch need not be in memory at once. The kernel is cast to the
  dtype of the features; logits are float32.
  """

  features: jax.Array
  kernel: jax.Array
  bias: jax.Array

  @property
  def linear(self) -> 'LinearLogits':
    """The factors of the logits."""
    return self

  def logits(self) -> jax.Array:
    """Returns the logits, [..., V]."""
    scores = product(self.features, self.kernel.astype(self.features.dtype), jnp.float32)
    return scores + self.bias.astype(jnp.float32).reshape((1,) * (scores.ndim - 1) + self.bias.shape)


class Mixture(NamedTuple):
  """Log-probabilities [..., V + S] of a mixture, which are not a linear function of features."""

  log_probs: jax.Array
  linear = ()  # no factors, unlike LinearLogits

  def logits(self) -> jax.Array:
    """Returns the log-probabilities."""
    return self.log_probs


class CopyInputs(NamedTuple):
  """Inputs of an output layer that copies, in addition to the features.

  Attributes:
    memory: result of `remember` of the layer, leaves [B, ...].
    weights: attention weights, [..., S].
    gate_inputs: arrays [..., D] from which the probability of generating is computed: the context, if the decoder has
      one, the top state, and the embedding of the last token.
  """

  memory: Any
  weights: jax.Array
  gate_inputs: tuple[jax.Array, ...]


class OutputLayer(nn.Module):
  """Base class of output layers.

  Attributes:
    size: number of tokens in the vocabulary, V.
    embedding: embedding of the target.
    dtype: dtype of the computation; logits are float32.
  """

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32
  copies = False
  generates = True

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    """Returns what the layer needs of a source, prepared once per source; () if the layer does not copy.

    Args:
      memory: vectors of the encoded source, [B, S, D].
      mask: True at real positions, [B, S].
      source: ids of the source, int32 [B, S]; those from V on are out-of-vocabulary words, see data.encoding.encode.
    """
    return ()


class VocabularyOutput(OutputLayer):
  """A linear layer over the vocabulary: features [..., D] -> LinearLogits, whose logits are [..., V]."""

  @nn.compact
  def __call__(self, features: jax.Array, copy_inputs: CopyInputs | None = None) -> LinearLogits:
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (features.shape[-1], self.size))
    return LinearLogits(features.astype(self.dtype), kernel, self.param('bias', nn.initializers.zeros, (self.size,)))


class TiedOutput(OutputLayer):
  """Products with the target embeddings (Press & Wolf 2017); features of another width are projected to their width.

  Attributes:
    scaled: whether features are divided by √D, D the width of the embeddings, as in T5.
  """

  scaled: bool = False

  @nn.compact
  def __call__(self, features: jax.Array, copy_inputs: CopyInputs | None = None) -> LinearLogits:
    if features.shape[-1] != self.embedding.features:
      features = Dense(self.embedding.features, use_bias=False, dtype=self.dtype)(features)
    bias = self.param('bias', nn.initializers.zeros, (self.size,))
    scale = self.embedding.features**-0.5 if self.scaled else 1.0
    return LinearLogits(features.astype(self.dtype) * scale, self.embedding.vectors().T, bias)


class PointerOutput(OutputLayer):
  """Emits only words of the source; their probabilities are the attention weights. Vinyals, Fortunato & Jaitly 2015.

  If all weights are 0, it emits EOS; see `copying.point`.
  """

  copies = True
  generates = False

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return source

  def __call__(self, features: jax.Array, copy_inputs: CopyInputs | None = None) -> Mixture:
    def point(weights, ids):
      return copying.point(weights, ids, self.size, EOS)

    return Mixture(_over_steps(point, (copy_inputs.weights,), copy_inputs.memory))


class CopyingGenerator(OutputLayer):
  """Base class of output layers that copy and generate.

  Attributes:
    size: number of tokens in the vocabulary, V.
    embedding: embedding of the target.
    dtype: dtype of the computation; logits are float32.
    tied: whether the scores of the vocabulary are products with the target embeddings.
  """

  tied: bool = False
  copies = True

  def setup(self):
    generator_class = TiedOutput if self.tied else VocabularyOutput
    self.generator = generator_class(self.size, self.embedding, self.dtype)


class PointerGenerator(CopyingGenerator):
  """Generates with p_gen = σ(w · [c; s; y] + b), copies otherwise. See, Liu & Manning 2017, equations 8 and 9.

  c is the context, s the top state and y the embedding of the last token. A LayeredDecoder, such as a
  Transformer, has no single context, so that c is omitted.
  """

  def setup(self):
    super().setup()
    self.gate = ConcatDense(1, use_bias=True, dtype=self.dtype)

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return source

  def __call__(self, features: jax.Array, copy_inputs: CopyInputs | None = None) -> Mixture:
    gate = jax.nn.sigmoid(self.gate(*copy_inputs.gate_inputs).astype(jnp.float32))[..., 0]
    logits = self.generator(features).logits()
    return Mixture(_over_steps(copying.generate_or_copy, (logits, gate, copy_inputs.weights), copy_inputs.memory))


class CopyNet(CopyingGenerator):
  """One softmax over the vocabulary and the positions of the source; position s has the score tanh(W h_s) · features.

  Features of another width than the target embeddings are projected to their width. Gu, Lu, Li & Li 2016, section 3.2.
  The decoder omits the selective read of the paper: the memory at the positions of the last copied word.
  """

  def setup(self):
    super().setup()
    self.key = Dense(self.embedding.features, use_bias=False, dtype=self.dtype)
    self.query = Dense(self.embedding.features, use_bias=False, dtype=self.dtype)

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return jnp.tanh(self.key(memory)), mask, source

  def __call__(self, features: jax.Array, copy_inputs: CopyInputs | None = None) -> Mixture:
    key, mask, source = copy_inputs.memory
    query = features.astype(self.dtype)
    query = query if query.shape[-1] == key.shape[-1] else self.query(query)
    scores = jnp.einsum('b...d,bsd->b...s', query, key, preferred_element_type=jnp.float32)
    mask = jnp.broadcast_to(mask.reshape(mask.shape[0], *(1,) * (scores.ndim - 2), -1), scores.shape)
    logits = self.generator(features).logits()
    return Mixture(_over_steps(copying.generate_and_copy, (logits, scores, mask), source))


def _over_steps(formula, step_arrays: tuple[jax.Array, ...], source: jax.Array) -> jax.Array:
  """Applies the formula of one query to a batch.

  Args:
    formula: (*step_arrays, source) -> [V + S], for one query.
    step_arrays: [B, T, ...], or [B, ...] for one step.
    source: [B, S], the same for all steps.
  """
  if step_arrays[0].ndim == 3:
    formula = jax.vmap(formula, in_axes=(*(0 for _ in step_arrays), None))
  return jax.vmap(formula)(*step_arrays, source)


OUTPUTS: Mapping[str, type[OutputLayer]] = {
  'vocabulary': VocabularyOutput,
  'tied': TiedOutput,
  'pointer': PointerOutput,
  'pointer_generator': PointerGenerator,
  'copynet': CopyNet,
}
