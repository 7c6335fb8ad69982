"""Classifiers: padding, documents beside each other, and hierarchies, hops and decomposable attention as formulas."""

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


def classifier(**fields):
  own = {f.name: f.default for f in dataclasses.fields(Attention) if f.name in ('alignment', 'heads', 'implementation')}
  own |= {'score': 'dot', 'features': 6}
  own |= {name: fields.pop(name) for name in tuple(fields) if name in own}
  model = dataclasses.asdict(ClassifierConfig(encoder='birnn(features=6)', embedding=7)) | fields
  return build_classifier(model | {'attention': own}, 20, 3)


CASES = sample_cases(
  [({'classifier': c, 'pooling': p},) for c, p in itertools.product(('flat', 'hierarchical'), POOLINGS)], 2
)
CASES += [
  {'classifier': 'hierarchical', 'encoder': 'embedded', 'hidden': 5},
  {'classifier': 'flat', 'encoder': 'transformer(features=8, layers=1, heads=2)', 'pooling': 'attention(hops=3)'},
]


@pytest.mark.parametrize('fields', CASES, ids=lambda fields: '-'.join(map(str, fields.values())))
def test_a_document_is_the_same_without_padding_and_neighbours(fields):
  model = classifier(**fields)
  params = variables(model, SOURCE, MASK)
  run = lambda source, mask: model.apply(params, source, mask)
  whole = run(SOURCE, MASK)
  assert whole.logits.shape == (3, 3) and np.isfinite(whole.logits).all()
  alone = run(SOURCE[1:2, :1, :4], MASK[1:2, :1, :4])
  assert_close(whole.logits[1:2], alone.logits)
  assert_close(whole.words[1:2, :1, :, :4], alone.words)
  there = MASK[:, :, None]
  assert not jnp.where(there, 0.0, whole.words).any()
  if fields['classifier'] == 'hierarchical':
    np.testing.assert_allclose(whole.words.sum(-1)[MASK.any(-1)], 1, rtol=1e-5)
    assert_close(whole.sentences[1, 0], np.array([1.0, 0, 0]))


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
def test_where_sentences_are_padded_is_nothing_to_one_level(fields):
  model = classifier(classifier='flat', **fields)
  params = variables(model, SOURCE, MASK)
  tight = model.apply(params, SOURCE, MASK)
  wide = model.apply(params, *(jnp.pad(x, ((0, 0), (0, 1), (0, 2))) for x in (SOURCE, MASK)))
  assert_close(wide.logits, tight.logits)
  assert_close(wide.words[:, :3, :, :5], tight.words)


@pytest.mark.parametrize('pooling', POOLINGS)
def test_pairs_are_the_same_without_padding(pooling):
  model = classifier(classifier='decomposable(width=6)', pooling=pooling)
  source, mask = SOURCE[:, ::2], MASK[:, ::2]
  params = variables(model, source, mask)
  tight = model.apply(params, source, mask)
  wide = model.apply(params, *(jnp.pad(x, ((0, 0), (0, 0), (0, 3))) for x in (source, mask)))
  assert_close(wide.logits, tight.logits)
  assert_close(wide.words[:, :, :5, :5], tight.words)
  assert not wide.words[:, :, 5:].any()  # words that are not there look at nothing
  with pytest.raises(UserError, match='decomposable: two texts are compared, got 3'):
    model.apply(params, SOURCE, MASK)


def test_decomposable_attention_is_the_formula_of_its_paper():
  model = classifier(classifier='decomposable(width=6)', encoder='embedded', pooling='sum')
  source, mask = SOURCE[:, ::2], MASK[:, ::2]
  params = variables(model, source, mask)
  own, found = jax.tree.map(np.asarray, params['params']), model.apply(params, source, mask)
  relu = lambda x: np.maximum(x, 0)

  def layers(name, x):
    for i in (0, 1):
      x = relu(x @ own[name][f'Dense_{i}']['kernel'] + own[name][f'Dense_{i}']['bias'])
    return x

  table, (n, m) = np.asarray(own['embedding']['table']['embedding']), LENGTHS[2, [0, 2]]
  a, b = table[source[2, 0, :n]], table[source[2, 1, :m]]
  e = np.exp(layers('attend', a) @ layers('attend', b).T)
  beta, alpha = e / e.sum(1, keepdims=True) @ b, (e / e.sum(0)).T @ a
  compared = [layers('compare', np.concatenate(pair, 1)).sum(0) for pair in ((a, beta), (b, alpha))]
  logits = layers('decide', np.concatenate(compared)) @ own['labels']['kernel'] + own['labels']['bias']
  assert_close(found.logits[2], logits, rtol=1e-3)
  assert_close(found.words[2, 1, :n, :m], e / e.sum(1, keepdims=True))
  assert_close(found.words[2, 0, :m, :n], (e / e.sum(0)).T)


