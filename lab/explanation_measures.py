"""Measures of whether attention weights explain the outputs of a model, for many examples. Jain & Wallace 2019.

One formulation serves classifiers, which have one output and one query, and encoder-decoders, which have an output and
a query for each target token (by teacher forcing). Examples are padded to one shape, so that one program measures them
all.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis.agreement import adversarial_weights, kendall, permutation_effect, total_variation
from attention_jax.analysis.attributions import gradient_times_input
from attention_jax.analysis.interventions import AnalysedPair, FixedVectors, edited_model, source_vectors, with_vectors
from attention_jax.functional.edits import replace_weights, with_edit
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.systems.classification.model import Classifier


class Example(NamedTuple):
  """One example; several of them have a leading axis N.

  Attributes:
    source: ids [S], with padding at the end.
    mask: [S], True = real.
    target: ids [T]: the tokens of the target with padding at the end, or the label.
    target_mask: [T], True = real.
  """

  source: Any
  mask: Any
  target: Any
  target_mask: Any


class ExampleReader(NamedTuple):
  """Functions that apply one kind of model to an example.

  Attributes:
    read: (model, params, example, vectors, rows) -> the distributions of the outputs [T, V], and weights [T, S].
      `vectors` [S, E] replaces the embeddings of the source, and `rows` [T, S] the weights, except rows that start
      with NaN; None replaces nothing.
    embed: (model, params, source [S]) -> the embeddings [S, E].
  """

  read: Callable[..., tuple[jax.Array, jax.Array]]
  embed: Callable[..., jax.Array]


def read_pair(model: EncoderDecoder, params: Any, example: Example, vectors: Any = None, rows: Any = None):
  """ExampleReader.read of an encoder-decoder. Arguments: see `ExampleReader`."""
  model = model if rows is None else edited_model(model, replace_weights(rows))
  pair = AnalysedPair(model, params, example.source, example.target)
  if vectors is not None:
    pair = with_vectors(pair, vectors)
  inputs = (pair.source[None], example.mask[None], pair.target[None])
  outputs = pair.model.apply({'params': pair.params}, *inputs)
  return jax.nn.softmax(outputs.logits[0]), outputs.weights[0]


def embed_pair(model: EncoderDecoder, params: Any, source: jax.Array) -> jax.Array:
  """ExampleReader.embed of an encoder-decoder. Arguments: see `ExampleReader`."""
  return source_vectors(AnalysedPair(model, params, source, source))


def read_document(model: Classifier, params: Any, example: Example, vectors: Any = None, rows: Any = None):
  """ExampleReader.read of a classifier with one level and one query, whose document is one sentence.

  Arguments: see `ExampleReader`.
  """
  if rows is not None:
    alignment = with_edit(model.attention.alignment, replace_weights(rows))
    model = model.clone(attention=model.attention.clone(alignment=alignment, implementation='xla'))
  if vectors is not None:
    model = model.clone(embedding=FixedVectors(vectors[None]))
  outputs = model.apply({'params': params}, example.source[None, None], example.mask[None, None])
  return jax.nn.softmax(outputs.logits), outputs.word_weights[0, 0]


def embed_document(model: Classifier, params: Any, source: jax.Array) -> jax.Array:
  """ExampleReader.embed of a classifier. Arguments: see `ExampleReader`."""
  return model.embedding.apply({'params': params['embedding']}, source)


READERS: Mapping[str, ExampleReader] = {  # by the name of the system
  'classification': ExampleReader(read_document, embed_document),
  'translation': ExampleReader(read_pair, embed_pair),
}


class Explanations(NamedTuple):
  """Measures of N examples.

  Attributes:
    weights: [N, T, S].
    gradients: |gradient · embedding| of the probability of each target, with constant weights, [N, T, S].
    leave_one_out: total variation distance of each output when a position is masked, [N, T, S].
    permutation: median total variation distance of each output when its weights are permuted, [N, T].
    adversarial: greatest Jensen-Shannon divergence found for weights with nearly the same output, [N, T].
  """

  weights: np.ndarray
  gradients: np.ndarray
  leave_one_out: np.ndarray
  permutation: np.ndarray
  adversarial: np.ndarray


class MeasureOptions(NamedTuple):
  """Options of the measures.

  Attributes:
    epsilon: total variation distance by which adversarial weights may change an output.
    permutations: number of permutations.
    steps: optimiser steps of adversarial weights.
    batch: examples that are measured at once.
  """

  epsilon: float
  permutations: int = 100
  steps: int = 300
  batch: int = 25


def explain(
  reader: ExampleReader, model: Any, params: Any, examples: Example, options: MeasureOptions, seed: int = 0
) -> Explanations:
  """Computes the measures of N examples.

  Args:
    reader: a row of READERS.
    model: the model, which is applied with test-time behaviour.
    params: its parameters.
    examples: N examples.
    options: options of the measures.
    seed: seed of the permutations and of the initial adversarial weights.
  """

  def measure(inputs):
    example, rng = inputs
    return _explain_one(reader, model, params, example, rng, options)

  count = len(examples.source)
  rngs = jax.random.split(jax.random.key(seed), count)
  batched = jax.jit(lambda inputs: jax.lax.map(measure, inputs, batch_size=min(options.batch, count)))
  return jax.tree.map(np.asarray, batched((jax.tree.map(jnp.asarray, examples), rngs)))


def _explain_one(
  reader: ExampleReader, model: Any, params: Any, example: Example, rng: jax.Array, options: MeasureOptions
):
  def read(example, vectors=None, rows=None):
    return reader.read(model, params, example, vectors, rows)

  def target_probabilities(vectors):
    outputs, _ = read(example, vectors=vectors, rows=weights)
    return jnp.take_along_axis(outputs, example.target[:, None], axis=1)[:, 0]

  def change_with_mask(mask):
    return total_variation(read(example._replace(mask=example.mask & mask))[0], outputs)

  def measure_at(t, rng):
    def change(row):
      rows = jnp.full(weights.shape, jnp.nan).at[t].set(row)
      return read(example, rows=rows)[0][t]

    permutation_rng, adversarial_rng = jax.random.split(rng)
    median = permutation_effect(change, weights[t], example.mask, permutation_rng, options.permutations)
    limits = {'epsilon': options.epsilon, 'steps': options.steps}
    return median, adversarial_weights(change, weights[t], example.mask, adversarial_rng, **limits).divergence

  outputs, weights = read(example)
  gradients = jnp.abs(gradient_times_input(target_probabilities, reader.embed(model, params, example.source)))
  left_out = jax.vmap(change_with_mask)(~jnp.eye(example.mask.size, dtype=bool)).T
  indices = jnp.arange(len(weights))
  return Explanations(weights, gradients, left_out, *jax.vmap(measure_at)(indices, jax.random.split(rng, len(weights))))


def read_weights(reader: ExampleReader, model: Any, params: Any, examples: Example, batch: int = 100) -> np.ndarray:
  """Returns the weights of N examples, [N, T, S].

  Args:
    reader: a row of READERS.
    model: the model.
    params: its parameters.
    examples: N examples.
    batch: examples that are read at once.
  """
  read = jax.jit(lambda examples: jax.lax.map(lambda x: reader.read(model, params, x)[1], examples, batch_size=batch))
  return np.asarray(read(jax.tree.map(jnp.asarray, examples)))


def summarize_examples(examples: Example, explanations: Explanations) -> dict[str, np.ndarray]:
  """Returns for each measure the means over the outputs of each example, [N]; NaN if it is undefined for all outputs.

  A pair of measures is compared by Kendall's tau, which is undefined where either is constant.
  """
  pairs = {
    'weights and gradients': (explanations.weights, explanations.gradients),
    'weights and leave-one-out': (explanations.weights, explanations.leave_one_out),
    'gradients and leave-one-out': (explanations.gradients, explanations.leave_one_out),
  }
  values: dict[str, list[float]] = {name: [] for name in (*pairs, 'permutation', 'adversarial')}
  for i, (mask, is_real) in enumerate(zip(examples.mask, examples.target_mask, strict=True)):
    for name, (first, second) in pairs.items():
      values[name].append(_mean(kendall(first[i][is_real], second[i][is_real], mask)))
    for name in ('permutation', 'adversarial'):
      values[name].append(_mean(getattr(explanations, name)[i][is_real]))
  return {name: np.array(numbers) for name, numbers in values.items()}


def _mean(values: np.ndarray) -> float:
  finite = values[np.isfinite(values)]
  return float(finite.mean()) if len(finite) else np.nan
