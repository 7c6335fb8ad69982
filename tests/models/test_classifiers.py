"""Classifiers: independence of padding, and the formulas of the papers."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.document_batches import LabelledBatch
from attention_jax.errors import UserError
from attention_jax.models.classifiers import ClassifierConfig, build_classifier
from attention_jax.modules.attention import Attention
from attention_jax.modules.pooling import POOLINGS
from attention_jax.systems.classification import redundancy
from tests.modules.helpers import assert_close, draw, variables
from tests.modules.reference_cells import gru_step
from tests.sweeps import sample_cases

LENGTHS = np.array([[5, 3, 0], [4, 0, 0], [2, 2, 5]])  # words of each sentence of each document
MASK = jnp.asarray(np.arange(5) < LENGTHS[..., None])
SOURCE = jnp.where(MASK, np.random.default_rng(0).integers(4, 20, MASK.shape), 0)


def make_classifier(**fields):
  """Builds a small classifier; `fields` are those of ClassifierConfig and of its attention."""
  defaults = {field.name: field.default for field in dataclasses.fields(Attention)}
  attention = {name: defaults[name] for name in ('alignment', 'heads', 'implementation')}
  attention |= {'score': 'dot', 'features': 6}
  attention |= {name: fields.pop(name) for name in tuple(fields) if name in attention}
  model = dataclasses.asdict(ClassifierConfig(encoder='birnn(features=6)', embedding=7)) | fields
  return build_classifier(model | {'attention': attention}, 20, 3)


CASES = sample_cases(
  [({'classifier': c, 'pooling': p},) for c, p in itertools.product(('flat', 'hierarchical'), POOLINGS)], 2
)
CASES += [
  {'classifier': 'hierarchical', 'encoder': 'embedded', 'hidden': 5},
  {'classifier': 'flat', 'encoder': 'transformer(features=8, layers=1, heads=2)', 'pooling': 'attention(hops=3)'},
]


@pytest.mark.parametrize('fields', CASES, ids=lambda fields: '-'.join(map(str, fields.values())))
def test_results_do_not_depend_on_padding_and_other_documents(fields):
  model = make_classifier(**fields)
  params = variables(model, SOURCE, MASK)
  outputs = model.apply(params, SOURCE, MASK)
  assert outputs.logits.shape == (3, 3) and np.isfinite(outputs.logits).all()
  alone = model.apply(params, SOURCE[1:2, :1, :4], MASK[1:2, :1, :4])
  assert_close(outputs.logits[1:2], alone.logits)
  assert_close(outputs.words[1:2, :1, :, :4], alone.words)
  assert not jnp.where(MASK[:, :, None], 0.0, outputs.words).any()
  if fields['classifier'] == 'hierarchical':
    np.testing.assert_allclose(outputs.words.sum(-1)[MASK.any(-1)], 1, rtol=1e-5)
    assert_close(outputs.sentences[1, 0], np.array([1.0, 0, 0]))


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
def test_flat_does_not_depend_on_the_padding_of_sentences(fields):
  model = make_classifier(classifier='flat', **fields)
  params = variables(model, SOURCE, MASK)
  narrow = model.apply(params, SOURCE, MASK)
  wide = model.apply(params, *(jnp.pad(x, ((0, 0), (0, 1), (0, 2))) for x in (SOURCE, MASK)))
  assert_close(wide.logits, narrow.logits)
  assert_close(wide.words[:, :3, :, :5], narrow.words)


@pytest.mark.parametrize('pooling', POOLINGS)
def test_pairs_do_not_depend_on_padding(pooling):
  model = make_classifier(classifier='decomposable(width=6)', pooling=pooling)
  source, mask = SOURCE[:, ::2], MASK[:, ::2]
  params = variables(model, source, mask)
  narrow = model.apply(params, source, mask)
  wide = model.apply(params, *(jnp.pad(x, ((0, 0), (0, 0), (0, 3))) for x in (source, mask)))
  assert_close(wide.logits, narrow.logits)
  assert_close(wide.words[:, :, :5, :5], narrow.words)
  assert not wide.words[:, :, 5:].any()  # masked words have no weights
  with pytest.raises(UserError, match=r'decomposable: the inputs must be pairs of texts .* got 3 texts'):
    model.apply(params, SOURCE, MASK)


def test_decomposable_equals_the_formulas_of_its_paper():
  model = make_classifier(classifier='decomposable(width=6)', encoder='embedded', pooling='sum')
  source, mask = SOURCE[:, ::2], MASK[:, ::2]
  params = variables(model, source, mask)
  outputs = model.apply(params, source, mask)
  p = jax.tree.map(np.asarray, params['params'])

  def layers(name, x):
    for i in (0, 1):
      x = np.maximum(x @ p[name][f'Dense_{i}']['kernel'] + p[name][f'Dense_{i}']['bias'], 0)
    return x

  table = p['embedding']['table']['embedding']
  n, m = LENGTHS[2, [0, 2]]
  a, b = table[source[2, 0, :n]], table[source[2, 1, :m]]
  e = np.exp(layers('attend', a) @ layers('attend', b).T)
  beta, alpha = e / e.sum(1, keepdims=True) @ b, (e / e.sum(0)).T @ a
  compared = [layers('compare', np.concatenate(pair, 1)).sum(0) for pair in ((a, beta), (b, alpha))]
  logits = layers('decide', np.concatenate(compared)) @ p['labels']['kernel'] + p['labels']['bias']
  assert_close(outputs.logits[2], logits, rtol=1e-3)
  assert_close(outputs.words[2, 1, :n, :m], e / e.sum(1, keepdims=True))
  assert_close(outputs.words[2, 0, :m, :n], (e / e.sum(0)).T)


def literal_birnn(p, x):
  """Encodes x [S, D] as [S, F] by a GRU in each direction."""
  outputs = []
  for layer, order in (('RecurrentLayer_0', 1), ('RecurrentLayer_1', -1)):
    cell = p[layer]['RecurrentCell_0']
    state = (np.zeros(cell['kernel'].shape[0]),)
    states = []
    for row in x[::order]:
      state = gru_step(row @ cell['inputs']['kernel'] + cell['inputs']['bias'], state, cell['kernel'], cell['bias'])
      states.append(state[0])
    outputs.append(np.stack(states)[::order])
  return np.concatenate(outputs, -1)


def literal_pooling(p, x):
  """Σ α h and α, for u = tanh(W h + b) and α = softmax(u · c)."""
  power = np.exp(np.tanh(x @ p['hidden']['kernel'] + p['hidden']['bias']) @ p['sought'][0])
  return power / power.sum() @ x, power / power.sum()


def test_hierarchical_equals_the_formulas_of_its_paper():
  model = make_classifier(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  outputs = model.apply(params, SOURCE, MASK)
  p = jax.tree.map(np.asarray, params['params'])
  table = p['embedding']['table']['embedding']
  for i, lengths in enumerate(LENGTHS):
    sentences = []
    for j, length in enumerate(lengths[lengths > 0]):
      words = literal_birnn(p['BiRNN_0'], table[SOURCE[i, j, :length]])
      vector, weights = literal_pooling(p['AttentionPooling_0'], words)
      assert_close(outputs.words[i, j, 0, :length], weights)
      sentences.append(vector)
    vector, weights = literal_pooling(p['AttentionPooling_1'], literal_birnn(p['BiRNN_1'], np.stack(sentences)))
    assert_close(outputs.sentences[i, 0, : len(sentences)], weights)
    assert_close(outputs.logits[i], vector @ p['labels']['kernel'] + p['labels']['bias'])


def test_redundancy_equals_the_formula_of_its_paper():
  model = make_classifier(classifier='flat', pooling='attention(hops=3)')
  outputs = model.apply(variables(model, SOURCE, MASK), SOURCE, MASK)
  batch = LabelledBatch(SOURCE, MASK, np.zeros(3, np.int32), np.array([0, -1, 1]))  # the second row is filler
  literal = 0.0
  for document in (0, 2):
    hops = np.stack([np.asarray(outputs.words[document, :, hop]).reshape(-1) for hop in range(3)])
    literal += ((hops @ hops.T - np.eye(3)) ** 2).sum()
  assert_close(redundancy(outputs, batch, {}), literal)


def test_gradients_are_finite_where_a_sentence_is_empty():
  model = make_classifier(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  nothing = jnp.zeros_like(MASK)
  for mask in (MASK, nothing):
    grads = jax.grad(lambda p, mask=mask: jnp.sum(model.apply(p, SOURCE, mask).logits * draw(3, 3)))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'classifier': 'flatt'}, "unknown classifier 'flatt'"),
    ({'pooling': 'attenton'}, "unknown pooling 'attenton'"),
    ({'pooling': 'attention(hop=2)'}, "unknown option of pooling 'attention': 'hop'"),
    ({'pooling': 'attention(hops=0)'}, 'option hops must be at least 1, got 0'),
    ({'encoder': 'birn'}, "unknown encoder 'birn'"),
    ({'dropout': 1.0}, 'dropout must be at least 0 and less than 1, got 1.0'),
    ({'alignment': 'hard'}, "must train by backpropagation alone, got 'hard'; expected one of: .*softmax"),
    ({'alignment': 'latent'}, "must train by backpropagation alone, got 'latent'"),
  ],
)
def test_user_errors(fields, message):
  with pytest.raises(UserError, match=message):
    make_classifier(**fields)
