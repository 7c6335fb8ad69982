"""Streaming greedy search: emits target tokens while the source is still arriving.

An alignment with a lookback tests one position after the other and never moves back (Raffel et al. 2017), so that a
decoder step needs only a window of the memory: the tested position and the `lookback` positions before it. If the
alignment selects the position, the step emits a token, and the next step tests the same position again. Otherwise the
step is discarded, and the next source token is read. Past the end of the source there is nothing to attend to. S
positions and T tokens take at most S + T steps, each over lookback + 1 scores. The result equals that of
`search.greedy` on the complete source.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.data import incremental
from attention_jax.data.vocab import Vocabulary, has_byte_fallback
from attention_jax.decoding import search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Memory
from attention_jax.functional.scores import SCORES
from attention_jax.models.cells import CELLS
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoded import DeclaresIncremental, Encoded
from attention_jax.models.encoder_decoder import EncoderDecoder, SourceMemory
from attention_jax.models.encoders import ENCODERS, RNN
from attention_jax.modules.attention import Attention
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.tokens import BOS, EOS, PAD


class EmittedToken(NamedTuple):
  """One target token and its attention weights.

  Attributes:
    token: the id; that of the last token is EOS.
    position: the last source position read so far, counted from 0; -1 if there is none.
    weights: [lookback + 1], of the last positions up to `position`; all 0 past the end of the source.
  """

  token: int
  position: int
  weights: np.ndarray

  def row(self, size: int) -> np.ndarray:
    """Returns the weights [S] over a source of `size` positions."""
    width = len(self.weights)
    row = np.zeros((width + size,), self.weights.dtype)
    row[self.position + 1 : self.position + 1 + width] = self.weights
    return row[width:]


class StreamPosition(NamedTuple):
  """Source position at which the decoder attends, and the memory that ends there.

  Attributes:
    position: the last source position read so far.
    window: the memory of the last positions up to `position`; fully masked past the end of the source.
    is_past_end: whether the decoder has moved past the last position of the source.
  """

  position: int
  window: Memory
  is_past_end: bool


class StreamingDecoder:
  """Translates one source after the other, token by token.

  Args:
    model: a model that passes `check_streamable`.
    max_length: maximum number of tokens of a hypothesis, EOS included.
    constraints: constraints on hypotheses. One that cannot be continued within them ends there, because its tokens
      have been emitted.

  Raises:
    UserError: as `check_streamable` does; when called, as Constraints.start does.
  """

  def __init__(self, model: EncoderDecoder, *, max_length: int, constraints: Constraints = NO_CONSTRAINTS):
    check_streamable(model)
    self.max_length = max_length
    self.lookback = model.decoder.attention.resolved_alignment.lookback()

    def compile_method(fn: Callable) -> Callable:
      return jax.jit(lambda params, *args: model.apply({'params': params}, *args, method=fn))

    self._start = compile_method(lambda model: _start(model, self.lookback + 1, constraints, max_length))
    self._read = compile_method(_read)
    self._step = compile_method(lambda model, *args: _step(model, constraints, *args))

  def __call__(self, params: Any, source: Iterable[int]) -> Iterator[EmittedToken]:
    """Emits the target token by token, and reads no more of the source than the next token needs.

    Args:
      params: the parameters of the model.
      source: ids with EOS at the end.
    """
    states, carry, token, empty_window = self._start(params)
    positions = self._positions(params, states, empty_window, source)
    current = next(positions)
    length = 0
    while length < self.max_length:
      is_last = length == self.max_length - 1
      next_carry, next_token, weights = self._step(params, carry, token, current.window, is_last)
      if not current.is_past_end and not np.any(weights):
        current = next(positions)
        continue
      carry = next_carry
      token = next_token
      length += 1
      yield EmittedToken(int(token[0]), current.position, np.asarray(weights[0]))
      if int(token[0]) == EOS:
        return

  def _positions(
    self, params: Any, states: Any, empty_window: Memory, source: Iterable[int]
  ) -> Iterator[StreamPosition]:
    """Yields one position after each source token, then endlessly the one past the end."""
    position = -1
    window = empty_window
    for position, id in enumerate(source):
      states, window = self._read(params, states, window, np.full((1, 1), id, np.int32))
      yield StreamPosition(position, window, False)
    while True:
      yield StreamPosition(position, empty_window, True)


def _start(model: EncoderDecoder, width: int, constraints: Constraints, max_length: int):
  """Returns the encoder's initial states, the decoder's initial carry, BOS [1], and a fully masked window."""
  mask = jnp.zeros((1, width), bool)
  states, memory = model.encoder.extend(model.encoder.init_states(1), jnp.full((1, width), PAD, jnp.int32), mask)
  # A cell without a bridge uses only the batch size of the summary of the source.
  encoded = Encoded(memory, mask, jnp.zeros((1, 0)))
  window = model.decoder.cell.remember(encoded)
  carry = constraints.start(model.decoder.cell.start(encoded, window), 1, max_length)
  return states, carry, jnp.full((1,), BOS, jnp.int32), window


def _read(model: EncoderDecoder, states: Any, window: Memory, ids: jax.Array):
  """Encodes the next source token, ids [1, 1]; returns the encoder's states and the window moved by one position."""
  states, memory = model.encoder.extend(states, ids)
  new = model.decoder.cell.remember(Encoded(memory, jnp.ones(ids.shape, bool), ()))

  def move(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate([jax.lax.slice_in_dim(old, 1, None, axis=axis), new], axis)

  position_axes = Memory(-2, -2, -1, None if window.remembered is None else -2)
  return states, jax.tree.map(move, window, new, position_axes)


def _step(
  model: EncoderDecoder, constraints: Constraints, carry: Any, token: jax.Array, window: Memory, is_last: jax.Array
):
  """Computes one decoder step at the end of the window.

  Returns:
    The carry, the next token [1], and weights [1, lookback + 1].
  """

  def step(carry, token, window):
    return model.step(model.decoder.cell.move_to_end(carry, window), token, SourceMemory(window))

  carry, (logits, weights, *_) = constraints.constrain(step)(carry, token, window)
  return carry, search.greedy_token(logits, is_last), weights


# ------------------------------------------------------------------------------------- requirements for streaming


class Requirement(NamedTuple):
  """One property that a model needs for streaming.

  Attributes:
    description: the property, for error messages.
    field: the field of the config that determines it.
    is_met: model -> whether it has the property.
    value: model -> its value of the field.
    expected: () -> the values that have the property.
  """

  description: str
  field: str
  is_met: Callable[[EncoderDecoder], bool]
  value: Callable[[EncoderDecoder], Any]
  expected: Callable[[], Iterable[str]]


def _row_name(module: Any, table: Mapping[str, type]) -> str:
  return next((name for name, cls in table.items() if cls is type(module)), type(module).__name__)


REQUIREMENTS = (
  Requirement(
    'a decoder that attends and can start before its source is complete',
    'model.decoder',
    lambda model: model.traits.starts_without_source,
    lambda model: _row_name(getattr(model.decoder, 'cell', model.decoder), DECODERS),
    lambda: [
      f'{name}(bridge=False)'
      for name, cls in CELLS.items()
      if cls(Attention(), bridge=False).traits.starts_without_source
    ],
  ),
  Requirement(
    'an alignment that selects positions independently of later ones',
    'model.attention.alignment',
    lambda model: model.decoder.attention.resolved_alignment.lookback is not None,
    lambda model: model.decoder.attention.alignment,
    lambda: [name for name, row in ALIGNMENTS.items() if row.lookback],
  ),
  Requirement(
    'a score that depends on the query and one position alone',
    'model.attention.score',
    lambda model: model.decoder.attention.resolved_score.is_pointwise,
    lambda model: model.decoder.attention.score,
    lambda: [name for name, row in SCORES.items() if row.is_pointwise],
  ),
  Requirement(  # heads would be at different positions
    'one head',
    'model.attention.heads',
    lambda model: model.decoder.attention.heads == 1,
    lambda model: model.decoder.attention.heads,
    lambda: ['1'],
  ),
  Requirement(
    'an encoder that can encode its source in parts',
    'model.encoder',
    lambda model: isinstance(model.encoder, DeclaresIncremental) and model.encoder.incremental,
    lambda model: _row_name(model.encoder, ENCODERS),
    lambda: [
      f'{name}(direction="forward")'
      for name, cls in ENCODERS.items()
      if issubclass(cls, RNN) and cls(embedding=None).incremental
    ],
  ),
  Requirement(
    'an output layer that does not copy from the source',
    'model.output',
    lambda model: not model.copies,
    lambda model: _row_name(model.output, OUTPUTS),
    lambda: [name for name, cls in OUTPUTS.items() if not cls.copies],
  ),
)


def is_streamable(model: Any) -> bool:
  """Returns whether a model can decode a source that is still arriving; an ensemble cannot."""
  return isinstance(model, EncoderDecoder) and all(requirement.is_met(model) for requirement in REQUIREMENTS)


def check_streamable(model: EncoderDecoder) -> None:
  """Checks that a model can decode a source that is still arriving.

  Raises:
    UserError: naming the field of the config that prevents it, and the values expected there.
  """
  for requirement in REQUIREMENTS:
    if not requirement.is_met(model):
      expected = ', '.join(sorted(requirement.expected()))
      value = requirement.value(model)
      raise UserError(
        f'streaming needs {requirement.description}, but {requirement.field} is {value!r}; expected one of: {expected}'
      )


class StreamingTranslator:
  """Translates lines one after the other while they arrive; each result equals that of greedy search on the whole line.

  Args:
    model: a trained model.
    params: its parameters.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    max_length: maximum number of tokens of a hypothesis, EOS included.
    constraints: constraints on hypotheses, see StreamingDecoder.

  Raises:
    UserError: for a model that needs the complete source, see check_streamable, and for a target
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
