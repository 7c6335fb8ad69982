"""Explanations of classifiers and encoder-decoders: against computations of single examples, and within bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.analysis import kendall, total_variation
from attention_jax.modules.attention import Attention
from attention_jax.systems.classification.model import ClassifierConfig, build_classifier
from lab.explanation_measures import (
  READERS,
  Example,
  Explanations,
  MeasureOptions,
  explain,
  read_weights,
  summarize_examples,
)
from tests.models.helpers import build_tiny, inputs
from tests.modules.helpers import variables

OPTIONS = MeasureOptions(epsilon=0.05, permutations=4, steps=5, batch=2)
LENGTHS = (4, 3)


def pair_case():
  model = build_tiny(options='rnn="simple"')
  source, mask, target = map(np.asarray, inputs(lengths=np.array(LENGTHS), steps=3))
  params = variables(model, source, mask, target)['params']
  return model, params, Example(source, mask, target, np.array([[True, True, True], [True, True, False]]))


def document_case():
  config = ClassifierConfig('flat', 'birnn(features=6)', embedding=4, attention=Attention(features=5))
  model = build_classifier(config, 11, 2)
  source, mask, _ = map(np.asarray, inputs(lengths=np.array(LENGTHS)))
  params = variables(model, source[:, None], mask[:, None])['params']
  return model, params, Example(source, mask, np.array([[0], [1]], np.int32), np.ones([2, 1], bool))


@pytest.fixture(
  scope='module',
  params=[('translation', pair_case), pytest.param(('classification', document_case), marks=pytest.mark.long)],
  ids=['translation', 'classification'],
)
def case(request):
  name, make = request.param
  model, params, examples = make()
  return READERS[name], model, params, examples, explain(READERS[name], model, params, examples, OPTIONS)


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(reader, model, params, example, vectors=None, rows=None):
  return reader.read(model, params, example, vectors, rows)


@pytest.mark.long
def test_weights_and_leave_one_out_are_those_of_each_example_alone(case):
  reader, model, params, examples, explanations = case
  np.testing.assert_allclose(read_weights(reader, model, params, examples), explanations.weights, atol=1e-6)
  for i, mask in enumerate(examples.mask):
    example = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), examples)
    outputs, weights = read(reader, model, params, example)
    np.testing.assert_allclose(weights, explanations.weights[i], atol=1e-6)
    changed = read(reader, model, params, example._replace(mask=example.mask.at[1].set(False)))[0]
    np.testing.assert_allclose(total_variation(changed, outputs), explanations.leave_one_out[i][:, 1], atol=1e-6)
    for values in (explanations.leave_one_out[i], explanations.gradients[i]):
      np.testing.assert_allclose(values[:, ~mask], 0, atol=1e-6)
  assert (explanations.gradients[examples.target_mask].max(-1) > 0).all()
  assert (explanations.permutation >= 0).all() and (explanations.permutation <= 1).all()
  assert (explanations.adversarial >= 0).all() and (explanations.adversarial <= np.log(2) + 1e-6).all()


@pytest.mark.long
def test_outputs_depend_on_replaced_weights_and_vectors(case):
  reader, model, params, examples, _ = case
  example = jax.tree.map(lambda x: jnp.asarray(x[0]), examples)
  outputs, weights = read(reader, model, params, example)
  vectors = reader.embed(model, params, example.source)
  np.testing.assert_allclose(read(reader, model, params, example, vectors, weights)[0], outputs, atol=1e-6)
  assert np.abs(read(reader, model, params, example, 2 * vectors, weights)[0] - outputs).max() > 1e-6
  rows = jnp.roll(weights, 1, axis=1)  # of the longest example, without padding
  changed, new_weights = read(reader, model, params, example, None, rows)
  np.testing.assert_allclose(new_weights, rows, atol=1e-6)
  assert np.abs(changed - outputs).max() > 1e-6


@pytest.mark.long
def test_gradients_are_differences_of_the_output_with_constant_weights(case):
  reader, model, params, examples, explanations = case
  example = jax.tree.map(lambda x: jnp.asarray(x[0]), examples)
  weights = explanations.weights[0]
  vectors = reader.embed(model, params, example.source)
  step = 1e-2 * vectors[2]
  ends = [read(reader, model, params, example, vectors.at[2].add(sign * step), weights)[0] for sign in (1, -1)]
  change = np.take_along_axis(np.asarray(ends[0] - ends[1]), examples.target[0][:, None], 1)[:, 0] / 2e-2
  np.testing.assert_allclose(np.abs(change), explanations.gradients[0][:, 2], rtol=2e-2, atol=2e-5)


def test_summaries_ignore_padding_and_undefined_values():
  weights = np.array([[[0.5, 0.3, 0.2, 0.0], [0.9, 0.1, 0.0, 0.0]], [[1 / 3, 1 / 3, 1 / 3, 0], [0.0, 0, 0, 0]]])
  others = np.random.default_rng(0).random(weights.shape)
  steps = np.array([[1.0, 2.0], [3.0, np.nan]])
  mask = np.array([[True] * 4, [True, True, True, False]])
  examples = Example(np.zeros([2, 4], int), mask, np.zeros([2, 2], int), np.array([[True, True], [True, False]]))
  summary = summarize_examples(examples, Explanations(weights, others, others, steps, steps))
  tau = kendall(weights[0], others[0]).mean()
  np.testing.assert_allclose(summary['weights and gradients'], [tau, np.nan])  # uniform weights have no order
  np.testing.assert_allclose(summary['gradients and leave-one-out'], [1, 1])
  np.testing.assert_allclose(summary['permutation'], [1.5, 3])
