"""Streaming translations equal those of whole lines, with every kind of vocabulary."""

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.decoding.predictor import Predictor
from attention_jax.decoding.streaming import StreamingTranslator
from attention_jax.errors import UserError
from attention_jax.systems.text_evaluation import lagging_metric
from tests.models.helpers import build_streaming, inputs
from tests.modules.helpers import variables

LINES = ['the cat sat', 'a cat and a dog', 'the dog sat on the mat', ' a  zebra sat', '\tthe', 'x', '   ', '']


def record_characters(line, record):
  """Yields the characters of a line, and appends each of them to `record` when it is read."""
  for character in line:
    record.append(character)
    yield character


@pytest.mark.long
@pytest.mark.parametrize(
  'spec',
  [pytest.param('char', marks=pytest.mark.long), pytest.param('word', marks=pytest.mark.long), 'subword(size=40)'],
)
def test_streaming_equals_translating_the_whole_line(spec):
  vocabulary = vocab.train(spec, LINES * 3)
  sizes = (len(vocabulary),) * 2
  model = build_streaming('bahdanau', alignment='mocha(width=2)', sizes=sizes)
  params = variables(model, *inputs(sizes=sizes))['params']
  predictor = Predictor(model, params, vocabulary, vocabulary, buckets=[(32, 9)])
  translator = StreamingTranslator(model, params, vocabulary, vocabulary, max_length=9)
  lines = [line for line in LINES if line.strip()]
  lagging_lines = 0
  early_tokens = 0  # tokens that were emitted before the end of their line was read
  for line, prediction in zip(lines, predictor(lines), strict=True):
    expected = prediction.hypotheses[0]
    size = len(prediction.tokens) + 1
    characters_read = []
    text = ''
    lags = []
    tokens_read = 0
    ideal = len(prediction.tokens) / max(len(expected.tokens), 1)
    for length, (added, emitted) in enumerate(translator(record_characters(line, characters_read)), 1):
      text += added
      np.testing.assert_allclose(emitted.row(size), expected.weights[length - 1], rtol=1e-4, atol=1e-5)
      text_read = ''.join(characters_read)
      is_early = text_read != line
      if length <= len(expected.tokens) and tokens_read < len(prediction.tokens):
        tokens_read = min(emitted.position + 1, len(prediction.tokens))
        lags.append(tokens_read - (length - 1) * ideal)
      early_tokens += is_early
      # A token attends to tokens read before it; to EOS, which follows them, only at the end of the line.
      assert emitted.position <= len(vocabulary.tokenize(text_read)) - is_early
    assert text == expected.text and length == len(expected.weights)
    if lags:
      assert lagging_metric([prediction])['average_lagging'].value == pytest.approx(np.mean(lags))
      lagging_lines += 1
  assert early_tokens > 3 and lagging_lines > 3


def test_blank_lines_yield_nothing():
  vocabulary = vocab.train('char', LINES)
  model = build_streaming(sizes=(len(vocabulary),) * 2)
  translator = StreamingTranslator(model, {}, vocabulary, vocabulary, max_length=5)
  assert [list(translator(line)) for line in LINES[-2:]] == [[], []]


def test_bytes_of_characters_cannot_be_streamed():
  vocabulary = vocab.train('subword(size=300, byte_fallback=True)', LINES * 3)
  with pytest.raises(UserError, match='expected a vocabulary without byte_fallback'):
    StreamingTranslator(None, {}, vocabulary, vocabulary, max_length=5)
