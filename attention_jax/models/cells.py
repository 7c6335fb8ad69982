"""Decoder cells: one step of a recurrent decoder with attention. Every cell has the same methods.

- remember(encoded) -> memory, once per source; start(encoded, memory) -> carry;
- project_inputs(embeddings [B, T, E]) -> inputs [B, T, ...]: everything before the recurrence, for all steps at once;
- recur(carry, inputs [B, ...], memory, deterministic) -> carry, trace: the recurrence itself, one step;
- compute_outputs(traces [B, T, ...], embeddings, memory, deterministic) -> DecoderOutput: everything after
  the recurrence, for all steps at once;
- observe(carry, log_likelihood) -> carry: for latent alignments, updates the carry when the output of a step is known;
- move_to_end(carry, memory) -> carry: for alignments with a lookback, sets the position to the end of this memory.

One step of a decoder is `project_inputs`, `recur` and `compute_outputs` with T = 1; all steps are the same three
functions with a scan of `recur`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory
from attention_jax.models.encoded import Encoded
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import ConcatDense, Dense
from attention_jax.modules.recurrent import RecurrentStack
from attention_jax.specs import Fraction, Size


class DecoderOutput(NamedTuple):
  """Result of decoder steps.

  Attributes:
    features: input of the output layer [..., D]; with a latent alignment, one for every position [..., S, D].
    context: [..., V].
    weights: [..., S].
    state: private state of the alignment after the step.
    layers: weights of every layer and head [..., L, N, S] of a decoder with several layers of attention, else ().
    top: state of the highest layer [..., H].
  """

  features: jax.Array
  context: jax.Array
  weights: jax.Array
  state: Any = ()
  layers: Any = ()
  top: Any = ()


class CellCarry(NamedTuple):
  """Carry of a cell.

  Attributes:
    states: recurrent states of all layers.
    attention: carry of the attention.
    feed: vector that is fed back into the next step, or ().
  """

  states: Any
  attention: Any
  feed: Any


class StepTrace(NamedTuple):
  """Result of one step of the recurrence, from which `compute_outputs` computes features.

  Attributes:
    state: state of the highest layer.
    context, weights, alignment: context, weights and alignment state of a cell that attends inside the recurrence.
  """

  state: jax.Array
  context: Any = ()
  weights: Any = ()
  alignment: Any = ()


class Fixed(NamedTuple):
  """Memory of a cell without attention: one vector [B, D], and the mask [B, S] of the source."""

  vector: jax.Array
  mask: jax.Array


class Cell(nn.Module):
  """Base class of cells.

  Attributes:
    attention: attention over the source.
    rnn: name of a row of RECURRENCES.
    features: width of each recurrent layer.
    layers: number of recurrent layers.
    residual: whether layers above the first add their input to their output.
    dropout: dropout rate between layers.
    bridge: whether the first states are a learned map of the encoder's last states. Without it they are zeros, and
      decoding may start before the source is complete.
    dtype: dtype of the computation.
  """

  attention: Attention
  rnn: str = 'gru'
  features: Size = 512
  layers: Size = 1
  residual: bool = False
  dropout: Fraction = 0.0
  bridge: bool = True
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
    return RecurrentStack(self.rnn, self.features, self.layers, self.residual, self.dropout, self.bridge, self.dtype)

  def remember(self, encoded: Encoded) -> Memory:
    return self.attention.remember(encoded.memory, encoded.mask, value=encoded.values)

  def project_inputs(self, embeddings: jax.Array) -> jax.Array:
    return self.stack.project(embeddings)

  def attend(
    self, carry: CellCarry, query: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    """Attends once inside the recurrence; returns the carry and a StepTrace without the top state."""
    self.attention.check_step_support()
    attention, (context, weights) = self.attention(carry.attention, query, memory, deterministic)
    trace = StepTrace((), context, one_head(weights, self.attention.heads), attention.state[1])
    return carry._replace(attention=attention), trace

  def observe(self, carry: CellCarry, log_likelihood: jax.Array) -> CellCarry:
    """Updates the carry when the output of its step is known.

    Args:
      carry: the carry after the step.
      log_likelihood: log-probability of the output given each position [B, S].
    """
    return carry._replace(attention=self.attention.observe(carry.attention, log_likelihood))

  def move_to_end(self, carry: CellCarry, memory: Memory) -> CellCarry:
    """Sets the position of a monotonic alignment to the end of `memory`; recurrent states and feed are unchanged."""
    return carry._replace(attention=self.attention.carry_at_last_position(memory))

  def output(self, features: jax.Array, traces: StepTrace) -> DecoderOutput:
    return DecoderOutput(features, traces.context, traces.weights, traces.alignment, top=traces.state)

  def read(self, traces: StepTrace, embeddings: jax.Array, memory: Memory) -> jax.Array:
    """Returns features for the output layer: of the context, or of every position if the alignment is latent."""
    if not self.traits.latent:
      return self.features_of(traces.state, traces.context, embeddings)
    contexts = memory.value  # [B, 1, S, V]: the axis of the single head broadcasts over the steps
    return self.features_of(traces.state[:, :, None], contexts, embeddings[:, :, None])


def one_head(weights: jax.Array, heads: int) -> jax.Array:
  """Averages weights [B, N, ..., S] over heads to [B, ..., S]."""
  return weights if heads == 1 else weights.mean(1)


class Plain(Cell):
  """No attention: the source is one fixed vector. Sutskever, Vinyals & Le 2014; with `feed_context`, Cho et al. 2014.

  Attributes as in Cell, where `attention` is not used, and
    feed_context: whether the vector is an input of every step, in addition to the first state.
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

  def remember(self, encoded: Encoded) -> Fixed:
    return Fixed(encoded.final, encoded.mask)

  def start(self, encoded: Encoded, memory: Fixed) -> CellCarry:
    gates = self.context_gates(memory.vector) if self.feed_context else ()
    return CellCarry(self.stack.start(encoded.final), (), gates)

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Fixed, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    if self.feed_context:
      inputs = inputs + carry.feed
    states, state = self.stack(carry.states, inputs, deterministic)
    return carry._replace(states=states), StepTrace(state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Fixed, deterministic: bool
  ) -> DecoderOutput:
    steps = traces.state.shape[:2]
    context = jnp.broadcast_to(memory.vector[:, None], (*steps, memory.vector.shape[-1]))
    weights = jnp.zeros((*steps, memory.mask.shape[-1]), jnp.float32)
    return DecoderOutput(traces.state, context, weights, top=traces.state)


