"""What is measured of weights: by hand, and the same for words however they are cut into tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import gather
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import train
from attention_jax.inference.evaluation import TeacherForcedScorer, alignment_metrics
from attention_jax.models.encoder_decoder import ModelConfig, build
from attention_jax.systems.translation import initial_params

SPECS = {'word': 'word', 'char': 'char', 'subword': 'subword(size=16)'}
CORPUS = Corpus(['cab  ab', 'dab'], ['ab dab', 'cab'], [((0, 0), (1, 1)), ((0, 0),)])
WORDS = [np.array([[0.55, 0.45, 0], [0.6, 0.4, 0], [0, 0, 1]]), np.array([[1, 0], [0, 1]])]  # one link of 3 is wrong


def spread(weights, source, target):
  """Weights between words -> between tokens, those of a source word shared evenly: the heaviest may be in another."""
  tokens = np.zeros((len(target) + 1, len(source) + 1))
  for t, word in enumerate([*target, -1]):
    for s in range(weights.shape[1]):
      mine = [i for i, other in enumerate([*source, weights.shape[1] - 1]) if other == s]
      tokens[t, mine] = weights[word, s] / len(mine)
  return tokens


@pytest.mark.parametrize('kind', SPECS)
def test_links_between_words_are_measured_with_every_vocabulary(kind):
  vocabulary = train(SPECS[kind], [*CORPUS.source, *CORPUS.target] * 3)
  weights = [
    spread(w, vocabulary.word_ids(s), vocabulary.word_ids(t))
    for w, s, t in zip(WORDS, CORPUS.source, CORPUS.target, strict=True)
  ]
  found = alignment_metrics(CORPUS, weights, vocabulary, vocabulary)
  values = [found[name].value for name in ('alignment_error_rate', 'precision', 'recall')]
  assert values == pytest.approx([100 / 3, 200 / 3, 200 / 3])
  merged = '' if kind == 'word' else '|merged:words'
  assert found['recall'].signature == f'links:argmax{merged}|targets:forced,linked|rows:2'


def test_without_links_weights_are_still_described():
  vocabulary = train('word', ['cab ab dab'])
  found = alignment_metrics(CORPUS._replace(links=None), WORDS, vocabulary, vocabulary)
  nats = [*(-p * np.log(p) - (1 - p) * np.log(1 - p) for p in (0.55, 0.6)), 0]
  assert found == {
    'entropy': (pytest.approx(np.mean(nats)), 'nat', 'per:token|targets:forced|rows:2'),
    'monotonicity': (100, '%', 'links:argmax|per:token|targets:forced|rows:2'),
  }
  assert list(alignment_metrics(CORPUS, WORDS, vocabulary, vocabulary))[3:] == list(found)
  assert list(alignment_metrics(CORPUS._replace(links=None), [None, WORDS[1]], vocabulary, vocabulary)) == ['entropy']


@pytest.mark.parametrize('alignment', ['softmax', 'latent_monotonic'])
def test_alignments_are_measured_given_the_whole_target_and_no_padding(alignment):
  vocabulary = train('word', ['cab ab dab'])
  encoded = encode(CORPUS, vocabulary, vocabulary)
  attention = {'score': 'additive', 'alignment': alignment, 'features': 4, 'heads': 1, 'implementation': 'xla'}
  fields = vars(ModelConfig('birnn(features=4)', 'luong(features=8)', embedding=4))
  model = build(fields | {'attention': attention}, len(vocabulary), len(vocabulary))
  params = initial_params(model, 1)
  tight, wide = (TeacherForcedScorer(model, buckets, 8)(params, encoded) for buckets in (((3, 2), (3, 3)), ((6, 7),)))
  np.testing.assert_allclose(tight.loss, wide.loss, rtol=1e-5)
  for row, (one, other) in enumerate(zip(tight.weights, wide.weights, strict=True)):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    batch = gather(encoded, np.array([row]), one.shape[::-1])
    source, source_mask, target, target_mask = map(jnp.asarray, batch[:4])
    outputs = model.apply({'params': params}, source, source_mask, target)
    np.testing.assert_allclose(one, model.posterior(outputs, target_mask)[0], rtol=1e-4, atol=1e-6)
    assert np.allclose(one, outputs.weights[0], rtol=1e-3) == (alignment == 'softmax')


def test_rows_that_fit_no_bucket_are_left_out_and_those_that_look_nowhere_are_not():
  vocabulary = train('word', ['cab ab dab'])
  found = alignment_metrics(CORPUS, [None, WORDS[1]], vocabulary, vocabulary)
  assert found['alignment_error_rate'] == (0, '%', 'links:argmax|targets:forced,linked|rows:1')
  assert alignment_metrics(CORPUS, [None, None], vocabulary, vocabulary) == {}
  lost = alignment_metrics(CORPUS, [0 * WORDS[0], WORDS[1]], vocabulary, vocabulary)  # who looks nowhere misses
  assert lost['recall'].value == pytest.approx(100 / 3) and lost['precision'].value == 100
