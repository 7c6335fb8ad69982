"""Networks that answer a sequence of vectors with another one, with or without a memory beside them. RECALL_CELLS."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.addressing import write_memory
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Carry, Memory, attend_step, init_carry, init_params, project
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row_params, lookup
from attention_jax.models.encoder_decoder import DTYPES, make
from attention_jax.modules.linear import Dense
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, State, zero_state
from attention_jax.specs import Size

INITIAL_MEMORY = 1e-6  # what every number of a memory is before anything was written (Collier & Beel 2018, section 3)


class Heads(nn.Module):
  """Heads that look at one memory: any score, any alignment. Each keeps where it looked.

  Attributes: score, alignment, of attend; heads, how many.
  """

  score: Row
  alignment: Row
  heads: int

  @nn.compact
  def __call__(self, carry: Carry, query: jax.Array, memory: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
    """carry of [B, H], query [B, D], memory [B, S, M] -> carry, what was read [B, H, M], weights [B, H, S]."""
    size, width = query.shape[-1], memory.shape[-1]

    def initial(rng):
      of_query, of_row = jax.random.split(rng)
      given = {'query': nn.initializers.glorot_uniform()(of_query, (size, width))}  # the key vector of the paper
      sizes = {'query': size, 'key': width, 'features': width}
      given |= init_params(of_row, score=self.score, alignment=self.alignment, **sizes)
      projected = sizes | {'query': size if self.score.project else width}
      return given | {'score': init_row_params(of_row, self.score, projected)}

    params = self.param('heads', lambda rng: jax.vmap(initial)(jax.random.split(rng, self.heads)))

    def look(params, carry, query, memory):
      real = jnp.ones(len(memory), bool)
      seen = Memory(project(memory, params, 'key'), memory, real)
      return attend_step(self.score, self.alignment, params, carry, query, seen)

    over_heads = jax.vmap(look, (0, 0, None, None))
    carry, attended = jax.vmap(over_heads, (None, 0, 0, 0))(params, carry, query, memory)
    return carry, attended.context, attended.weights

  def start(self, batch: int, slots: int) -> Carry:
    """Every head at slot 0: where all slots are alike, content tells nothing."""
    carry = init_carry(self.score, self.alignment, slots)
    carry = carry._replace(previous=jnp.zeros(slots).at[0].set(1.0))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, self.heads, *x.shape)), carry)


class FeedforwardController(nn.Module):
  """A controller that keeps nothing itself: tanh(W x + b)."""

  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, state: State, inputs: jax.Array) -> State:
    return (jnp.tanh(Dense(self.features, dtype=self.dtype, name='inputs')(inputs)),)


class RecurrentController(nn.Module):
  """A controller that is a recurrent layer, a row of RECURRENCES."""

  kind: str
  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, state: State, inputs: jax.Array) -> State:
    cell = RecurrentCell(self.kind, self.features, self.dtype)
    return cell(state, cell.project(inputs))


class Controller(NamedTuple):
  """A row of CONTROLLERS: (features, dtype) -> module; (batch, features, dtype) -> its first state."""

  make: Callable
  start: Callable


def _recurrent(kind: str) -> Controller:
  return Controller(
    lambda features, dtype: RecurrentController(kind, features, dtype),
    lambda batch, features, dtype: zero_state(kind, batch, features, dtype),
  )


CONTROLLERS: Mapping[str, Controller] = {
  'feedforward': Controller(
    FeedforwardController, lambda batch, features, dtype: (jnp.zeros((batch, features), dtype),)
  ),
  **{kind: _recurrent(kind) for kind in RECURRENCES},
}


class RecallCellOutput(NamedTuple):
  """What a step gives: features [B, F]; weights of what was read [B, R, N] and written [B, W, N], of N slots."""

  features: jax.Array
  read: jax.Array
  write: jax.Array


class TuringState(NamedTuple):
  """What one step hands to the next: the controller's state, the memory [B, N, M], what was read, and the heads."""

  controller: State
  memory: jax.Array
  said: jax.Array
  readers: Carry
  writers: Carry