class Bahdanau(Cell):
  """Attention with the previous state, then the RNN; deep output. Bahdanau, Cho & Bengio 2015, section 3.1.

  c_t = attend(s_{t-1}); s_t = RNN(s_{t-1}, [y_{t-1}; c_t]). The features are tanh(W [s_t; c_t; y_{t-1}]), where the
  paper has maxout.

  Attributes as in Cell, and
    readout: width of the deep output.
    gate: whether the context is multiplied by the gate σ(w s_{t-1} + b) (Xu et al. 2015, section 4.2.1).
  """

  readout: Size = 512
  gate: bool = False

  @property
  def width(self) -> int:
    return self.readout

  def setup(self):
    self.stack = self.make_stack()
    self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)
    self.deep = ConcatDense(self.readout, bias=True, dtype=self.dtype)
    if self.gate and self.traits.latent:
      reason = f'alignment {self.attention.alignment!r} has one context for each position'
      raise UserError(f'bahdanau: gate must be False, got True; {reason}')
    self.wanted = Dense(1, dtype=self.dtype) if self.gate else None

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    return CellCarry(self.stack.start(encoded.final), self.attention.init_carry(memory), ())

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    previous_state = carry.states[-1][0]
    carry, trace = self.attend(carry, previous_state, memory, deterministic)
    if self.gate:
      trace = trace._replace(context=trace.context * jax.nn.sigmoid(self.wanted(previous_state)))
    states, state = self.stack(carry.states, inputs + self.context_gates(trace.context), deterministic)
    return carry._replace(states=states), trace._replace(state=state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    return self.output(self.read(traces, embeddings, memory), traces)

  def features_of(self, state: jax.Array, context: jax.Array, embeddings: jax.Array) -> jax.Array:
    return jnp.tanh(self.deep(state, context, embeddings))


class Luong(Cell):
  """The RNN, then attention with its new state. Luong, Pham & Manning 2015, section 3.

  s_t = RNN(s_{t-1}, [y_{t-1}; a_{t-1}]); c_t = attend(s_t); a_t = tanh(W [c_t; s_t]), the attentional vector, which is
  the output and, with input feeding, part of the next input. Without input feeding, attention is outside the recurrence
  and computed for all steps at once if the alignment allows it.

  Attributes as in Cell, and
    input_feeding: whether the attentional vector is an input of the next step.
  """

  rnn: str = 'lstm'
  input_feeding: bool = True

  def setup(self):
    self.stack = self.make_stack()
    self.attentional = ConcatDense(self.features, dtype=self.dtype)
    if self.input_feeding:
      self.feed_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  @property
  def traits(self) -> Traits:
    return super().traits._replace(attends_in_recurrence=self.input_feeding or self.attention.is_recurrent)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = self.stack.start(encoded.final)
    attention = self.attention.init_carry(memory) if self.traits.attends_in_recurrence else ()
    return CellCarry(states, attention, jnp.zeros_like(states[-1][0]) if self.input_feeding else ())

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
      carry = carry._replace(feed=self.features_of(state, trace.context, ()))
    return carry, trace._replace(state=state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    if not self.traits.attends_in_recurrence:
      context, weights = self.attention.parallel(traces.state, memory, deterministic)
      traces = traces._replace(context=context, weights=one_head(weights, self.attention.heads))
    return self.output(self.read(traces, embeddings, memory), traces)

  def features_of(self, state: jax.Array, context: jax.Array, embeddings: jax.Array) -> jax.Array:
    return jnp.tanh(self.attentional(context, state))


class GNMTCell(Cell):
  """Attention with the lowest layer; the context is an input of all layers. Wu et al. 2016, section 3.

  c_t = attend(s_{t-1}) with the previous state of the lowest layer, s_t = LSTM([y_{t-1}; c_t]), and every layer above
  gets [output below; c_t]. From the third on, layers add their input to their output.

  Attributes as in Cell, and
    current: whether the lowest layer attends with its new state: s_t = LSTM([y_{t-1}; c_{t-1}]), c_t = attend(s_t) for
      the layers above, as in the variant gnmt_v2 of github.com/tensorflow/nmt.
  """

  rnn: str = 'lstm'
  layers: Size = 4
  residual: bool = True
  current: bool = True

  def setup(self):
    if self.traits.latent:
      name = self.attention.alignment
      raise UserError(f'gnmt: alignment {name!r} needs features of every position; expected decoder: bahdanau or luong')
    if self.layers < 2:
      raise UserError(f'gnmt: layers must be at least 2, of which the lowest attends, got {self.layers}')
    stack = lambda layers: RecurrentStack(
      self.rnn, self.features, layers, self.residual, self.dropout, self.bridge, self.dtype
    )
    self.stack, self.above = stack(1), stack(self.layers - 1)
    self.drop = Dropout(self.dropout)
    self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = self.stack.start(encoded.final), self.above.start(encoded.final)
    feed = ()
    if self.current:
      feed = jnp.zeros((encoded.final.shape[0], self.attention.context_width(memory)), self.dtype)
    return CellCarry(states, self.attention.init_carry(memory), feed)

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    states, context = carry.states, carry.feed
    if not self.current:
      carry, trace = self.attend(carry, states[0][-1][0], memory, deterministic)
      context = trace.context
    lowest, output = self.stack(states[0], inputs + self.context_gates(context), deterministic)
    if self.current:
      carry, trace = self.attend(carry, output, memory, deterministic)
    inputs_above = jnp.concatenate([self.drop(output, deterministic=deterministic), trace.context], axis=-1)
    above, top = self.above(states[1], self.above.project(inputs_above), deterministic, trace.context)
    feed = trace.context if self.current else ()
    return carry._replace(states=(lowest, above), feed=feed), trace._replace(state=top)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    return self.output(traces.state, traces)


CELLS: Mapping[str, type[nn.Module]] = {'plain': Plain, 'bahdanau': Bahdanau, 'luong': Luong, 'gnmt': GNMTCell}
