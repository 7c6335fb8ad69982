"""Networks from a sequence of vectors to another, with or without an external memory: RECALL_CELLS."""

import dataclasses
import functools
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

INITIAL_MEMORY = 1e-6  # initial value of every element of a memory (Collier & Beel 2018, section 3)


class Heads(nn.Module):
  """Attention heads over one memory, with any score and alignment; each keeps its previous weights.

  Attributes:
    score, alignment: table rows.
    heads: number H of heads.
  """

  score: Row
  alignment: Row
  heads: int

  @nn.compact
  def __call__(self, carry: Carry, query: jax.Array, memory: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
    """Attends with every head.

    Args:
      carry: carry of the previous step, leaves [B, H, ...].
      query: query of all heads, [B, D].
      memory: memory, [B, S, M].

    Returns:
      The next carry, contexts [B, H, M], and weights [B, H, S].
    """
    size, width = query.shape[-1], memory.shape[-1]
    sizes = {'query': size, 'key': width, 'features': width}

    def init_head(rng):
      query_rng, rows_rng = jax.random.split(rng)
      query_kernel = nn.initializers.glorot_uniform()(query_rng, (size, width))  # makes the key vector of the paper
      params = {'query': query_kernel}
      params |= init_params(rows_rng, score=self.score, alignment=self.alignment, **sizes)
      # If the row projects no queries, the score gets a query that the kernel above has projected to the width.
      score_sizes = sizes | {'query': size if self.score.project else width}
      return params | {'score': init_row_params(rows_rng, self.score, score_sizes)}

    params = self.param('heads', lambda rng: jax.vmap(init_head)(jax.random.split(rng, self.heads)))

    def attend(params, carry, query, memory):
      no_mask = jnp.ones(len(memory), bool)
      projected = Memory(project(memory, params, 'key'), memory, no_mask)
      return attend_step(self.score, self.alignment, params, carry, query, projected)

    over_heads = jax.vmap(attend, (0, 0, None, None))
    carry, attended = jax.vmap(over_heads, (None, 0, 0, 0))(params, carry, query, memory)
    return carry, attended.context, attended.weights

  def start(self, batch: int, slots: int) -> Carry:
    """Returns the carry before the first step, with weight 1 on slot 0; content does not distinguish equal slots."""
    carry = init_carry(self.score, self.alignment, slots)
    carry = carry._replace(previous=jnp.zeros(slots).at[0].set(1.0))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, self.heads, *x.shape)), carry)


class FeedforwardController(nn.Module):
  """A controller without a state of its own: tanh(W x + b)."""

  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, state: State, inputs: jax.Array) -> State:
    return (jnp.tanh(Dense(self.features, dtype=self.dtype, name='inputs')(inputs)),)


class RecurrentController(nn.Module):
  """A controller with a recurrent layer, a row of RECURRENCES."""

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
    start: (batch, features, dtype) -> the initial state.
  """

  make: Callable
  start: Callable


def _recurrent_controller(kind: str) -> Controller:
  def make_controller(features: int, dtype: jnp.dtype) -> nn.Module:
    return RecurrentController(kind, features, dtype)

  return Controller(make_controller, functools.partial(zero_state, kind))


def _feedforward_start(batch: int, features: int, dtype: jnp.dtype) -> State:
  return (jnp.zeros((batch, features), dtype),)


CONTROLLERS: Mapping[str, Controller] = {
  'feedforward': Controller(FeedforwardController, _feedforward_start),
  **{kind: _recurrent_controller(kind) for kind in RECURRENCES},
}


class RecallCellOutput(NamedTuple):
  """Output of one step of a cell.

  Attributes:
    features: features for the output layer, [B, F].
    read: weights of R read heads over N slots, [B, R, N].
    write: weights of W write heads over N slots, [B, W, N].
  """

  features: jax.Array
  read: jax.Array
  write: jax.Array


class TuringState(NamedTuple):
  """State of a Neural Turing Machine between steps.

  Attributes:
    controller: state of the controller.
    memory: memory, [B, N, M].
    contexts: contexts that the read heads returned, concatenated, [B, R M].
    readers, writers: carries of the heads.
  """

  controller: State
  memory: jax.Array
  contexts: jax.Array
  readers: Carry
  writers: Carry


class Turing(nn.Module):
  """A controller that writes to a memory and reads from it. Graves, Wayne & Danihelka 2014, section 3.

  The inputs of the controller are the input and the previous contexts. Its output h is the query of the write heads
  (equations 3 and 4, e = σ(E h), a = A h), and then of the read heads, over the new memory (equation 2). The paper has
  the score `cosine(beta=1.0)` and the alignment `addressing`. Every other score and alignment is supported that neither
  draws nor needs an auxiliary loss.

  Attributes:
    score, alignment: specs of SCORES and ALIGNMENTS.
    controller: a row of CONTROLLERS.
    features: width of the controller.
    slots, width: sizes N and M of the memory.
    reads, writes: numbers R and W of heads.
    attends: whether the cell attends to a memory.
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
    score = self._lookup_self_contained(self.score, SCORES, 'score')
    alignment = self._lookup_self_contained(self.alignment, ALIGNMENTS, 'alignment')
    self.control = choose_controller(self.controller).make(self.features, self.dtype)
    self.readers = Heads(score, alignment, self.reads)
    self.writers = Heads(score, alignment, self.writes)
    self.erase = Dense(self.writes * self.width, dtype=self.dtype)
    self.add = Dense(self.writes * self.width, dtype=self.dtype)

  def _lookup_self_contained(self, spec: str, table: Mapping[str, Row], what: str) -> Row:
    row = lookup(spec, table, what)
    if not is_self_contained(row):
      expected = ', '.join(name for name, row in table.items() if is_self_contained(row))
      raise UserError(
        f'turing: the {what} must neither draw nor need an auxiliary loss or a sum over positions, got {spec!r}; '
        f'expected one of: {expected}'
      )
    return row

  def start(self, batch: int) -> TuringState:
    """Returns the state before the first step."""
    return TuringState(
      choose_controller(self.controller).start(batch, self.features, self.dtype),
      jnp.full((batch, self.slots, self.width), INITIAL_MEMORY),
      jnp.zeros((batch, self.reads * self.width), self.dtype),
      self.readers.start(batch, self.slots),
      self.writers.start(batch, self.slots),
    )

  def __call__(self, state: TuringState, inputs: jax.Array) -> tuple[TuringState, RecallCellOutput]:
    """Computes one step; inputs [B, I]."""
    controller = self.control(state.controller, jnp.concatenate([inputs, state.contexts], -1))
    h = controller[0].astype(state.memory.dtype)

    def split_heads(x: jax.Array) -> jax.Array:
      return x.reshape(len(inputs), self.writes, self.width).astype(state.memory.dtype)

    writers, _, write_weights = self.writers(state.writers, h, state.memory)
    erase = jax.nn.sigmoid(split_heads(self.erase(h)))
    add = split_heads(self.add(h))
    memory = jax.vmap(write_memory)(state.memory, write_weights, erase, add)
    readers, contexts, read_weights = self.readers(state.readers, h, memory)
    contexts = contexts.reshape(len(inputs), -1).astype(self.dtype)
    features = jnp.concatenate([controller[0], contexts], -1)
    output = RecallCellOutput(features, read_weights, write_weights)
    return TuringState(controller, memory, contexts, readers, writers), output


