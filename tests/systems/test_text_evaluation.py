"""Metrics of attention weights: against values computed by hand, and equal for every kind of vocabulary."""

import jax
import numpy as np
import pytest

from attention_jax.data.batching import gather
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus, normalize_corpus
from attention_jax.data.vocab import train
from attention_jax.decoding.predictor import Predictor
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.systems.text_evaluation import (
  TeacherForcedScorer,
  TextEvaluationConfig,
  alignment_metrics,
  evaluate_corpus,
  select_texts,
  text_metrics,
)
from attention_jax.tokens import UNK
from tests.models.helpers import build_streaming, inputs
from tests.modules.helpers import variables

SPECS = {'word': 'word', 'char': 'char', 'subword': 'subword(size=16)'}
WORDS = train('word', ['cab ab dab'])
CORPUS = Corpus(['cab  ab', 'dab'], ['ab dab', 'cab'], [((0, 0), (1, 1)), ((0, 0),)])
# Weights between words, EOS included. The largest weights of the target words are three links, of which one is wrong.
WORD_WEIGHTS = [np.array([[0.55, 0.45, 0], [0.6, 0.4, 0], [0, 0, 1]]), np.array([[1, 0], [0, 1]])]


def split_to_tokens(weights, source_word_ids, target_word_ids):
  """Weights between words -> weights between tokens: the tokens of a source word share its weight equally.

  The token with the largest weight therefore need not belong to the word with the largest weight.
  """
  eos_word = weights.shape[1] - 1
  source_words = np.array([*source_word_ids, eos_word])
  tokens = np.zeros((len(target_word_ids) + 1, len(source_words)))
  for t, target_word in enumerate([*target_word_ids, -1]):
    for source_word in range(weights.shape[1]):
      is_part = source_words == source_word
      tokens[t, is_part] = weights[target_word, source_word] / is_part.sum()
  return tokens


def scores_of(metrics):
  return [metrics[name].value for name in ('alignment_error_rate', 'precision', 'recall')]


@pytest.mark.parametrize('kind', SPECS)
def test_link_metrics_of_words_do_not_depend_on_the_vocabulary(kind):
  vocabulary = train(SPECS[kind], [*CORPUS.source, *CORPUS.target] * 3)
  weights = [
    split_to_tokens(matrix, vocabulary.word_ids(source), vocabulary.word_ids(target))
    for matrix, source, target in zip(WORD_WEIGHTS, CORPUS.source, CORPUS.target, strict=True)
  ]
  metrics = alignment_metrics(CORPUS, weights, vocabulary, vocabulary)
  assert scores_of(metrics) == pytest.approx([100 / 3, 200 / 3, 200 / 3])
  merging = '' if kind == 'word' else '|merged:words'
  assert metrics['recall'].signature == f'links:argmax{merging}|targets:forced,linked|rows:2'


@pytest.mark.parametrize(
  ('unlinked_targets', 'expected', 'targets'), [(False, [0, 100, 100], ',linked'), (True, [25, 200 / 3, 100], '')]
)
def test_possible_links_are_no_errors_and_unlinked_targets_count_only_on_request(unlinked_targets, expected, targets):
  """With them: Och & Ney 2003: A = {0-0, 0-1; 0-0}, S = {0-0; }, P = {0-0, 0-1; }; 1 - (1 + 2) / (3 + 1)."""
  corpus = Corpus(['cab ab', 'dab'], ['ab dab', 'cab'], [((0, 0),), ()], possible=[((0, 0), (0, 1)), ()])
  metrics = alignment_metrics(corpus, WORD_WEIGHTS, WORDS, WORDS, unlinked_targets)
  assert scores_of(metrics) == pytest.approx(expected)
  assert metrics['recall'].signature == f'links:argmax|targets:forced{targets}|rows:2'


def test_entropy_and_monotonicity_need_no_links():
  without_links = CORPUS._replace(links=None)
  metrics = alignment_metrics(without_links, WORD_WEIGHTS, WORDS, WORDS)
  entropies = [*(-p * np.log(p) - (1 - p) * np.log(1 - p) for p in (0.55, 0.6)), 0]
  assert metrics == {
    'entropy': (pytest.approx(np.mean(entropies)), 'nat', 'per:token|targets:forced|rows:2'),
    'monotonicity': (100, '%', 'links:argmax|per:token|targets:forced|rows:2'),
  }
  assert list(alignment_metrics(CORPUS, WORD_WEIGHTS, WORDS, WORDS))[3:] == list(metrics)
  one_word = alignment_metrics(without_links, [None, WORD_WEIGHTS[1]], WORDS, WORDS)
  assert list(one_word) == ['entropy']  # monotonicity needs two words


