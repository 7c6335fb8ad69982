"""Greedy search that follows its source: tokens come out while tokens of the source still arrive.

An alignment with a lookback tries one position after the other and never goes back (Raffel et al. 2017), so that a try
needs no more of the memory than a window that ends at the position. Either the position is selected: then a token comes
out, and the next one is tried at the same place. Or it is not: then the try is forgotten, and the source is read on.
Past its end nothing is left to attend to. S positions and T tokens take at most S + T tries, each of lookback + 1
scores, and what comes out is what `search.greedy` makes of the whole source.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding import search
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Memory
from attention_jax.functional.scores import SCORES
from attention_jax.models.cells import CELLS
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import EncoderDecoder, SourceMemory
from attention_jax.models.encoders import ENCODERS
from attention_jax.modules.attention import Attention
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.tokens import BOS, EOS, PAD


class EmittedToken(NamedTuple):
  """One target token and what it attended to.

  Attributes:
    token: its id; the last one is EOS.
    position: the last position of the source that had been read, counted from 0; -1 where there is none.
    weights: [lookback + 1] of the positions that end there; all 0 past the end of the source.
  """

  token: int
  position: int
  weights: np.ndarray

  def row(self, size: int) -> np.ndarray:
    """The weights [S] over a source of `size` positions."""
    width = len(self.weights)
    row = np.zeros((width + size,), self.weights.dtype)
    row[self.position + 1 : self.position + 1 + width] = self.weights
    return row[width:]


class Place(NamedTuple):
  """Where tokens are tried: the window of the memory that ends at `position`, or, when the source is over, nothing."""

  position: int
  window: Memory
  over: bool


class StreamingDecoder:
  """Translates one source after the other, token by token.

  Args:
    model: one that `check_streamable` lets pass.
    max_length: of hypotheses, EOS included.

  Raises: UserError for a model that has to know its source as a whole.
  """

  def __init__(self, model: EncoderDecoder, *, max_length: int):
    check_streamable(model)
    self.max_length = max_length
    self.lookback = model.decoder.attention.resolved_alignment.lookback()

    def compiled(fn: Callable) -> Callable:
      return jax.jit(lambda params, *given: model.apply({'params': params}, *given, method=fn))

    self._begin = compiled(lambda model: _begin(model, self.lookback + 1))
    self._read, self._try = compiled(_read), compiled(_try)

  def __call__(self, params: Any, source: Iterable[int]) -> Iterator[EmittedToken]:
    """The target, token by token. No more of the source, ids with EOS at its end, is taken than the next one needs."""
    states, carry, token, nothing = self._begin(params)
    places = self._places(params, states, nothing, source)
    place, length = next(places), 0
    while length < self.max_length:
      tried = self._try(params, carry, token, place.window, length == self.max_length - 1)
      if not place.over and not np.any(tried[2]):
        place = next(places)
        continue
      carry, token, weights = tried
      length += 1
      yield EmittedToken(int(token[0]), place.position, np.asarray(weights[0]))
      if int(token[0]) == EOS:
        return

  def _places(self, params: Any, states: Any, nothing: Memory, source: Iterable[int]) -> Iterator[Place]:
    """One after each token of the source, then without end what is past it."""
    position, window = -1, nothing
    for position, id in enumerate(source):
      states, window = self._read(params, states, window, np.full((1, 1), id, np.int32))
      yield Place(position, window, False)
    while True:
      yield Place(position, nothing, True)


def _begin(model: EncoderDecoder, width: int):
  """-> the encoder's first states, the decoder's first carry, BOS [1], and a window of nothing."""
  nowhere = jnp.zeros((1, width), bool)
  states, memory = model.encoder.extend(model.encoder.init_states(1), jnp.full((1, width), PAD, jnp.int32), nowhere)
  encoded = Encoded(memory, nowhere, jnp.zeros((1, 0)))  # a cell that starts alone sees no more of it than its batch
  window = model.decoder.cell.remember(encoded)
  return states, model.decoder.cell.start(encoded, window), jnp.full((1,), BOS, jnp.int32), window


def _read(model: EncoderDecoder, states: Any, window: Memory, ids: jax.Array):
  """The next token of the source, ids [1, 1] -> the encoder's states, and the window moved on by one position."""
  states, memory = model.encoder.extend(states, ids)
  new = model.decoder.cell.remember(Encoded(memory, jnp.ones(ids.shape, bool), ()))
  move = lambda old, new, axis: jnp.concatenate([jax.lax.slice_in_dim(old, 1, None, axis=axis), new], axis)
  return states, jax.tree.map(move, window, new, Memory(-2, -2, -1))