class RecurrentBaseline(nn.Module):
  """A recurrent network without an external memory, a baseline.

  Attributes:
    score, alignment: not used.
    rnn: a row of RECURRENCES.
    features: features of each layer.
    layers: number of layers.
    attends: whether the cell attends to a memory.
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
    """Returns the states before the first step."""
    return (zero_state(self.rnn, batch, self.features, self.dtype),) * self.layers

  def __call__(self, states: tuple[State, ...], inputs: jax.Array) -> tuple[tuple[State, ...], RecallCellOutput]:
    """Computes one step; inputs [B, I]."""
    new_states = []
    x = inputs
    for layer, state in zip(self.stack, states, strict=True):
      new_states.append(layer(state, x))
      x = new_states[-1][0]
    no_weights = jnp.zeros((len(inputs), 0, 1))
    return tuple(new_states), RecallCellOutput(x, no_weights, no_weights)


RECALL_CELLS: Mapping[str, type[nn.Module]] = {'recurrent': RecurrentBaseline, 'turing': Turing}


class RecallerOutput(NamedTuple):
  """Output of a recaller.

  Attributes:
    logits: logits of each bit of the output, [B, T, O].
    read, write: weights of RecallCellOutput, [B, T, R, N] and [B, T, W, N].
  """

  logits: jax.Array
  read: jax.Array
  write: jax.Array


class Recaller(nn.Module):
  """A scan of a cell over a sequence of vectors, and a linear output layer.

  Attributes:
    cell: a cell of RECALL_CELLS.
    outputs: number O of bits of the output.
  """

  cell: nn.Module
  outputs: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array) -> RecallerOutput:
    """Processes inputs [B, T, I]."""

    def step(cell, state, x):
      return cell(state, x)

    # Recomputing a step costs less than storing its results, each of which is as large as the memory.
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
  """Fields of `config.model` and their defaults.

  Attributes:
    cell: a spec of RECALL_CELLS.
    score, alignment: specs of SCORES and ALIGNMENTS by which heads address the memory.
    dtype: dtype of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  cell: str = 'turing'
  score: str = 'cosine(beta=1.0)'
  alignment: str = 'addressing'
  dtype: str = 'float32'


def build_recaller(model: Mapping[str, Any], outputs: int) -> Recaller:
  """Builds the model of a config.

  Args:
    model: `config.model`.
    outputs: number of bits of the output.

  Returns:
    The model, without parameters.

  Raises:
    UserError: for unknown names and options, and values out of range.
  """
  options = RecallConfig(**model)
  # A cell without heads does not look up its score and alignment.
  lookup(options.score, SCORES, 'score')
  lookup(options.alignment, ALIGNMENTS, 'alignment')
  dtype = DTYPES[choose(options.dtype, DTYPES, 'dtype')]
  cell = make(options.cell, RECALL_CELLS, 'cell', score=options.score, alignment=options.alignment, dtype=dtype)
  return Recaller(cell, outputs, dtype)


def choose_controller(name: str) -> Controller:
  """Returns a row of CONTROLLERS; raises UserError for an unknown name."""
  return CONTROLLERS[choose(name, CONTROLLERS, 'controller')]


def is_self_contained(row: Row) -> bool:
  """Whether a row trains by backpropagation alone and does not draw."""
  return row.trains_by_backprop and 'rng' not in row.required_inputs
