"""Lines that still arrive give the translations of the whole lines, with every kind of vocabulary."""

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.inference.predictor import Predictor
from attention_jax.inference.streaming import StreamingTranslator
from tests.models.helpers import build_streaming, inputs
from tests.modules.helpers import variables

LINES = ['the cat sat', 'a cat and a dog', 'the dog sat on the mat', ' a  zebra sat', '\tthe', 'x', '   ', '']


@pytest.mark.parametrize('spec', ['char', 'word', 'subword(size=40)'])
def test_a_line_that_arrives_is_translated_as_the_whole(spec):
  vocabulary = vocab.train(spec, LINES * 3)
  sizes = (len(vocabulary),) * 2
  model = build_streaming('bahdanau', alignment='mocha(width=2)', sizes=sizes)
  params = variables(model, *inputs(sizes=sizes))['params']
  predictor = Predictor(model, params, vocabulary, vocabulary, buckets=[(32, 9)])
  interpret = StreamingTranslator(model, params, vocabulary, vocabulary, max_length=9)
  early, lines = 0, [line for line in LINES if line.strip()]
  for line, prediction in zip(lines, predictor(lines), strict=True):
    taken, text = [], ''
    expected, size = prediction.hypotheses[0], len(prediction.tokens) + 1
    for length, (added, emitted) in enumerate(interpret(taken.append(c) or c for c in line), 1):
      text += added
      np.testing.assert_allclose(emitted.row(size), expected.weights[length - 1], rtol=1e-4, atol=1e-5)
      known = ''.join(taken)
      early += known != line
      assert emitted.position <= len(vocabulary.tokenize(known)) - (known != line)
    assert text == expected.text and length == len(expected.weights)
  assert early > 3  # tokens that came before the end of their line


def test_blank_lines_give_nothing():
  vocabulary = vocab.train('char', LINES)
  model = build_streaming(sizes=(len(vocabulary),) * 2)
  interpret = StreamingTranslator(model, {}, vocabulary, vocabulary, max_length=5)
  assert [list(interpret(line)) for line in LINES[-2:]] == [[], []]