@pytest.mark.long
@pytest.mark.parametrize('alignment', [pytest.param('softmax', marks=pytest.mark.long), 'latent_monotonic'])
def test_weights_are_posteriors_and_do_not_depend_on_padding(alignment):
  encoded = encode(CORPUS, WORDS, WORDS)
  attention = Attention(score='additive', alignment=alignment, features=4, heads=1, implementation='xla')
  config = ModelConfig('birnn(features=4)', 'luong(features=8)', embedding=4, attention=attention)
  model = build(config, len(WORDS), len(WORDS))
  ids = np.ones((1, 3), np.int32)
  params = variables(model, ids, ids > 0, ids)['params']
  tight = TeacherForcedScorer(model, ((3, 3),), 8)(params, encoded)
  wide = TeacherForcedScorer(model, ((6, 7),), 8)(params, encoded)
  np.testing.assert_allclose(tight.loss, wide.loss, rtol=1e-5)

  @jax.jit
  def apply_model(source, source_mask, target, target_mask):
    outputs = model.apply({'params': params}, source, source_mask, target)
    return outputs.weights, model.posterior(outputs, target_mask)

  for row, (weights, wide_weights) in enumerate(zip(tight.weights, wide.weights, strict=True)):
    np.testing.assert_allclose(weights, wide_weights, rtol=1e-4, atol=1e-6)
    batch = gather(encoded, np.array([row]), weights.shape[::-1])
    prior, posterior = apply_model(*batch[:4])
    np.testing.assert_allclose(weights, posterior[0], rtol=1e-4, atol=1e-6)
    assert np.allclose(weights, prior[0], rtol=1e-3) == (alignment == 'softmax')


@pytest.mark.long
def test_loss_and_accuracy_are_means_over_tokens_and_unreachable_targets_are_unknown():
  attention = Attention(score='additive', features=4, implementation='xla')
  config = ModelConfig('embedded', 'luong(features=8)', embedding=4, attention=attention)
  model = build(config, len(WORDS), len(WORDS))
  encoded = encode(CORPUS, WORDS, WORDS)
  batch = gather(encoded, np.arange(2), (3, 3))
  params = variables(model, batch.source, batch.source_mask, batch.target, seed=1)['params']
  scorer = TeacherForcedScorer(model, ((3, 3),), 8)
  scores = scorer(params, encoded)
  logits = jax.jit(lambda: model.apply({'params': params}, batch.source, batch.source_mask, batch.target).logits)()
  log_probs = np.asarray(jax.nn.log_softmax(logits))[batch.target_mask]
  target = batch.target[batch.target_mask]
  assert len(target) == 5  # two words, one word, and an EOS after each
  np.testing.assert_allclose(scores.loss, -log_probs[np.arange(5), target].mean(), rtol=1e-5)
  accuracy = (log_probs.argmax(-1) == target).mean()
  assert 0 < accuracy < 1
  np.testing.assert_allclose(scores.accuracy, accuracy)

  def loss_with_first_token(id):
    return scorer(params, encoded._replace(target=np.array([id, *encoded.target[1:]], np.int32))).loss

  assert loss_with_first_token(len(WORDS) + 1) == loss_with_first_token(UNK) != scores.loss


def test_the_lag_of_a_streaming_model_is_measured():
  sizes = (len(WORDS),) * 2
  model = build_streaming(sizes=sizes)
  params = variables(model, *inputs(sizes=sizes), seed=3)['params']
  scorer = TeacherForcedScorer(model, ((3, 3),), 8)
  predictor = Predictor(model, params, WORDS, WORDS, buckets=[(3, 3)])
  options = TextEvaluationConfig(metrics=('exact_match',))
  metrics, _ = evaluate_corpus(params, CORPUS, encode(CORPUS, WORDS, WORDS), scorer, predictor, options, beams=1)
  assert {'average_lagging', 'alignment_error_rate'} <= metrics.keys()


def test_rows_without_weights_are_left_out():
  metrics = alignment_metrics(CORPUS, [None, WORD_WEIGHTS[1]], WORDS, WORDS)
  assert metrics['alignment_error_rate'] == (0, '%', 'links:argmax|targets:forced,linked|rows:1')
  assert alignment_metrics(CORPUS, [None, None], WORDS, WORDS) == {}


def test_rows_of_zero_weights_miss_their_links():
  metrics = alignment_metrics(CORPUS, [0 * WORD_WEIGHTS[0], WORD_WEIGHTS[1]], WORDS, WORDS)
  assert scores_of(metrics) == pytest.approx([50, 100, 100 / 3])


def test_hypotheses_of_grouped_references_must_be_equal():
  corpus = Corpus(['a', 'b', 'a'], ['x', 'y', 'z'])
  texts = select_texts(corpus, ['x', 'w', 'x'], TextEvaluationConfig(group_references=True))
  assert texts == (['a', 'b'], ['x', 'w'], [['x', 'z'], ['y']], [0, 1])
  with pytest.raises(UserError, match='hypotheses 1 and 3 differ, but belong to the same source'):
    select_texts(corpus, corpus.target, TextEvaluationConfig(group_references=True))
  assert select_texts(corpus, corpus.target, TextEvaluationConfig(group_references=False)).hypotheses == corpus.target


def test_hypotheses_are_normalised_as_the_corpus_is():
  corpus = normalize_corpus(Corpus(['a'], ['fu\u0308r']), 'NFC')
  options = TextEvaluationConfig(metrics=('exact_match',))
  for hypothesis in ('für', 'fu\u0308r'):
    assert text_metrics(corpus, [hypothesis], options)['exact_match'].value == 100
