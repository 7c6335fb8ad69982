"""A line into its translation while the line still arrives."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from attention_jax.data import incremental
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.streaming import EmittedToken, StreamingDecoder
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.tokens import EOS


class StreamingTranslator:
  """Translates lines one after the other, each while it arrives, as greedy search would translate the whole of it.

  Args:
    model, params: a trained model.
    source_vocab, target_vocab: the run's vocabularies.
    max_length: of hypotheses, EOS included.

  Raises: UserError for a model that has to know its source as a whole, see decoding.streaming.check.
  """

  def __init__(
    self, model: EncoderDecoder, params: Any, source_vocab: Vocabulary, target_vocab: Vocabulary, *, max_length: int
  ):
    self._stream = StreamingDecoder(model, max_length=max_length)
    self._params = jax.device_put(jax.device_get(params), jax.local_devices()[0])
    self.source_vocab, self.target_vocab, self.max_length = source_vocab, target_vocab, max_length

  def __call__(self, line: Iterable[str]) -> Iterator[tuple[str, EmittedToken]]:
    """What each target token adds to the translation, and the token itself; EOS adds nothing. Nothing of a blank line.

    Of the line, strings whatever their lengths, no more is taken than the next token needs.
    """
    parts = self.source_vocab.iter_segments(incremental.skip_blank_line(itertools.chain.from_iterable(line)))
    if (first := next(parts, None)) is None:
      return
    ids = itertools.chain.from_iterable(map(self.source_vocab.encode, itertools.chain([first], parts)))
    spell = incremental.make_incremental_decoder(self.target_vocab)
    for emitted in self._stream(self._params, itertools.chain(ids, [EOS])):
      yield spell(emitted.token), emitted