class Turing(nn.Module):
  """A controller that writes to a memory and reads from it. Graves, Wayne & Danihelka 2014, section 3.

  A step: the controller sees the input and what was last read; its output h says where to write and what (equations 3
  and 4, e = σ(E h), a = A h), then where to read in what is now there (equation 2). With the score `cosine(beta=1.0)`
  and the alignment `addressing`, the paper's; any other that needs neither draws nor a loss of its own will do.

  Attributes:
    score, alignment: of attend.
    controller: a row of CONTROLLERS; features, its width.
    slots, width: of the memory, N x M.
    reads, writes: heads.
  """

  attends = True
  score: str
  alignment: str
  controller: str = 'lstm'
  features: Size = 100
  slots: Size = 128
  width: Size = 20
  reads: Size = 1
  writes: Size = 1
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    score, alignment = lookup(self.score, SCORES, 'score'), lookup(self.alignment, ALIGNMENTS, 'alignment')
    if not is_self_contained(score) or not is_self_contained(alignment):
      table, what = (SCORES, 'score') if not is_self_contained(score) else (ALIGNMENTS, 'alignment')
      possible = ', '.join(name for name, row in table.items() if is_self_contained(row))
      raise UserError(f'turing: {what}={getattr(self, what)!r} draws or sums over positions; possible: {possible}')
    self.control = choose_controller(self.controller).make(self.features, self.dtype)
    self.readers, self.writers = Heads(score, alignment, self.reads), Heads(score, alignment, self.writes)
    self.erase, self.add = (Dense(self.writes * self.width, dtype=self.dtype) for _ in range(2))

  def start(self, batch: int) -> TuringState:
    return TuringState(
      choose_controller(self.controller).start(batch, self.features, self.dtype),
      jnp.full((batch, self.slots, self.width), INITIAL_MEMORY),
      jnp.zeros((batch, self.reads * self.width), self.dtype),
      self.readers.start(batch, self.slots),
      self.writers.start(batch, self.slots),
    )

  def __call__(self, state: TuringState, inputs: jax.Array) -> tuple[TuringState, RecallCellOutput]:
    """One step; inputs [B, I]."""
    batch, memory = len(inputs), state.memory
    controller = self.control(state.controller, jnp.concatenate([inputs, state.said], -1))
    h = controller[0].astype(memory.dtype)
    in_heads = lambda x: x.reshape(batch, self.writes, self.width).astype(memory.dtype)
    writers, _, write = self.writers(state.writers, h, memory)
    memory = jax.vmap(write_memory)(memory, write, jax.nn.sigmoid(in_heads(self.erase(h))), in_heads(self.add(h)))
    readers, read, weights = self.readers(state.readers, h, memory)
    said = read.reshape(batch, -1).astype(self.dtype)
    features = jnp.concatenate([controller[0], said], -1)
    return TuringState(controller, memory, said, readers, writers), RecallCellOutput(features, weights, write)


class RecurrentBaseline(nn.Module):
  """A recurrent network without a memory, to compare with.

  Attributes: score, alignment, not used, as it attends to nothing; rnn, a row of RECURRENCES; features; layers.
  """

  attends = False
  score: str
  alignment: str
  rnn: str = 'lstm'
  features: Size = 256
  layers: Size = 1
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    choose(self.rnn, RECURRENCES, 'rnn')
    self.stack = [RecurrentController(self.rnn, self.features, self.dtype) for _ in range(self.layers)]

  def start(self, batch: int) -> tuple[State, ...]:
    return (zero_state(self.rnn, batch, self.features, self.dtype),) * self.layers

  def __call__(self, states: tuple[State, ...], inputs: jax.Array) -> tuple[tuple[State, ...], RecallCellOutput]:
    """One step; inputs [B, I]."""
    new, x = [], inputs
    for layer, state in zip(self.stack, states, strict=True):
      new.append(layer(state, x))
      x = new[-1][0]
    nothing = jnp.zeros((len(inputs), 0, 1))
    return tuple(new), RecallCellOutput(x, nothing, nothing)


RECALL_CELLS: Mapping[str, type[nn.Module]] = {'recurrent': RecurrentBaseline, 'turing': Turing}


class RecallerOutput(NamedTuple):
  """logits [B, T, O] of each bit of the output, and weights [B, T, R, N], [B, T, W, N] of RecallCellOutput."""

  logits: jax.Array
  read: jax.Array
  write: jax.Array


class Recaller(nn.Module):
  """A cell over a sequence of vectors, and a linear layer over what it gives. Attributes: outputs, O."""

  cell: nn.Module
  outputs: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array) -> RecallerOutput:
    """inputs [B, T, I]."""
    step = lambda cell, state, x: cell(state, x)
    # All that a step computes is cheaper to compute again than to keep: each kept array is as large as the memory.
    step = nn.remat(step, prevent_cse=False)
    scan = nn.scan(
      step,
      variable_broadcast='params',
      split_rngs={'params': False},
      in_axes=1,
      out_axes=1,
      check_constancy_invariants=self.is_initializing(),  # as in decoders.over_steps
    )
    _, told = scan(self.cell, self.cell.start(len(inputs)), inputs.astype(self.dtype))
    logits = Dense(self.outputs, dtype=self.dtype, name='bits')(told.features).astype(jnp.float32)
    return RecallerOutput(logits, told.read, told.write)


@dataclasses.dataclass(frozen=True)
class RecallConfig:
  """The fields of `config.model`: a spec of RECALL_CELLS, and by what its heads address a memory."""

  cell: str = 'turing'
  score: str = 'cosine(beta=1.0)'
  alignment: str = 'addressing'
  dtype: str = 'float32'


def build_recaller(model: Mapping[str, Any], outputs: int) -> Recaller:
  """The model that `config.model` means, for so many bits at once. Raises UserError for what does not exist."""
  options = RecallConfig(**model)
  for spec, table, what in ((options.score, SCORES, 'score'), (options.alignment, ALIGNMENTS, 'alignment')):
    lookup(spec, table, what)  # of a cell without heads too
  dtype = DTYPES[choose(options.dtype, DTYPES, 'dtype')]
  parts = {'score': options.score, 'alignment': options.alignment, 'dtype': dtype}
  return Recaller(make(options.cell, RECALL_CELLS, 'cell', **parts), outputs, dtype)


def choose_controller(name: str) -> Controller:
  return CONTROLLERS[choose(name, CONTROLLERS, 'controller')]


def is_self_contained(row: Row) -> bool:
  """Whether a row needs nothing but parameters and what it did before."""
  return row.trains_by_backprop and 'rng' not in row.required_inputs
