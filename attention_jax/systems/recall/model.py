"""Recurrent cells for recall of vector sequences, with and without an external memory: RECALL_CELLS."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.addressing import write_memory
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Carry, Memory, attend_step, init_carry, project, without_key
from attention_jax.functional.params import init_params
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row_params, lookup
from attention_jax.models.encoder_decoder import DTYPES, make_module
from attention_jax.modules.linear import Dense
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, State, zero_state
from attention_jax.specs import Size

INITIAL_MEMORY = 1e-6  # value of every element before the first write (Collier & Beel 2018, section 3)


class Heads(nn.Module):
  """Attention heads over one memory of N slots. Each carries its weights from step to step.

  Attributes:
    score: row of SCORES that needs no random numbers.
    alignment: row of ALIGNMENTS that needs no random numbers.
    heads: number of heads, H.
  """

  score: Row
  alignment: Row
  heads: int

  @nn.compact
  def __call__(self, carry: Carry, query: jax.Array, memory: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
    """Attends to the slots of a memory with every head.

    Args:
      carry: carry of the previous step, with leading axes [B, H].
      query: [B, D].
      memory: [B, N, M].

    Returns:
      The new carry, the contexts [B, H, M], and the weights [B, H, N].
    """
    size = query.shape[-1]
    width = memory.shape[-1]

    def init_head(rng):
      query_rng, row_rng = jax.random.split(rng)
      # The projected query is the key vector of the paper. A score that projects has its own projection in
      # `attention_params`, which replaces this one; any other score takes the projected query.
      query_projection = nn.initializers.glorot_uniform()(query_rng, (size, width))
      sizes = {'query': size, 'key': width, 'value': width, 'features': width}
      attention_params = init_params(row_rng, score=self.score, alignment=self.alignment, **sizes)
      score_sizes = sizes | {'query': size if self.score.project else width}
      score_params = init_row_params(row_rng, self.score, score_sizes)
      return {'query': query_projection} | attention_params | {'score': score_params}

    params = self.param('heads', lambda rng: jax.vmap(init_head)(jax.random.split(rng, self.heads)))

    def attend(params, carry, query, memory):
      mask = jnp.ones(len(memory), bool)
      attended_memory = Memory(project(memory, params, 'key'), memory, mask)
      return attend_step(self.score, self.alignment, without_key(params), carry, query, attended_memory)

    attend_heads = jax.vmap(attend, (0, 0, None, None))
    carry, attended = jax.vmap(attend_heads, (None, 0, 0, 0))(params, carry, query, memory)
    return carry, attended.context, attended.weights

  def start(self, batch: int, slots: int) -> Carry:
    """Returns the first carry, with every head at slot 0, because content cannot distinguish equal slots."""
    carry = init_carry(self.score, self.alignment, slots)
    carry = carry._replace(previous=jnp.zeros(slots).at[0].set(1.0))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, self.heads, *x.shape)), carry)


class FeedforwardController(nn.Module):
  """Stateless controller: tanh(W x + b)."""

  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, state: State, inputs: jax.Array) -> State:
    return (jnp.tanh(Dense(self.features, dtype=self.dtype, name='inputs')(inputs)),)


class RecurrentController(nn.Module):
  """Recurrent layer as a controller; `kind` is a key of RECURRENCES."""

  kind: str
  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, state: State, inputs: jax.Array) -> State:
    cell = RecurrentCell(self.kind, self.features, self.dtype)
    return cell(state, cell.project(inputs))


class Controller(NamedTuple):
  """A row of CONTROLLERS.

  Attributes:
    make: (features, dtype) -> module.
    start: (batch, features, dtype) -> initial state.
  """

  make: Callable
  start: Callable


def _feedforward_controller() -> Controller:
  def start(batch, features, dtype):
    return (jnp.zeros((batch, features), dtype),)

  return Controller(FeedforwardController, start)


def _recurrent_controller(kind: str) -> Controller:
  def start(batch, features, dtype):
    return zero_state(kind, batch, features, dtype)

  return Controller(functools.partial(RecurrentController, kind), start)


CONTROLLERS: Mapping[str, Controller] = {
  'feedforward': _feedforward_controller(),
  **{kind: _recurrent_controller(kind) for kind in RECURRENCES},
}


class RecallCellOutput(NamedTuple):
  """Output of a step, over a memory of N slots, with R read heads and W write heads.

  A cell without a memory has R = W = 0.

  Attributes:
    features: vector from which the output bits are computed, [B, D].
    read: weights of the read heads [B, R, N].
    write: weights of the write heads [B, W, N].
  """

  features: jax.Array
  read: jax.Array
  write: jax.Array


class TuringState(NamedTuple):
  """State of Turing between steps; letters of shapes as in Turing.

  Attributes:
    controller: state of the controller.
    memory: [B, N, M].
    contexts: vectors read in the last step, concatenated, [B, R M].
    readers: carry of the read heads.
    writers: carry of the write heads.
  """

  controller: State
  memory: jax.Array
  contexts: jax.Array
  readers: Carry
  writers: Carry


class Turing(nn.Module):
  """Neural Turing Machine: a controller with an external memory. Graves, Wayne & Danihelka 2014, section 3.

  In each step the controller computes its output h from the input and the vectors read in the step before. The write
  heads update the memory (equations 3 and 4, e = σ(E h + b), a = A h + c); then the read heads read the updated memory
  (equation 2). The paper has score `cosine(beta=1.0)` and alignment `addressing`. Scores and alignments are allowed
  unless they need random numbers, an auxiliary loss or, as latent alignments do, a sum of the outputs over positions.

  Attributes:
    score: spec of SCORES.
    alignment: spec of ALIGNMENTS.
    controller: a key of CONTROLLERS.
    features: width of the controller, F.
    slots: number of slots of the memory, N.
    width: width of a slot, M.
    reads: number of read heads, R.
    writes: number of write heads, W.
    dtype: dtype of the computation.
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
    score = lookup(self.score, SCORES, 'score')
    alignment = lookup(self.alignment, ALIGNMENTS, 'alignment')
    _check_self_contained('score', self.score, score, SCORES)
    _check_self_contained('alignment', self.alignment, alignment, ALIGNMENTS)
    self.control = choose_controller(self.controller).make(self.features, self.dtype)
    self.readers = Heads(score, alignment, self.reads)
    self.writers = Heads(score, alignment, self.writes)
    self.erase = Dense(self.writes * self.width, dtype=self.dtype)
    self.add = Dense(self.writes * self.width, dtype=self.dtype)

  def start(self, batch: int) -> TuringState:
    """Returns the state before the first step."""
    return TuringState(
      controller=choose_controller(self.controller).start(batch, self.features, self.dtype),
      memory=jnp.full((batch, self.slots, self.width), INITIAL_MEMORY),
      contexts=jnp.zeros((batch, self.reads * self.width), self.dtype),
      readers=self.readers.start(batch, self.slots),
      writers=self.writers.start(batch, self.slots),
    )

  def __call__(self, state: TuringState, inputs: jax.Array) -> tuple[TuringState, RecallCellOutput]:
    """Computes one step from inputs [B, I]; returns the new state and the output."""
    batch = len(inputs)
    memory = state.memory
    controller_state = self.control(state.controller, jnp.concatenate([inputs, state.contexts], -1))
    h = controller_state[0].astype(memory.dtype)

    def split_heads(x):
      return x.reshape(batch, self.writes, self.width).astype(memory.dtype)

    writers, _, write_weights = self.writers(state.writers, h, memory)
    erase = jax.nn.sigmoid(split_heads(self.erase(h)))
    add = split_heads(self.add(h))
    memory = jax.vmap(write_memory)(memory, write_weights, erase, add)

    readers, contexts, read_weights = self.readers(state.readers, h, memory)
    contexts = contexts.reshape(batch, -1).astype(self.dtype)
    features = jnp.concatenate([controller_state[0], contexts], -1)
    state = TuringState(controller_state, memory, contexts, readers, writers)
    return state, RecallCellOutput(features, read_weights, write_weights)


