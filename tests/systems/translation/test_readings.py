"""Readings of a model: of lines with several hypotheses, of layers and heads, and the errors of a request."""

from types import SimpleNamespace

import numpy as np
import pytest

from attention_jax.analysis.reading import Reading, ReadingRequest
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import char, subword, word
from attention_jax.decoding.predictor import Predictor
from attention_jax.errors import UserError
from attention_jax.models.traits import Traits
from attention_jax.systems.translation.readings import Reader, _edited_system, read
from tests.models.helpers import build_transformer
from tests.modules.helpers import variables

WORDS = word(['a b c d e f g'])


def make_reader(vocabulary, bucket):
  """A reader of a model with random parameters."""
  model = build_transformer(sizes=(len(vocabulary), len(vocabulary)))
  ids = np.ones((1, 3), np.int32)
  params = variables(model, ids, ids > 0, ids)['params']
  return Reader(model, params, vocabulary, vocabulary, [bucket])


@pytest.fixture(scope='module')
def reader():
  return make_reader(WORDS, (4, 4))


@pytest.fixture(scope='module')
def predictor(reader):
  return Predictor(reader.model, reader.params, WORDS, WORDS, buckets=reader.buckets)


@pytest.mark.long
def test_each_line_has_the_requested_hypotheses(reader, predictor):
  readings = reader.read_lines(predictor, 3, ReadingRequest(inputs=['a b', 'c'], hypotheses=2))
  assert [reading.name for reading in readings] == ['a b', 'a b', 'c', 'c']
  assert readings[0].score >= readings[1].score
  for reading in readings:
    assert reading.weights.shape == (len(reading.target_tokens), len(reading.source_tokens))
    assert reading.source_tokens[-1] == '</s>'


def test_mistakes_in_a_request_raise(reader, predictor):
  with pytest.raises(UserError, match='hypotheses must be at most 3, the beam size, got 4'):
    reader.read_lines(predictor, 3, ReadingRequest(inputs=['a b'], hypotheses=4))
  with pytest.raises(UserError, match='an empty line'):
    reader.read_lines(predictor, 3, ReadingRequest(inputs=[' ']))
  with pytest.raises(UserError, match='hypotheses must be 1 for rows, which are read with their reference, got 2'):
    reader.read_rows(Corpus(['a b'], ['d']), ReadingRequest(rows=['0'], hypotheses=2))
  corpus = Corpus(['a b', 'a b c d e'], ['d', 'e'])
  for rows in (['1'], ['0', '1']):
    with pytest.raises(UserError, match="row 1 of split 'test' fits no bucket; see config"):
      reader.read_rows(corpus, ReadingRequest(rows=rows))


WITHOUT_ATTENTION = SimpleNamespace(model=SimpleNamespace(traits=Traits(attends=False)))


@pytest.mark.parametrize(
  ('system', 'options', 'message'),
  [
    (object(), {'hypotheses': 0}, 'hypotheses must be at least 1, got 0'),
    (object(), {'analyses': ['entropi']}, "unknown analysis 'entropi'"),
    (WITHOUT_ATTENTION, {}, 'does not attend: it has no weights'),
  ],
)
def test_a_wrong_request_raises_before_the_search(system, options, message):
  with pytest.raises(UserError, match=message):
    read(system, {}, ReadingRequest(inputs=['a b'], **options))


@pytest.mark.long
def test_readings_have_the_requested_layers_and_analyses(reader, predictor):
  request = ReadingRequest(inputs=['a b'], layers=True, analyses=['entropy', 'rollout'])
  readings = reader.read_lines(predictor, 2, request)
  readings = [reading._replace(target='d e') for reading in readings]
  (reading,) = reader.complete(readings, request)
  assert reading.target_tokens == ['d', 'e', '</s>']
  assert list(reading.matrices) == ['weights', *(f'layer {l}, head {n}' for l in range(2) for n in range(4))]
  heads = [reading.matrices[f'layer 1, head {n}'] for n in range(4)]
  np.testing.assert_allclose(np.mean(heads, 0), reading.weights, rtol=1e-5)
  assert reading.measurements.keys() == {'entropy', 'rollout'} and reading.maps == {}
  np.testing.assert_allclose(reading.measurements['rollout'].values.sum(1), 1, rtol=1e-6)


def test_an_empty_hypothesis_raises(reader, predictor):
  request = ReadingRequest(inputs=['a b'], layers=True)
  (reading,) = reader.read_lines(predictor, 1, request)
  with pytest.raises(UserError, match="the target of 'a b' is empty"):
    reader.complete([reading._replace(target='')], request)


@pytest.mark.long
def test_rows_have_their_sure_and_possible_links(reader):
  links = [((0, 0),), ((0, 0),)]
  corpus = Corpus(['a b', 'c'], ['d', 'e'], links, possible=[((0, 0), (1, 0)), ((0, 0),)])
  (reading,) = reader.read_rows(corpus, ReadingRequest(rows=['0']))
  assert np.array(reading.gold).tolist() == [[0, 0], [1, 0]] and np.array(reading.sure).tolist() == [[0, 0]]
  (reading,) = reader.complete([reading], ReadingRequest(words=True))
  assert (reading.gold, reading.sure) == ([(0, 0), (1, 0)], [(0, 0)])
  (reading,) = reader.read_rows(corpus._replace(possible=None), ReadingRequest(rows=['0']))
  assert np.array(reading.gold).tolist() == [[0, 0]] and reading.sure is None


def test_weights_of_characters_are_merged_to_words():
  character_reader = make_reader(char(['ab cd']), (8, 8))
  tokens = ['a', 'b', ' ', 'c', 'd', '</s>']
  gold = [(0, 3), (2, 0), (4, 1)]  # the second link starts at the space, which is no word
  reading = Reading('test 0', 'ab cd', 'ab cd', tokens, tokens, {'weights': np.full((6, 6), 1 / 6)}, gold)
  (merged,) = character_reader.complete([reading], ReadingRequest(words=True))
  assert merged.source_tokens == merged.target_tokens == ['ab', 'cd', '</s>']
  assert merged.gold == [(0, 1), (1, 0)]
  (whole,) = character_reader.complete([reading], ReadingRequest(layers=True))
  expected = whole.weights[:2, :2].sum(1).mean()
  assert merged.weights.shape == (3, 3) and merged.weights[0, 0] == pytest.approx(expected, rel=1e-5)
  with pytest.raises(UserError, match="cannot be merged to words, got words and 'entropy'"):
    character_reader.complete([reading], ReadingRequest(words=True, analyses=['entropy']))


@pytest.mark.long
def test_merged_weights_and_words_have_the_same_size_if_the_last_word_has_no_token():
  pieces = subword(['a b c d'] * 9, size=12)
  tokens = [*pieces.tokenize('a b'), '</s>']
  reading = Reading('test 0', 'a b ▁', 'a b', tokens, tokens, {'weights': np.eye(len(tokens))})
  (merged,) = make_reader(pieces, (8, 8)).complete([reading], ReadingRequest(words=True))
  assert merged.source_tokens == merged.target_tokens == ['a', 'b', '</s>'] and merged.weights.shape == (3, 3)


def test_successive_readings_with_the_same_edit_share_an_edited_system(reader):
  class System:
    model = reader.model

    def with_model(self, model):
      return model

  system = System()
  assert _edited_system(system, 'uniform(layer=1)') is _edited_system(system, 'uniform(layer=1)')
  assert _edited_system(system, 'uniform(layer=1)') is not _edited_system(system, 'uniform')
