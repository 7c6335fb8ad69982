"""Decoder cells: the recurrence of a decoder and the place of attention in it.

Every cell has the same methods:

- remember(encoded) -> memory, computed once per source; start(encoded, memory) -> carry;
- share(memory, hypotheses, max_length) -> memory: the memory for several hypotheses of each source, with products that
  their steps can share;
- project_inputs(embeddings [B, T, E]) -> inputs [B, T, ...]: the computation before the recurrence, for all steps at
  once;
- recur(carry, inputs [B, ...], memory, deterministic) -> carry, trace: one step of the recurrence;
- compute_outputs(traces [B, T, ...], embeddings, memory, deterministic) -> DecoderOutput: the computation after the
  recurrence, for all steps at once;
- observe(carry, log_likelihood) -> carry: for latent alignments, the update of the carry with the output of a step;
- move_to_end(carry, memory) -> carry: for alignments with a lookback, restarts attention at the end of another memory.

One step of a decoder is `project_inputs`, `recur` and `compute_outputs` with T = 1. For all steps, `recur` is scanned
between the same two methods.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.errors import UserError, choose
from attention_jax.functional.attend import Memory
from attention_jax.models.encoded import Encoded
from attention_jax.models.initial_states import INITIAL_STATES
from attention_jax.models.steps import CellCarry, DecoderOutput, FixedMemory, SharedMemory, StepTrace
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import ConcatDense, Dense
from attention_jax.modules.recurrent import RecurrentStack, State
from attention_jax.specs import Fraction, Size

MIN_HYPOTHESES = 3  # smallest number of hypotheses of a source whose steps share products


class Cell(nn.Module):
  """Base class of cells.

  Attributes:
    attention: attention over the memory.
    rnn: a key of RECURRENCES.
    features, layers, residual, dropout, dtype: fields of the recurrent stack.
    bridge: whether the initial states depend on the encoded source, see `initial`. Otherwise they are zeros, and a cell
      that attends may start before the source is complete.
    initial: how the initial states depend on the encoder, a row of initial_states.INITIAL_STATES.
  """

  attention: Attention
  rnn: str = 'gru'
  features: Size = 512
  layers: Size = 1
  residual: bool = False
  dropout: Fraction = 0.0
  bridge: bool = True
  initial: str = 'learned'
  dtype: jnp.dtype = jnp.float32

  @property
  def traits(self) -> Traits:
    """Properties that do not depend on parameters."""
    alignment = self.attention.resolved_alignment
    return Traits(
      latent=alignment.latent,
      required_loss=alignment.required_loss,
      attends_in_recurrence=True,
      starts_without_source=not self.bridge,
    )

  @property
  def width(self) -> int:
    """Width of the features for the output layer."""
    return self.features

  def make_stack(self) -> RecurrentStack:
    """Returns the recurrent layers."""
    return RecurrentStack(self.rnn, self.features, self.layers, self.residual, self.dropout, self.bridge, self.dtype)

  def initial_states(self, encoded: Encoded, *stacks: RecurrentStack) -> list[tuple[State, ...]]:
    """Returns the states before the first step for each stack. `stacks` are all stacks of the cell, the lowest first.

    Raises:
      UserError: for an unknown `initial`, if `bridge` is False and `initial` is not 'learned', and for an encoder
        without the states that `initial` needs.
    """
    make = INITIAL_STATES[choose(self.initial, INITIAL_STATES, 'initial')]
    if not self.bridge and self.initial != 'learned':
      raise UserError(f"bridge=False starts from zeros: initial must be 'learned', got {self.initial!r}")
    return make(stacks, encoded)

  def remember(self, encoded: Encoded) -> Memory:
    """Returns the memory of a source."""
    return self.attention.remember(encoded.memory, encoded.mask, value=encoded.values_or_memory)

  def share(self, memory: Any, hypotheses: int, max_length: int) -> Any:
    """Returns the memory for `hypotheses` hypotheses of each source, of up to `max_length` tokens.

    Arguments: see decoders.Decoder.share.
    """
    return memory

  def project_inputs(self, embeddings: jax.Array) -> jax.Array:
    """Projects embeddings [B, T, E] to the inputs of `recur`, [B, T, ...]."""
    return self.stack.project(embeddings)

  def attend(
    self, carry: CellCarry, query: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    """Attends inside the recurrence; returns the next carry, and a trace whose `state` is ().

    Args:
      carry: carry of the previous step.
      query: queries, [B, D].
      memory: the memory, as `remember` returns it.
      deterministic: whether to use test-time behaviour.

    Raises:
      UserError: if the implementation of the attention cannot compute one query at a time.
    """
    self.attention.check_step_support()
    attention_carry, (context, weights) = self.attention(carry.attention, query, memory, deterministic)
    trace = StepTrace((), context, average_heads(weights, self.attention.heads), attention_carry.state[1])
    return carry._replace(attention=attention_carry), trace

  def observe(self, carry: CellCarry, log_likelihood: jax.Array) -> CellCarry:
    """Updates the carry of a latent alignment with log p(output | position), [B, S]."""
    return carry._replace(attention=self.attention.observe(carry.attention, log_likelihood))

  def move_to_end(self, carry: CellCarry, memory: Memory) -> CellCarry:
    """Returns the carry with its attention restarted at the last position of another memory; the rest is unchanged."""
    return carry._replace(attention=self.attention.carry_at_last_position(memory))

  def make_output(self, features: jax.Array, traces: StepTrace) -> DecoderOutput:
    """Returns the output of all steps from their features and traces."""
    return DecoderOutput(features, traces.context, traces.weights, traces.alignment, top=traces.state)

  def compute_features(self, traces: StepTrace, embeddings: jax.Array, memory: Memory | SharedMemory) -> jax.Array:
    """Returns features [B, T, F] of the context, or [B, T, S, F] of each position if the alignment is latent.

    Args:
      traces: traces of all steps, leaves [B, T, ...].
      embeddings: embeddings of the input tokens, [B, T, E].
      memory: the memory; not used unless the alignment is latent.
    """
    if not self.traits.latent:
      return self.readout_features(traces.state, traces.context, embeddings)
    values = memory.value  # [B, 1, S, V]; the axis of the only head is broadcast over the steps
    return self.readout_features(traces.state[:, :, None], values, embeddings[:, :, None])


def max_of_pairs(units: jax.Array) -> jax.Array:
  """Maxout with two pieces: max(x_{2j-1}, x_{2j}), [..., 2 L] -> [..., L]. Goodfellow et al. 2013."""
  return units.reshape(*units.shape[:-1], -1, 2).max(axis=-1)


def average_heads(weights: jax.Array, heads: int) -> jax.Array:
  """Averages the weights [B, N, ..., S] of several heads to [B, ..., S]; those of a single head have no axis N."""
  return weights if heads == 1 else weights.mean(1)


class Plain(Cell):
  """No attention: the source is one fixed vector. Sutskever, Vinyals & Le 2014; with `feed_context`, Cho et al. 2014.

  Other attributes are those of Cell; `attention` is not used.

  Attributes:
    feed_context: whether the vector is an input of every step; if False, `bridge` must be True.
  """

  rnn: str = 'lstm'
  feed_context: bool = False

  def setup(self):
    if not self.bridge and not self.feed_context:
      raise UserError('plain: bridge=False requires feed_context=True, else the output would not depend on the source')
    self.stack = self.make_stack()
    if self.feed_context:
      self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  @property
  def traits(self) -> Traits:
    return Traits(attends=False, attends_in_recurrence=True)

  def remember(self, encoded: Encoded) -> FixedMemory:
    return FixedMemory(encoded.final, encoded.mask)

  def start(self, encoded: Encoded, memory: FixedMemory) -> CellCarry:
    gates = self.context_gates(memory.vector) if self.feed_context else ()
    return CellCarry(*self.initial_states(encoded, self.stack), (), gates)

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: FixedMemory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    if self.feed_context:
      inputs = inputs + carry.feed
    states, state = self.stack(carry.states, inputs, deterministic)
    return carry._replace(states=states), StepTrace(state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: FixedMemory, deterministic: bool
  ) -> DecoderOutput:
    steps = traces.state.shape[:2]
    context = jnp.broadcast_to(memory.vector[:, None], (*steps, memory.vector.shape[-1]))
    weights = jnp.zeros((*steps, memory.mask.shape[-1]), jnp.float32)
    return DecoderOutput(traces.state, context, weights, top=traces.state)


class Bahdanau(Cell):
  """Attends with the previous state before the RNN; deep output. Bahdanau, Cho & Bengio 2015, section 3.1.

  c_t = attend(s_{t-1}); s_t = RNN(s_{t-1}, [y_{t-1}; c_t]); the features for the output layer are
  tanh(W [s_t; c_t; y_{t-1}]). The paper has maxout and s_{t-1} instead (appendix A.2.2): maxout=True, previous=True.

  Other attributes are those of Cell.

  Attributes:
    readout: width of the deep output.
    maxout: whether each of its units is the maximum of two linear units, instead of the tanh of one.
    previous: whether the deep output reads s_{t-1} instead of s_t.
    gate: whether the context is multiplied by a scalar gate σ(w s_{t-1} + b) (Xu et al. 2015, section 4.2.1).
  """

  readout: Size = 512
  maxout: bool = False
  previous: bool = False
  gate: bool = False

  @property
  def width(self) -> int:
    return self.readout

  def setup(self):
    self.stack = self.make_stack()
    self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)
    self.deep = ConcatDense(self.readout * (2 if self.maxout else 1), use_bias=True, dtype=self.dtype)
    if self.gate and self.traits.latent:
      raise UserError(
        f'bahdanau: gate must be False for the latent alignment {self.attention.alignment!r}, which has a context for '
        'each position instead of a single one'
      )
    self.context_gate = Dense(1, dtype=self.dtype) if self.gate else None

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    return CellCarry(*self.initial_states(encoded, self.stack), self.attention.init_carry(memory), ())

  def share(self, memory: Memory, hypotheses: int, max_length: int) -> Memory | SharedMemory:
    # Sharing costs S products; otherwise every step of each hypothesis costs one, and there are usually about S steps.
    positions = memory.mask.shape[-1]
    is_worthwhile = not is_symbolic_dim(positions) and hypotheses >= MIN_HYPOTHESES and positions <= max_length
    is_linear = not (self.attention.projects_values or self.gate or self.traits.latent)
    if not (is_worthwhile and is_linear):
      return memory
    return SharedMemory(memory, self.context_gates(memory.value[:, 0]))

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory | SharedMemory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    gates = None
    if isinstance(memory, SharedMemory):
      memory, gates = memory
    previous_state = carry.states[-1][0]
    carry, trace = self.attend(carry, previous_state, memory, deterministic)
    if self.gate:
      trace = trace._replace(context=trace.context * jax.nn.sigmoid(self.context_gate(previous_state)))
    if gates is None:
      context_gates = self.context_gates(trace.context)
    else:
      context_gates = jnp.einsum('bs,bsg->bg', trace.weights.astype(gates.dtype), gates)
    states, state = self.stack(carry.states, inputs + context_gates, deterministic)
    return carry._replace(states=states), trace._replace(state=previous_state if self.previous else state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory | SharedMemory, deterministic: bool
  ) -> DecoderOutput:
    return self.make_output(self.compute_features(traces, embeddings, memory), traces)

  def readout_features(self, state: jax.Array, context: jax.Array, embeddings: jax.Array) -> jax.Array:
    """tanh(W [s; c; y]), or the maximum of pairs of units of W [s; c; y]: the deep output.

    Args:
      state: s, states of the highest layer, [..., H].
      context: c, contexts, [..., V].
      embeddings: y, embeddings of the input tokens, [..., E].

    Returns:
      [..., readout]; the leading axes of the arguments are broadcast.
    """
    units = self.deep(state, context, embeddings)
    return max_of_pairs(units) if self.maxout else jnp.tanh(units)


class Luong(Cell):
  """Attends with the new state, after the RNN. Luong, Pham & Manning 2015, section 3.

  s_t = RNN(s_{t-1}, [y_{t-1}; a_{t-1}]); c_t = attend(s_t); a_t = tanh(W [c_t; s_t]) is the attentional vector. It is
  the input of the output layer and, with input feeding, part of the next input. Without input feeding, the recurrence
  does not depend on attention, and all queries attend at once if the attention is not recurrent.

  Other attributes are those of Cell.

  Attributes:
    input_feeding: whether a_{t-1} is an input of the RNN.
    readout_bias: whether a bias is added to W [c_t; s_t], which the paper does not have.
  """

  rnn: str = 'lstm'
  input_feeding: bool = True
  readout_bias: bool = False

  def setup(self):
    self.stack = self.make_stack()
    self.attentional = ConcatDense(self.features, self.readout_bias, self.dtype)
    if self.input_feeding:
      self.feed_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  @property
  def traits(self) -> Traits:
    return super().traits._replace(attends_in_recurrence=self.input_feeding or self.attention.is_recurrent)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    (states,) = self.initial_states(encoded, self.stack)
    attention_carry = self.attention.init_carry(memory) if self.traits.attends_in_recurrence else ()
    return CellCarry(states, attention_carry, jnp.zeros_like(states[-1][0]) if self.input_feeding else ())

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    if self.input_feeding:
      inputs = inputs + self.feed_gates(carry.feed)
    states, state = self.stack(carry.states, inputs, deterministic)
    carry = carry._replace(states=states)
    if not self.traits.attends_in_recurrence:
      return carry, StepTrace(state)
    carry, trace = self.attend(carry, state, memory, deterministic)
    if self.input_feeding:
      carry = carry._replace(feed=self.readout_features(state, trace.context, ()))
    return carry, trace._replace(state=state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    if not self.traits.attends_in_recurrence:
      context, weights = self.attention.parallel(traces.state, memory, deterministic)
      traces = traces._replace(context=context, weights=average_heads(weights, self.attention.heads))
    return self.make_output(self.compute_features(traces, embeddings, memory), traces)

  def readout_features(self, state: jax.Array, context: jax.Array, embeddings: jax.Array) -> jax.Array:
    """tanh(W [c; s]), the attentional vector. Arguments: see Bahdanau.readout_features; `embeddings` is not used."""
    return jnp.tanh(self.attentional(context, state))


class GNMTCell(Cell):
  """Attends with the lowest layer; the context is an input of all layers. Wu et al. 2016, section 3.

  c_t = attend(s_{t-1}) with the previous state of the lowest layer, s_t = LSTM([y_{t-1}; c_t]), and the inputs of every
  layer above are [output below; c_t]. With `current`, s_t = LSTM([y_{t-1}; c_{t-1}]) first, and then c_t = attend(s_t)
  for the layers above, as in the variant gnmt_v2 of github.com/tensorflow/nmt. With `residual`, layers from the third
  on add the output of the layer below to their own.

  Other attributes are those of Cell.

  Attributes:
    current: whether to attend with the new state of the lowest layer.
  """

  rnn: str = 'lstm'
  layers: Size = 4
  residual: bool = True
  current: bool = True

  def setup(self):
    if self.traits.latent:
      raise UserError(
        f'gnmt: latent alignments are not supported, got {self.attention.alignment!r}; '
        'expected another alignment, or the decoder bahdanau or luong'
      )
    if self.layers < 2:
      raise UserError(f'gnmt: layers must be at least 2, got {self.layers}')
    self.stack = self._make_layers(1)
    self.above = self._make_layers(self.layers - 1)
    self.drop = Dropout(self.dropout)
    self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = tuple(self.initial_states(encoded, self.stack, self.above))
    no_context = jnp.zeros((encoded.final.shape[0], self.attention.context_width(memory)), self.dtype)
    return CellCarry(states, self.attention.init_carry(memory), no_context if self.current else ())

  def _make_layers(self, layers: int) -> RecurrentStack:
    return RecurrentStack(self.rnn, self.features, layers, self.residual, self.dropout, self.bridge, self.dtype)

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    lowest_states, above_states = carry.states
    context = carry.feed
    if not self.current:
      carry, trace = self.attend(carry, lowest_states[-1][0], memory, deterministic)
      context = trace.context
    lowest_states, output = self.stack(lowest_states, inputs + self.context_gates(context), deterministic)
    if self.current:
      carry, trace = self.attend(carry, output, memory, deterministic)
    above_inputs = jnp.concatenate([self.drop(output, deterministic=deterministic), trace.context], axis=-1)
    above_states, top = self.above(above_states, self.above.project(above_inputs), deterministic, trace.context)
    feed = trace.context if self.current else ()
    return carry._replace(states=(lowest_states, above_states), feed=feed), trace._replace(state=top)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    return self.make_output(traces.state, traces)


CELLS: Mapping[str, type[nn.Module]] = {'plain': Plain, 'bahdanau': Bahdanau, 'luong': Luong, 'gnmt': GNMTCell}