class RecurrentBaseline(nn.Module):
  """Recurrent network without an external memory, as a baseline.

  Attributes:
    score: not used; the cell does not attend.
    alignment: not used.
    rnn: a key of RECURRENCES.
    features: width of each layer.
    layers: number of layers.
    dtype: dtype of the computation.
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
    """Returns the states of all layers before the first step."""
    return (zero_state(self.rnn, batch, self.features, self.dtype),) * self.layers

  def __call__(self, states: tuple[State, ...], inputs: jax.Array) -> tuple[tuple[State, ...], RecallCellOutput]:
    """Computes one step from inputs [B, I]; returns the new states and the output."""
    new_states = []
    x = inputs
    for layer, state in zip(self.stack, states, strict=True):
      new_state = layer(state, x)
      new_states.append(new_state)
      x = new_state[0]
    no_weights = jnp.zeros((len(inputs), 0, 1))
    return tuple(new_states), RecallCellOutput(x, no_weights, no_weights)


RECALL_CELLS: Mapping[str, type[nn.Module]] = {'recurrent': RecurrentBaseline, 'turing': Turing}


class RecallerOutput(NamedTuple):
  """Output for a sequence of T steps; the other letters of shapes as in RecallCellOutput.

  Attributes:
    logits: of each of the O output bits, [B, T, O].
    read: weights of the read heads [B, T, R, N].
    write: weights of the write heads [B, T, W, N].
  """

  logits: jax.Array
  read: jax.Array
  write: jax.Array


class Recaller(nn.Module):
  """Scans a cell over a sequence of vectors and projects its features to output bits.

  Attributes:
    cell: module of RECALL_CELLS.
    outputs: number of output bits, O.
    dtype: dtype of the computation.
  """

  cell: nn.Module
  outputs: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array) -> RecallerOutput:
    """Computes the outputs for inputs [B, T, I]."""

    def step(cell, state, x):
      return cell(state, x)

    # Recomputes a step in the backward pass: it is cheap, while each stored intermediate is as large as the memory.
    scan = nn.scan(
      nn.remat(step, prevent_cse=False),
      variable_broadcast='params',
      split_rngs={'params': False},
      in_axes=1,
      out_axes=1,
      check_constancy_invariants=self.is_initializing(),  # as in decoders.over_steps
    )
    _, outputs = scan(self.cell, self.cell.start(len(inputs)), inputs.astype(self.dtype))
    logits = Dense(self.outputs, dtype=self.dtype, name='bits')(outputs.features).astype(jnp.float32)
    return RecallerOutput(logits, outputs.read, outputs.write)


@dataclasses.dataclass(frozen=True)
class RecallConfig:
  """The fields of `config.model` and their defaults.

  Attributes:
    cell: spec of RECALL_CELLS.
    score: spec of SCORES, by which heads address the memory.
    alignment: spec of ALIGNMENTS, by which heads address the memory.
    dtype: dtype of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  cell: str = 'turing'
  score: str = 'cosine(beta=1.0)'
  alignment: str = 'addressing'
  dtype: str = 'float32'


