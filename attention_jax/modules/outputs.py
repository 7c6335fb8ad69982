"""Output layers: from what a decoder step gives to logits over what may come next. Logits are float32.

An output layer has
- copies: whether it can say words of the source, whatever the vocabulary holds;
- generates: whether it can say words of the vocabulary, whatever the source holds;
- remember(memory [B, S, D], mask [B, S], source [B, S] ids) -> what it keeps of a source, prepared once;
- a call: (features [..., D], seen) -> what has `logits()`, and `linear` where a loss may take a shorter way. Those that
  do not copy look at the features alone.

Logits of a layer that copies are [..., V + S]: those of the vocabulary, then those of the words of the source that it
does not know, each at the position where it stands first. See functional.copying.
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
  """Logits that are not computed yet: features [..., D] @ kernel [D, V] + bias [V], float32 from features and kernel in
  the dtype of the features."""

  features: jax.Array
  kernel: jax.Array
  bias: jax.Array

  @property
  def linear(self) -> 'LinearLogits':
    return self

  def logits(self) -> jax.Array:
    scores = product(self.features, self.kernel.astype(self.features.dtype), jnp.float32)
    return scores + self.bias.astype(jnp.float32).reshape((1,) * (scores.ndim - 1) + self.bias.shape)


class Mixture(NamedTuple):
  """Log-probabilities [..., V + S] of a mixture, which no product gives."""

  log_probs: jax.Array
  linear = ()

  def logits(self) -> jax.Array:
    return self.log_probs


class CopyInputs(NamedTuple):
  """What an output layer that copies looks at beside the features.

  Attributes:
    kept: what its `remember` gave, leaves [B, ...].
    weights: of the attention [..., S].
    parts: arrays [..., D] by which it is told whether to copy: the context, the top state, the last token's embedding.
  """

  kept: Any
  weights: jax.Array
  parts: tuple[jax.Array, ...]


class OutputLayer(nn.Module):
  """What output layers share.

  Attributes: size, of the vocabulary; embedding, of the target.
  """

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32
  copies = False
  generates = True

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return ()


class VocabularyOutput(OutputLayer):
  """A linear layer over the vocabulary: features [..., D] -> LinearLogits, whose logits are [..., V]."""

  @nn.compact
  def __call__(self, features: jax.Array, seen: CopyInputs | None = None) -> LinearLogits:
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (features.shape[-1], self.size))
    return LinearLogits(features.astype(self.dtype), kernel, self.param('bias', nn.initializers.zeros, (self.size,)))


class TiedOutput(OutputLayer):
  """Logits against the target embeddings (Press & Wolf 2017); features of another width are projected to theirs."""

  @nn.compact
  def __call__(self, features: jax.Array, seen: CopyInputs | None = None) -> LinearLogits:
    if features.shape[-1] != self.embedding.features:
      features = Dense(self.embedding.features, use_bias=False, dtype=self.dtype)(features)
    bias = self.param('bias', nn.initializers.zeros, (self.size,))
    return LinearLogits(features.astype(self.dtype), self.embedding.vectors().T, bias)


class PointerOutput(OutputLayer):
  """Nothing but words of the source, at the weights of the attention. Vinyals, Fortunato & Jaitly 2015."""

  copies = True
  generates = False

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return source

  def __call__(self, features: jax.Array, seen: CopyInputs | None = None) -> Mixture:
    return Mixture(_each(lambda weights, ids: copying.point(weights, ids, self.size, EOS), seen.weights, seen.kept))


class Generating(OutputLayer):
  """Layers that copy and generate.

  Attributes: tied, whether the vocabulary is scored against the target embeddings.
  """

  tied: bool = False
  copies = True

  def setup(self):
    generate = TiedOutput if self.tied else VocabularyOutput
    self.generator = generate(self.size, self.embedding, self.dtype)


class PointerGenerator(Generating):
  """Generates with p_gen = σ(w · [c; s; y] + b), copies otherwise. See, Liu & Manning 2017, equations 8 and 9.

  c is the context, s the top state and y the embedding of the last token; a Transformer has no one context, and leaves
  it out.
  """

  def setup(self):
    super().setup()
    self.gate = ConcatDense(1, bias=True, dtype=self.dtype)

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return source

  def __call__(self, features: jax.Array, seen: CopyInputs | None = None) -> Mixture:
    gate = jax.nn.sigmoid(self.gate(*seen.parts).astype(jnp.float32))[..., 0]
    logits = self.generator(features).logits()
    return Mixture(_each(copying.generate_or_copy, logits, gate, seen.weights, seen.kept))


class CopyNet(Generating):
  """One softmax over the vocabulary and the positions of the source, whose scores are tanh(W h_s) · features.

  Features of another width than the target embeddings are projected to theirs. Gu, Lu, Li & Li 2016, section 3.2. The
  paper's decoder also reads the memory where it copied last; ours does not.
  """

  def setup(self):
    super().setup()
    dense = lambda: Dense(self.embedding.features, use_bias=False, dtype=self.dtype)
    self.key, self.query = dense(), dense()

  def remember(self, memory: jax.Array, mask: jax.Array, source: jax.Array) -> Any:
    return jnp.tanh(self.key(memory)), mask, source

  def __call__(self, features: jax.Array, seen: CopyInputs | None = None) -> Mixture:
    key, mask, source = seen.kept
    query = features.astype(self.dtype)
    query = query if query.shape[-1] == key.shape[-1] else self.query(query)
    scores = jnp.einsum('b...d,bsd->b...s', query, key, preferred_element_type=jnp.float32)
    mask = jnp.broadcast_to(mask.reshape(mask.shape[0], *(1,) * (scores.ndim - 2), -1), scores.shape)
    return Mixture(_each(copying.generate_and_copy, self.generator(features).logits(), scores, mask, source))


def _each(formula, *given: jax.Array) -> jax.Array:
  """A formula for one query over [B, T, ...] or [B, ...]; what comes last belongs to a source [B, ...]."""
  *of_step, ids = given
  if of_step[0].ndim == 3:
    formula = jax.vmap(formula, in_axes=(*(0 for _ in of_step), None))
  return jax.vmap(formula)(*of_step, ids)


OUTPUTS: Mapping[str, type[OutputLayer]] = {
  'vocabulary': VocabularyOutput,
  'tied': TiedOutput,
  'pointer': PointerOutput,
  'pointer_generator': PointerGenerator,
  'copynet': CopyNet,
}