def _try(model: EncoderDecoder, carry: Any, token: jax.Array, window: Memory, last: jax.Array):
  """One step of the decoder that may attend at the end of the window -> carry, the next token [1], weights [1, S]."""
  carry, outputs = model.step(model.decoder.cell.move_to_end(carry, window), token, SourceMemory(window))
  return carry, search.greedy_token(outputs.logits, last), outputs.weights


# --------------------------------------------------------------------------------------------- what can follow a source


class Need(NamedTuple):
  """What a model must have to follow a source that still arrives.

  Attributes:
    what: is needed.
    field: of the config, that says it.
    holds: model -> whether it has it.
    given: model -> what it has.
    possible: () -> what it might have instead.
  """

  what: str
  field: str
  holds: Callable[[EncoderDecoder], bool]
  given: Callable[[EncoderDecoder], Any]
  possible: Callable[[], Iterable[str]]


def _name(module: Any, table) -> str:
  return next((name for name, cls in table.items() if cls is type(module)), type(module).__name__)


NEEDS = (
  Need(
    'a decoder that attends and starts without the end of its source',
    'model.decoder',
    lambda model: model.traits.starts_without_source,
    lambda model: _name(getattr(model.decoder, 'cell', model.decoder), DECODERS),
    lambda: [
      f'{name}(bridge=False)'
      for name, cls in CELLS.items()
      if cls(Attention(), bridge=False).traits.starts_without_source
    ],
  ),
  Need(
    'an alignment that can follow its source',
    'model.attention.alignment',
    lambda model: model.decoder.attention.resolved_alignment.lookback is not None,
    lambda model: model.decoder.attention.alignment,
    lambda: [name for name, row in ALIGNMENTS.items() if row.lookback],
  ),
  Need(
    'a score that depends on one position alone',
    'model.attention.score',
    lambda model: model.decoder.attention.resolved_score.is_pointwise,
    lambda model: model.decoder.attention.score,
    lambda: [name for name, row in SCORES.items() if row.is_pointwise],
  ),
  Need(  # each head would stand at a place of its own
    'one head',
    'model.attention.heads',
    lambda model: model.decoder.attention.heads == 1,
    lambda model: model.decoder.attention.heads,
    lambda: ['1'],
  ),
  Need(
    'an encoder that reads its source once, from its start',
    'model.encoder',
    lambda model: getattr(model.encoder, 'incremental', False),
    lambda model: _name(model.encoder, ENCODERS),
    lambda: ['rnn(direction="forward")'],
  ),
  Need(
    'an output layer that keeps nothing of its source',
    'model.output',
    lambda model: not model.copies,
    lambda model: _name(model.output, OUTPUTS),
    lambda: [name for name, cls in OUTPUTS.items() if not cls.copies],
  ),
)


def check_streamable(model: EncoderDecoder) -> None:
  """Raises: UserError naming the field for which the model cannot follow a source, and what is possible there."""
  for need in NEEDS:
    if not need.holds(model):
      possible = ', '.join(sorted(need.possible()))
      raise UserError(f'streaming needs {need.what}: {need.field} is {need.given(model)!r}; possible: {possible}')