def build_recaller(config: RecallConfig, outputs: int) -> Recaller:
  """Builds the model that `config.model` describes.

  Args:
    config: the group `model` of the config.
    outputs: number of output bits, O.

  Returns:
    A Recaller without parameters.

  Raises:
    UserError: if a spec or an option is unknown or out of range. The names of `controller` and `rnn`, and the
      combination of the cell with its score and alignment, are checked when the model is initialised.
  """
  # A cell without heads does not use the two specs, but a wrong one is an error for it too.
  lookup(config.score, SCORES, 'score')
  lookup(config.alignment, ALIGNMENTS, 'alignment')
  dtype = DTYPES[choose(config.dtype, DTYPES, 'dtype')]
  cell = make_module(config.cell, RECALL_CELLS, 'cell', score=config.score, alignment=config.alignment, dtype=dtype)
  return Recaller(cell, outputs, dtype)


def choose_controller(name: str) -> Controller:
  """Returns a row of CONTROLLERS. Raises UserError if there is none of this name."""
  return CONTROLLERS[choose(name, CONTROLLERS, 'controller')]


def is_self_contained(row: Row) -> bool:
  """Returns whether a row needs neither random numbers nor an auxiliary loss nor a sum of outputs over positions."""
  return row.trains_by_backprop and 'rng' not in row.required_inputs


def _check_self_contained(field: str, spec: str, row: Row, table: Mapping[str, Row]) -> None:
  """Raises UserError unless the row that `spec` selects from `table` is self-contained."""
  if not is_self_contained(row):
    expected = ', '.join(name for name, row in table.items() if is_self_contained(row))
    raise UserError(
      f'turing: {field}={spec!r} needs random numbers, an auxiliary loss or a sum of outputs over positions; '
      f'expected one of: {expected}'
    )
