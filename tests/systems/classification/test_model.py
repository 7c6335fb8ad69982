"""Classifiers: independence of padding and of the batch; hierarchies and decomposable attention in NumPy; ensembles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.modules.attention import Attention
from attention_jax.modules.pooling import POOLINGS
from attention_jax.systems.classification.model import (
  CLASSIFIERS,
  ClassifierConfig,
  ClassifierEnsemble,
  build_classifier,
)
from tests.modules.helpers import assert_close, draw, variables
from tests.modules.reference_cells import gru_step
from tests.sampled_cases import sample_cases

LENGTHS = np.array([[5, 3, 0], [4, 0, 0], [2, 2, 5]])  # words of each sentence of each document
MASK = np.arange(5) < LENGTHS[..., None]
SOURCE = np.where(MASK, np.random.default_rng(0).integers(4, 20, MASK.shape), 0)
PAIRS, PAIR_MASK = SOURCE[:, ::2], MASK[:, ::2]


def build_small(**fields):
  """A classifier of 20 words and 3 labels; `fields` belong to the model or its attention."""
  names = {'alignment', 'heads', 'implementation', 'score', 'features'} & fields.keys()
  attention = Attention(**{'score': 'dot', 'features': 6} | {name: fields.pop(name) for name in names})
  model = {'encoder': 'birnn(features=6)', 'embedding': 7} | fields
  return build_classifier(ClassifierConfig(**model, attention=attention), 20, 3)


CASES = [
  *sample_cases(
    [({'classifier': c, 'pooling': p},) for c, p in itertools.product(('flat', 'hierarchical'), POOLINGS)], 8
  ),
  {'classifier': 'hierarchical', 'encoder': 'embedded', 'hidden': 5},
  {'classifier': 'flat', 'encoder': 'transformer(features=8, layers=1, heads=2)', 'pooling': 'attention(hops=3)'},
  {'classifier': 'flat', 'encoder': 'lstmn(features=6, direction="both")'},
  {'classifier': 'flat', 'encoder': 'act(features=6, limit=3)', 'pooling': 'mean'},
  {'classifier': 'hierarchical', 'encoder': 'act(features=6, limit=3)'},
]


@pytest.mark.long
@pytest.mark.parametrize('fields', CASES, ids=lambda fields: '-'.join(map(str, fields.values())))
def test_output_is_independent_of_padding_and_other_rows(fields):
  model = build_small(**fields)
  params = variables(model, SOURCE, MASK)
  run = jax.jit(lambda source, mask: model.apply(params, source, mask))
  whole = run(SOURCE, MASK)
  assert whole.logits.shape == (3, 3) and np.isfinite(whole.logits).all()
  alone = run(SOURCE[1:2, :1, :4], MASK[1:2, :1, :4])
  assert_close(whole.logits[1:2], alone.logits)
  assert_close(whole.word_weights[1:2, :1, :, :4], alone.word_weights)
  assert not np.where(MASK[:, :, None], 0.0, whole.word_weights).any()
  if fields.get('encoder', '').startswith('act'):
    words, *sentences = whole.ponder
    assert [x.updates.shape for x in sentences] == [(3, 3)] * (fields['classifier'] == 'hierarchical')
    np.testing.assert_array_equal(words.updates > 0, MASK.reshape(3, -1))
  if fields['classifier'] == 'hierarchical':
    np.testing.assert_allclose(whole.word_weights.sum(-1)[MASK.any(-1)], 1, rtol=1e-5)
    assert_close(whole.sentence_weights[1, 0], np.array([1.0, 0, 0]))


@pytest.mark.long
@pytest.mark.parametrize(
  'fields',
  [
    {'encoder': 'transformer(features=8, layers=1, heads=2)'},
    {'encoder': 'conv(features=6, layers=1)'},
    {'pooling': 'attention', 'score': 'location(max_positions=40)'},
    {'pooling': 'attention', 'alignment': 'addressing'},
  ],
  ids=lambda fields: '-'.join(fields.values()),
)
def test_flat_output_is_independent_of_padding_between_sentences(fields):
  model = build_small(classifier='flat', **fields)
  params = variables(model, SOURCE, MASK)
  run = jax.jit(model.apply)
  tight = run(params, SOURCE, MASK)
  wide = run(params, *(np.pad(x, ((0, 0), (0, 1), (0, 2))) for x in (SOURCE, MASK)))
  assert_close(wide.logits, tight.logits)
  assert_close(wide.word_weights[:, :3, :, :5], tight.word_weights)


@pytest.mark.long
@pytest.mark.parametrize('classifier', CLASSIFIERS)
def test_logits_of_16_bit_models_are_float32(classifier):
  model = build_small(classifier=classifier, dtype='bfloat16')
  outputs, _ = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), PAIRS, PAIR_MASK))
  assert outputs.logits.dtype == jnp.float32


@pytest.mark.long
def test_pair_weights_of_several_heads_are_grouped_by_head():
  model = build_small(classifier='decomposable(width=6)', pooling='sum', heads=2)
  params = variables(model, PAIRS, PAIR_MASK)
  words = np.asarray(jax.jit(model.apply)(params, PAIRS, PAIR_MASK).word_weights)
  assert words.shape == (3, 2, 2 * 5, 5)
  by_head = words.reshape(3, 2, 2, 5, 5)  # [B, text, N, words of the other text, words of the text]
  for text in (0, 1):
    attends = PAIR_MASK[:, 1 - text] & PAIR_MASK[:, text].any(-1, keepdims=True)
    np.testing.assert_allclose(by_head[:, text].sum(-1), np.stack([attends] * 2, 1), rtol=1e-5)
    assert not np.where(PAIR_MASK[:, text, None, None], 0.0, by_head[:, text]).any()
  assert not np.allclose(by_head[:, :, 0], by_head[:, :, 1])


@pytest.mark.long
@pytest.mark.parametrize('pooling', sample_cases([(pooling,) for pooling in POOLINGS], 2))
def test_pair_output_is_independent_of_padding(pooling):
  model = build_small(classifier='decomposable(width=6)', pooling=pooling)
  params = variables(model, PAIRS, PAIR_MASK)
  run = jax.jit(model.apply)
  tight = run(params, PAIRS, PAIR_MASK)
  wide = run(params, *(np.pad(x, ((0, 0), (0, 0), (0, 3))) for x in (PAIRS, PAIR_MASK)))
  assert_close(wide.logits, tight.logits)
  assert_close(wide.word_weights[:, :, :5, :5], tight.word_weights)
  assert not wide.word_weights[:, :, 5:].any()  # masked words attend to nothing
  message = r'documents must have 2 texts, got 3; expected config.data.buckets of \(2, words\), such as \(\(2, 20\),\)'
  with pytest.raises(UserError, match=message):
    jax.eval_shape(model.apply, params, SOURCE, MASK)


@pytest.mark.long
def test_decomposable_attention_equals_the_equations_of_the_paper():
  model = build_small(classifier='decomposable(width=6)', encoder='embedded', pooling='sum')
  params = variables(model, PAIRS, PAIR_MASK)
  values = jax.tree.map(np.asarray, params['params'])
  output = jax.jit(model.apply)(params, PAIRS, PAIR_MASK)

  def relu(x):
    return np.maximum(x, 0)

  def layers(name, x):
    for i in (0, 1):
      x = relu(x @ values[name][f'Dense_{i}']['kernel'] + values[name][f'Dense_{i}']['bias'])
    return x

  table = values['embedding']['table']['embedding']
  n, m = LENGTHS[2, [0, 2]]
  a, b = table[PAIRS[2, 0, :n]], table[PAIRS[2, 1, :m]]
  e = np.exp(layers('attend', a) @ layers('attend', b).T)
  beta = e / e.sum(1, keepdims=True) @ b
  alpha = (e / e.sum(0)).T @ a
  compared = [layers('compare', np.concatenate(pair, 1)).sum(0) for pair in ((a, beta), (b, alpha))]
  logits = layers('decide', np.concatenate(compared)) @ values['labels']['kernel'] + values['labels']['bias']
  assert_close(output.logits[2], logits, rtol=1e-3)
  assert_close(output.word_weights[2, 1, :n, :m], e / e.sum(1, keepdims=True))
  assert_close(output.word_weights[2, 0, :m, :n], (e / e.sum(0)).T)


def apply_birnn(values, x):
  """Concatenated states [S, F] of a GRU in each direction over x [S, D]."""
  directions = []
  for layer, order in (('RecurrentLayer_0', 1), ('RecurrentLayer_1', -1)):
    cell = values[layer]['RecurrentCell_0']
    state = (np.zeros(cell['kernel'].shape[0]),)
    states = []
    for vector in x[::order]:
      state = gru_step(vector @ cell['inputs']['kernel'] + cell['inputs']['bias'], state, cell['kernel'], cell['bias'])
      states.append(state[0])
    directions.append(np.stack(states)[::order])
  return np.concatenate(directions, -1)


def attention_pooling(values, x):
  """Σ α h and α, with u = tanh(W h + b), α = softmax(u · c)."""
  exponentials = np.exp(np.tanh(x @ values['hidden']['kernel'] + values['hidden']['bias']) @ values['queries'][0])
  weights = exponentials / exponentials.sum()
  return weights @ x, weights


@pytest.mark.long
def test_hierarchy_equals_the_equations_of_the_paper():
  model = build_small(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  values = jax.tree.map(np.asarray, params['params'])
  output = jax.jit(model.apply)(params, SOURCE, MASK)
  table = values['embedding']['table']['embedding']
  for i, lengths in enumerate(LENGTHS):
    sentences = []
    for j, length in enumerate(lengths[lengths > 0]):
      vector, weights = attention_pooling(
        values['AttentionPooling_0'], apply_birnn(values['BiRNN_0'], table[SOURCE[i, j, :length]])
      )
      assert_close(output.word_weights[i, j, 0, :length], weights)
      sentences.append(vector)
    vector, weights = attention_pooling(
      values['AttentionPooling_1'], apply_birnn(values['BiRNN_1'], np.stack(sentences))
    )
    assert_close(output.sentence_weights[i, 0, : len(sentences)], weights)
    assert_close(output.logits[i], vector @ values['labels']['kernel'] + values['labels']['bias'])


@pytest.mark.long
def test_gradients_of_empty_sentences_are_finite():
  model = build_small(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  gradient = jax.jit(jax.grad(lambda params, mask: jnp.sum(model.apply(params, SOURCE, mask).logits * draw(3, 3))))
  for mask in (MASK, np.zeros_like(MASK)):
    grads = gradient(params, mask)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.long
def test_an_ensemble_is_the_mean_of_probabilities_and_weights():
  models = [build_small(), build_small(heads=2)]
  params = [variables(model, SOURCE, MASK)['params'] for model in models]
  outputs = [model.apply({'params': p}, SOURCE, MASK) for model, p in zip(models, params, strict=True)]
  ensemble = ClassifierEnsemble(models).apply({'params': tuple(params)}, SOURCE, MASK)
  probabilities = [np.exp(o.logits) / np.exp(o.logits).sum(-1, keepdims=True) for o in outputs]
  assert_close(np.exp(ensemble.logits), np.mean(probabilities, 0))
  assert_close(ensemble.word_weights, np.mean([o.word_weights.mean(2, keepdims=True) for o in outputs], 0))
  assert_close(ensemble.sentence_weights, np.mean([o.sentence_weights.mean(1, keepdims=True) for o in outputs], 0))
  with pytest.raises(UserError, match='must take pairs of texts or none, got 1 of 2 classifiers'):
    ClassifierEnsemble([build_small(), build_small(classifier='decomposable')])


@pytest.mark.long
def test_an_ensemble_of_pairs_averages_heads_if_their_numbers_differ():
  models = [build_small(classifier='decomposable(width=6)', pooling='sum', heads=heads) for heads in (2, 1)]
  params = [variables(model, PAIRS, PAIR_MASK)['params'] for model in models]
  two, one = (m.apply({'params': p}, PAIRS, PAIR_MASK).word_weights for m, p in zip(models, params, strict=True))
  ensemble = ClassifierEnsemble(models)
  assert ensemble.pair_heads == 1 and ClassifierEnsemble(models[:1] * 2).pair_heads == 2
  words = ensemble.apply({'params': tuple(params)}, PAIRS, PAIR_MASK).word_weights
  assert_close(words, (two.reshape(3, 2, 2, 5, 5).mean(2) + one) / 2)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'classifier': 'flatt'}, "unknown classifier 'flatt'"),
    ({'pooling': 'attenton'}, "unknown pooling 'attenton'"),
    ({'encoder': 'birn'}, "unknown encoder 'birn'"),
    ({'dropout': 1.0}, 'config.model.dropout must be .*less than 1.*, got 1.0'),
    ({'alignment': 'hard'}, "must be trained by backpropagation alone, got 'hard'"),
    ({'alignment': 'latent'}, "must be trained by backpropagation alone, got 'latent'"),
  ],
)
def test_invalid_fields_are_reported(fields, message):
  with pytest.raises(UserError, match=message):
    build_small(**fields)
