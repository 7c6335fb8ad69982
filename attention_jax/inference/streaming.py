"""Streaming translation: translates a line while it is still arriving."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from attention_jax.data import incremental
from attention_jax.data.vocab import Vocabulary, has_byte_fallback
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.streaming import EmittedToken, StreamingDecoder
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.tokens import EOS


class StreamingTranslator:
  """Translates lines one after the other while they arrive; each result equals that of greedy search on the whole line.

  Args:
    model: a trained model.
    params: its parameters.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    max_length: maximum number of tokens of a hypothesis, EOS included.
    constraints: constraints on hypotheses, see decoding.streaming.StreamingDecoder.

  Raises:
    UserError: for a model that needs the complete source, see decoding.streaming.check_streamable, and for a target
      vocabulary with byte fallback.
  """

  def __init__(
    self,
    model: EncoderDecoder,
    params: Any,
    source_vocab: Vocabulary,
    target_vocab: Vocabulary,
    *,
    max_length: int,
    constraints: Constraints = NO_CONSTRAINTS,
  ):
    if has_byte_fallback(target_vocab):
      raise UserError('bytes of characters cannot be printed one by one; expected a vocabulary without byte_fallback')
    self.source_vocab = source_vocab
    self.target_vocab = target_vocab
    self.max_length = max_length
    self._decoder = StreamingDecoder(model, max_length=max_length, constraints=constraints)
    self._params = jax.device_put(jax.device_get(params), jax.local_devices()[0])

  def __call__(self, line: Iterable[str]) -> Iterator[tuple[str, EmittedToken]]:
    """Yields the text that each target token adds to the translation, and the token; nothing for a blank line.

    Args:
      line: the parts of the line, of any length; only the parts that the next token needs are read.

    Yields:
      (text, token); the text of EOS is ''.
    """
    characters = itertools.chain.from_iterable(line)
    segments = self.source_vocab.iter_segments(incremental.skip_blank_line(characters))
    first = next(segments, None)
    if first is None:
      return
    ids = itertools.chain.from_iterable(map(self.source_vocab.encode, itertools.chain([first], segments)))
    decode = incremental.make_incremental_decoder(self.target_vocab)
    for emitted in self._decoder(self._params, itertools.chain(ids, [EOS])):
      yield decode(emitted.token), emitted
