"""Scoring of targets, and the predictor: long sources, prefixes, and replaced unknown tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.decoding import predictor as predictor_module
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.generate import Hypotheses
from attention_jax.decoding.predictor import Predictor
from attention_jax.decoding.scoring import PairScorer
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK
from tests.models.helpers import build_tiny, build_transformer
from tests.modules.helpers import variables

WORDS = word(['a b c d e f g'])  # 11 entries
SIZES = (len(WORDS), len(WORDS))


def init_model_params(model):
  ids = np.ones((1, 3), np.int32)
  return variables(model, ids, ids > 0, ids)['params']


@pytest.fixture(scope='module')
def model_and_params():
  model = build_tiny('bahdanau', 'rnn="gru"', sizes=SIZES)
  return model, init_model_params(model)


@pytest.mark.long
def test_scores_equal_those_of_the_model(model_and_params):
  model, params = model_and_params
  corpus = Corpus(['a b', 'c ' * 40, 'd'], ['b', 'a x a', 'c c'])
  scored = PairScorer(model, params, WORDS, WORDS, [(4, 4)])(corpus)
  assert [pair.tokens for pair in scored] == [['b'], ['a', 'x', 'a'], ['c', 'c']]
  for row, pair in enumerate(scored):
    source = [*WORDS.encode(corpus.source[row]), EOS]
    target = [*WORDS.encode(corpus.target[row]), EOS]
    mask = jnp.ones((1, len(source)), bool)
    outputs = jax.jit(model.apply)({'params': params}, jnp.asarray([source]), mask, jnp.asarray([target]))
    expected = np.asarray(jax.nn.log_softmax(outputs.logits[0]))[np.arange(len(target)), target]
    np.testing.assert_allclose(pair.log_probs, expected, rtol=1e-4, atol=1e-5)
    assert pair.weights.shape == (len(target), len(source))
    np.testing.assert_allclose(pair.weights, outputs.weights[0], rtol=1e-4, atol=1e-5)


def test_an_empty_corpus_has_no_scores(model_and_params):
  assert PairScorer(*model_and_params, WORDS, WORDS, [(4, 4)])(Corpus([], [])) == []


def test_pairs_have_weights_of_every_layer_and_head_on_request(model_and_params):
  model = build_transformer(sizes=SIZES)
  params = init_model_params(model)
  corpus = Corpus(['a b', 'c d e'], ['b', 'a x a'])
  scored = PairScorer(model, params, WORDS, WORDS, [(4, 4)])(corpus, with_layer_weights=True)
  for pair, source_length, target_length in zip(scored, (3, 4), (2, 4), strict=True):
    assert pair.layer_weights.shape == (2, 4, target_length, source_length)
    np.testing.assert_allclose(pair.layer_weights[-1].mean(0), pair.weights, rtol=1e-5)
    np.testing.assert_allclose(pair.layer_weights.sum(-1), 1, rtol=1e-5)
  with pytest.raises(UserError, match='does not attend in each of its layers; expected one of: conv, transformer'):
    PairScorer(*model_and_params, WORDS, WORDS, [(4, 4)])(corpus, with_layer_weights=True)
  with pytest.raises(UserError, match='weights of layers need a single model, got an ensemble of 2'):
    PairScorer(Ensemble([model, model]), (params, params), WORDS, WORDS, [(4, 4)])(corpus, with_layer_weights=True)


def test_sources_that_are_too_long_have_no_hypotheses_and_do_not_affect_the_others():
  model = build_transformer('position="learned(max_positions=10)"', sizes=SIZES)
  params = init_model_params(model)
  predictor = Predictor(model, params, WORDS, WORDS, buckets=[(4, 4)], max_length=4)
  lines = ['a b', 'a ' * 10, 'b ' * 9, 'c ' * 40]  # 3, 11, 10 and 41 tokens with EOS
  predictions = predictor(lines)
  assert [len(prediction.hypotheses) for prediction in predictions] == [1, 0, 1, 0]
  assert [len(prediction.tokens) for prediction in predictions] == [2, 10, 9, 40]
  single = predictor(['b ' * 9])[0].hypotheses[0]
  assert single.tokens == predictions[2].hypotheses[0].tokens
  assert predictor(lines[3:])[0].hypotheses == []


@pytest.mark.long
def test_each_search_is_compiled_once(model_and_params, monkeypatch):
  compiled = []
  compile_search = predictor_module.compile_search
  monkeypatch.setattr(
    predictor_module, 'compile_search', lambda *args: compiled.append(args[1]) or compile_search(*args)
  )
  predictor = Predictor(*model_and_params, WORDS, WORDS, buckets=[(4, 4)], max_length=4)
  for beams in (1, 2, 1, 2):
    predictor(['a ' * 9], beams=beams)
  assert [search.beams for search in compiled] == [1, 2]


def test_a_prefix_must_leave_room_for_eos(model_and_params):
  predictor = Predictor(*model_and_params, WORDS, WORDS, buckets=[(4, 4)], max_length=3)
  assert predictor(['a b'], prefixes=['c d'])[0].hypotheses[0].text == 'c d'
  message = "a prefix must have at most 2 tokens, as hypotheses have at most 3 with EOS, got 3: 'c d e'"
  with pytest.raises(UserError, match=message):
    predictor(['a b', 'c'], prefixes=['', 'c d e'])


@pytest.mark.parametrize('options', [{'prefixes': ['c']}, {'line_numbers': range(3)}], ids=['prefixes', 'line_numbers'])
def test_a_wrong_number_of_prefixes_or_line_numbers_raises(model_and_params, options):
  predictor = Predictor(*model_and_params, WORDS, WORDS, buckets=[(4, 4)], max_length=3)
  with pytest.raises(UserError, match=r'must have an entry for each of the 2 lines, got [13]$'):
    predictor(['a b', 'c'], **options)


@pytest.mark.long
@pytest.mark.parametrize('replace_unknown', [False, True])
def test_prefixes_may_contain_out_of_vocabulary_words(model_and_params, replace_unknown):
  predictor = Predictor(
    *model_and_params, WORDS, WORDS, buckets=[(4, 4)], max_length=4, replace_unknown=replace_unknown
  )
  with_prefix, without_prefix = predictor(['a Ulm', 'b'], prefixes=['c zzz', ''])
  hypothesis = with_prefix.hypotheses[0]
  assert hypothesis.text.split()[:2] == hypothesis.tokens[:2] == ['c', 'zzz']
  assert 'zzz' not in without_prefix.hypotheses[0].tokens


def test_unknown_tokens_are_replaced_by_the_source_token_with_the_largest_weight(model_and_params):
  replacing, plain = (
    Predictor(*model_and_params, WORDS, WORDS, buckets=[(4, 4)], max_length=4, replace_unknown=replace_unknown)
    for replace_unknown in (True, False)
  )
  tokens = np.array([[[UNK, UNK, UNK, EOS]]])
  weights = np.array([[[[0.1, 0.9, 0.0], [0.6, 0.1, 0.3], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]]])
  ones = np.ones((1, 1))
  hypotheses = Hypotheses(tokens, ones, ones, np.array([[4]]), weights)
  replaced = replacing._make_hypothesis(hypotheses, 0, 0, 3, ['a', 'Ulm'], [])
  # The third token attends to EOS alone, so it stays unknown.
  assert replaced.tokens == ['Ulm', 'a', '<unk>'] and replaced.text == 'Ulm a <unk>'
  assert plain._make_hypothesis(hypotheses, 0, 0, 3, ['a', 'Ulm'], []).tokens == ['<unk>'] * 3


@pytest.mark.long
def test_pairs_longer_than_the_buckets_are_padded_to_no_more_than_the_model_accepts():
  model = build_transformer('position="learned(max_positions=10)"', sizes=SIZES)
  params = init_model_params(model)
  corpus = Corpus(['b ' * 9, 'a'], ['a ' * 8, 'c'])  # 10 and 9 tokens with EOS
  scored = PairScorer(model, params, WORDS, WORDS, [(4, 4)])(corpus)
  exact = PairScorer(model, params, WORDS, WORDS, [(10, 10)])(corpus)
  for pair, expected in zip(scored, exact, strict=True):
    np.testing.assert_allclose(pair.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)
  longer = Corpus(['b ' * 10], ['a'])
  with pytest.raises(UserError, match='at most max_positions=10 positions, got 11'):
    PairScorer(model, params, WORDS, WORDS, [(4, 4)])(longer)


@pytest.mark.long
def test_sources_of_an_ensemble_are_padded_to_no_more_than_each_model_accepts():
  models = [build_transformer(sizes=SIZES), build_transformer('position="learned(max_positions=10)"', sizes=SIZES)]
  params = [init_model_params(model) for model in models]
  texts = []
  for order in (1, -1):  # the buckets are those of the first model
    buckets = [(20, 4), (40, 4)]  # both are longer than one model accepts
    predictor = Predictor(Ensemble(models[::order]), tuple(params[::order]), WORDS, WORDS, buckets=buckets)
    (short, long) = predictor(['b a', 'b ' * 20], beams=1)
    texts.append(short.hypotheses[0].text)
    assert not long.hypotheses and predictor.max_source_length(21) == 10
  assert texts[0] == texts[1]
