"""Given targets token by token, hypotheses by consensus, unknown words replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.search import Hypotheses
from attention_jax.errors import UserError
from attention_jax.inference.minimum_bayes_risk import expected_utility
from attention_jax.inference.predictor import Predictor
from attention_jax.inference.scoring import score_pairs
from attention_jax.systems.heatmaps import plot_layers
from attention_jax.tokens import EOS, UNK
from tests.models.helpers import build_tiny, build_transformer

WORDS = word(['a b c d e f g'])  # 11 entries
SIZES = (len(WORDS), len(WORDS))


@pytest.fixture(scope='module')
def trained():
  model = build_tiny('bahdanau', 'rnn="gru"', sizes=SIZES)
  ids = jnp.ones((1, 3), jnp.int32)
  params = model.init(jax.random.key(0), ids, ids > 0, ids)['params']
  return model, params


def test_scores_are_those_of_the_model(trained):
  model, params = trained
  corpus = Corpus(['a b', 'c ' * 40, 'd'], ['b', 'a x a', 'c c'])
  scored = score_pairs(model, params, corpus, WORDS, WORDS, [(4, 4)])
  assert [one.tokens for one in scored] == [['b'], ['a', 'x', 'a'], ['c', 'c']]
  for row, one in enumerate(scored):
    source, target = ([*WORDS.encode(side[row]), EOS] for side in (corpus.source, corpus.target))
    given = jnp.asarray([source]), jnp.ones((1, len(source)), bool), jnp.asarray([target])
    outputs = model.apply({'params': params}, *given)
    expected = np.asarray(jax.nn.log_softmax(outputs.logits[0]))[np.arange(len(target)), target]
    np.testing.assert_allclose(one.log_probs, expected, rtol=1e-4, atol=1e-5)
    assert one.weights.shape == (len(target), len(source))
    np.testing.assert_allclose(one.weights, outputs.weights[0], rtol=1e-4, atol=1e-5)


def test_every_layer_and_head(trained, tmp_path):
  model = build_transformer(sizes=SIZES)
  ids = jnp.ones((1, 3), jnp.int32)
  params = jax.jit(lambda: model.init(jax.random.key(0), ids, ids > 0, ids)['params'])()
  corpus = Corpus(['a b', 'c d e'], ['b', 'a x a'])
  scored = score_pairs(model, params, corpus, WORDS, WORDS, [(4, 4)], layers=True)
  for one, size, length in zip(scored, (3, 4), (2, 4), strict=True):
    assert one.layers.shape == (2, 4, length, size)
    np.testing.assert_allclose(one.layers[-1].mean(0), one.weights, rtol=1e-5)
    np.testing.assert_allclose(one.layers.sum(-1), 1, rtol=1e-5)
  plot_layers(model, params, corpus, ['one', 'two'], WORDS, WORDS, [(4, 4)], tmp_path / 'layers.png')
  assert (tmp_path / 'layers.png').read_bytes()[:4] == b'\x89PNG'
  with pytest.raises(UserError, match='does not attend in several layers; possible: conv, transformer'):
    score_pairs(*trained, corpus, WORDS, WORDS, [(4, 4)], layers=True)
  with pytest.raises(UserError, match='layers are those of one run'):
    score_pairs(Ensemble([model, model]), (params, params), corpus, WORDS, WORDS, [(4, 4)], layers=True)


def test_lines_that_the_model_cannot_read_get_nothing_and_harm_no_other():
  model = build_transformer('position="learned(max_positions=10)"', sizes=SIZES)
  ids = jnp.ones((1, 3), jnp.int32)
  params = jax.jit(lambda: model.init(jax.random.key(0), ids, ids > 0, ids)['params'])()
  predictor = Predictor(model, params, WORDS, WORDS, buckets=[(4, 4)], max_length=4)
  lines = ['a b', 'a ' * 10, 'b ' * 9, 'c ' * 40]  # with their ends 3, 11, 10 and 41 tokens
  found = predictor(lines)
  assert [len(one.hypotheses) for one in found] == [1, 0, 1, 0]
  assert [len(one.tokens) for one in found] == [2, 10, 9, 40]
  alone = predictor(['b ' * 9])[0].hypotheses[0]
  assert alone.tokens == found[2].hypotheses[0].tokens
  assert predictor(lines[3:])[0].hypotheses == []


def test_lines_that_fit_a_bucket_cost_no_tries(trained, monkeypatch):
  predictor = Predictor(*trained, WORDS, WORDS, buckets=[(4, 4), (9, 9)], max_length=4)
  monkeypatch.setattr(predictor, '_reads', None)
  assert len(predictor(['a b', 'c'])) == 2


def test_a_prefix_must_leave_room(trained):
  predictor = Predictor(*trained, WORDS, WORDS, buckets=[(4, 4)], max_length=3)
  assert predictor(['a b'], prefixes=['c d'])[0].hypotheses[0].text == 'c d'
  with pytest.raises(UserError, match='a prefix has 3 tokens, and hypotheses at most 3 with their end'):
    predictor(['a b'], prefixes=['c d e'])


def test_outputs_begin_with_words_that_nobody_knows(trained):
  for replaced in (False, True):
    options = {'buckets': [(4, 4)], 'max_length': 4, 'replace_unknown': replaced}
    predictor = Predictor(*trained, WORDS, WORDS, **options)
    found, free = predictor(['a Ulm', 'b'], prefixes=['c zzz', ''])
    assert found.hypotheses[0].text.split()[:2] == found.hypotheses[0].tokens[:2] == ['c', 'zzz']
    assert 'zzz' not in free.hypotheses[0].tokens


def test_unknown_words_are_replaced_by_where_the_weights_are(trained):
  predictor, plain = (
    Predictor(*trained, WORDS, WORDS, buckets=[(4, 4)], max_length=4, replace_unknown=replaced)
    for replaced in (True, False)
  )
  tokens = np.array([[[UNK, UNK, UNK, EOS]]])
  weights = np.array([[[[0.1, 0.9, 0.0], [0.6, 0.1, 0.3], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]]])
  one = np.ones((1, 1))
  found = Hypotheses(tokens, one, one, np.array([[4]]), weights)
  said = predictor._hypothesis(found, 0, 0, 3, ['a', 'Ulm'], [])
  assert said.tokens == ['Ulm', 'a', '<unk>'] and said.text == 'Ulm a <unk>'  # no weight tells nothing
  assert plain._hypothesis(found, 0, 0, 3, ['a', 'Ulm'], []).tokens == ['<unk>'] * 3


def test_utility_is_the_mean_agreement_with_all():
  texts = ['a b c d', 'a b c e', 'x', 'a b c d']
  exact = expected_utility(texts, 'exact_match')
  assert exact == [50, 25, 25, 50]
  chrf = expected_utility(texts, 'chrf')
  assert np.argmax(chrf) == 0 and chrf[0] == chrf[3] > chrf[1] > chrf[2]
  assert expected_utility(['a', 'b'], 'ter') == [-50, -50]  # edits: less is better
  by_probability = expected_utility(['a', 'b'], 'exact_match', [-700.0 + np.log(3), -700.0])
  np.testing.assert_allclose(by_probability, [75, 25])
  with pytest.raises(UserError, match="unknown metric 'blue'"):
    expected_utility(texts, 'blue')


def test_short_and_empty_lines_agree_as_far_as_they_do():
  short = expected_utility(['a b c', 'a b c', 'a b d'], 'bleu(tokenize="none")')
  assert short[0] == short[1] > short[2] > 0
  for metric, same, other in (('character_error_rate', 0, -100), ('exact_match', 100, 0), ('chrf', 100, 0)):
    assert expected_utility(['', 'b'], metric)[0] == pytest.approx((same + other) / 2), metric