def read_by_a_birnn(own, x):
  """[S, D] -> [S, F]: a GRU from each side, side by side."""
  found = []
  for layer, order in (('RecurrentLayer_0', 1), ('RecurrentLayer_1', -1)):
    cell = own[layer]['RecurrentCell_0']
    state, states = (np.zeros(cell['kernel'].shape[0]),), []
    for one in x[::order]:
      state = gru_step(one @ cell['inputs']['kernel'] + cell['inputs']['bias'], state, cell['kernel'], cell['bias'])
      states.append(state[0])
    found.append(np.stack(states)[::order])
  return np.concatenate(found, -1)


def pooled(own, x):
  """u = tanh(W h + b), α = softmax(u · c), Σ α h."""
  power = np.exp(np.tanh(x @ own['hidden']['kernel'] + own['hidden']['bias']) @ own['sought'][0])
  return power / power.sum() @ x, power / power.sum()


def test_a_hierarchy_is_the_formulas_of_its_paper():
  model = classifier(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  own, found = jax.tree.map(np.asarray, params['params']), model.apply(params, SOURCE, MASK)
  table = own['embedding']['table']['embedding']
  for i, lengths in enumerate(LENGTHS):
    sentences = []
    for j, length in enumerate(lengths[lengths > 0]):
      vector, weights = pooled(own['AttentionPooling_0'], read_by_a_birnn(own['BiRNN_0'], table[SOURCE[i, j, :length]]))
      assert_close(found.words[i, j, 0, :length], weights)
      sentences.append(vector)
    vector, weights = pooled(own['AttentionPooling_1'], read_by_a_birnn(own['BiRNN_1'], np.stack(sentences)))
    assert_close(found.sentences[i, 0, : len(sentences)], weights)
    assert_close(found.logits[i], vector @ own['labels']['kernel'] + own['labels']['bias'])


def test_redundancy_is_the_formula_of_its_paper():
  model = classifier(classifier='flat', pooling='attention(hops=3)')
  outputs = model.apply(variables(model, SOURCE, MASK), SOURCE, MASK)
  batch = LabelledBatch(SOURCE, MASK, np.zeros(3, np.int32), np.array([0, -1, 1]))  # the second row is a filler
  literal = 0.0
  for document in (0, 2):
    hops = np.stack([np.asarray(outputs.words[document, :, hop]).reshape(-1) for hop in range(3)])
    literal += ((hops @ hops.T - np.eye(3)) ** 2).sum()
  assert_close(redundancy(outputs, batch, {}), literal)


def test_gradients_are_finite_where_a_sentence_is_empty():
  model = classifier(classifier='hierarchical')
  params = variables(model, SOURCE, MASK)
  nothing = jnp.zeros_like(MASK)
  for mask in (MASK, nothing):
    grads = jax.grad(lambda p, mask=mask: jnp.sum(model.apply(p, SOURCE, mask).logits * draw(3, 3)))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_every_word_of_a_spec_is_known():
  for fields, said in (
    ({'classifier': 'flatt'}, "unknown classifier 'flatt'"),
    ({'pooling': 'attenton'}, "unknown pooling 'attenton'"),
    ({'pooling': 'attention(hop=2)'}, "unknown option of pooling 'attention': 'hop'"),
    ({'pooling': 'attention(hops=0)'}, 'hops is 0'),
    ({'encoder': 'birn'}, "unknown encoder 'birn'"),
    ({'dropout': 1.0}, 'dropout is 1.0'),
    ({'alignment': 'hard'}, "alignment='hard' learns by a loss over words that are said"),
    ({'alignment': 'latent'}, "alignment='latent' learns by a loss over words that are said"),
  ):
    with pytest.raises(UserError, match=said.replace('(', r'\(')):
      classifier(**fields)
