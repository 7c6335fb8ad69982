"""Decoder cells: a cell is where attention sits. Every cell has the same methods.

- remember(encoded) -> memory, once per source; start(encoded, memory) -> carry;
- project_inputs(embeddings [B, T, E]) -> inputs [B, T, ...]: what does not depend on the recurrence, for all steps;
- recur(carry, inputs [B, ...], memory, deterministic) -> carry, trace: the recurrence itself, one step;
- compute_outputs(traces [B, T, ...], embeddings, memory, deterministic) -> DecoderOutput: what follows, for all steps;
- observe(carry, log_likelihood) -> carry: for latent alignments, what a step makes of the output once it is known;
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
  """What a decoder step gives: features [..., D] for the output layer, the context [..., V], the weights [..., S].

  `state` is the private state of the alignment after the step. With a latent alignment there are features for every
  position that the output may be read at: [..., S, D]. `layers` are the weights of every layer and head [..., L, N, S],
  where there are several layers. `top` is the state of the highest layer [..., H].
  """

  features: jax.Array
  context: jax.Array
  weights: jax.Array
  state: Any = ()
  layers: Any = ()
  top: Any = ()


class CellCarry(NamedTuple):
  """What one step hands to the next: recurrent states, the attention's carry, the vector fed back."""

  states: Any
  attention: Any
  feed: Any


class StepTrace(NamedTuple):
  """Result of one step of the recurrence for `compute_outputs`: the top state; context and weights if it attended."""

  state: jax.Array
  context: Any = ()
  weights: Any = ()
  alignment: Any = ()


class Fixed(NamedTuple):
  """The memory of a cell without attention: one vector [B, D], and the mask of the source."""

  vector: jax.Array
  mask: jax.Array


class Cell(nn.Module):
  """What the cells share.

  Attributes:
    attention: where the cell looks.
    rnn: a row of RECURRENCES.
    features, layers, residual, dropout: of the recurrent stack.
    bridge: whether the first states are a learned map of the encoder's last ones; without it they are zeros, and
      nothing of the source is needed before its end has come.
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
    """How wide the features for the output layer are."""
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
    """One step of attention inside the recurrence -> carry, StepTrace without the top state."""
    self.attention.check_step_support()
    attention, (context, weights) = self.attention(carry.attention, query, memory, deterministic)
    trace = StepTrace((), context, one_head(weights, self.attention.heads), attention.state[1])
    return carry._replace(attention=attention), trace

  def observe(self, carry: CellCarry, log_likelihood: jax.Array) -> CellCarry:
    """The carry when the output of its step is known, whose log-likelihood [B, S] is that of reading it at each s."""
    return carry._replace(attention=self.attention.observe(carry.attention, log_likelihood))

  def move_to_end(self, carry: CellCarry, memory: Memory) -> CellCarry:
    """The carry of a walk that stands at the last position of another memory; states and what is fed back stay."""
    return carry._replace(attention=self.attention.carry_at_last_position(memory))

  def output(self, features: jax.Array, traces: StepTrace) -> DecoderOutput:
    return DecoderOutput(features, traces.context, traces.weights, traces.alignment, top=traces.state)

  def read(self, traces: StepTrace, embeddings: jax.Array, memory: Memory) -> jax.Array:
    """Features for the output layer: of the context, or of every position where the alignment is latent."""
    if not self.traits.latent:
      return self.features_of(traces.state, traces.context, embeddings)
    everywhere = memory.value  # [B, 1, S, V]: the axis of the one head is that of the steps
    return self.features_of(traces.state[:, :, None], everywhere, embeddings[:, :, None])


def one_head(weights: jax.Array, heads: int) -> jax.Array:
  """Weights [B, N, ..., S] of several heads averaged to [B, ..., S]."""
  return weights if heads == 1 else weights.mean(1)


class Plain(Cell):
  """No attention: the source is one fixed vector. Sutskever, Vinyals & Le 2014; with `feed_context`, Cho et al. 2014.

  Attributes as in Cell, where `attention` is not used; feed_context: whether the vector is an input of every step, and
  not only the source of the first state.
  """

  rnn: str = 'lstm'
  feed_context: bool = False

  def setup(self):
    if not self.bridge and not self.feed_context:
      raise UserError('plain: with bridge=False nothing tells of the source; possible: feed_context=True')
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
    nowhere = jnp.zeros((*steps, memory.mask.shape[-1]), jnp.float32)
    return DecoderOutput(traces.state, context, nowhere, top=traces.state)


class Bahdanau(Cell):
  """Attend with the state before, then the RNN; deep output. Bahdanau, Cho & Bengio 2015, section 3.1.

  c_t = attend(s_{t-1}); s_t = RNN(s_{t-1}, [y_{t-1}; c_t]); the output layer sees tanh(W [s_t; c_t; y_{t-1}]), where
  the paper has maxout. Attributes as in Cell, and
    readout: the width of the deep output.
    gate: whether the context is weighed by σ(w s_{t-1} + b), how much of it is wanted (Xu et al. 2015, section 4.2.1).
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
      what = f'alignment {self.attention.alignment!r} has one for each position'
      raise UserError(f'bahdanau: gate=True weighs one context, {what}; possible: gate=False')
    self.wanted = Dense(1, dtype=self.dtype) if self.gate else None

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    return CellCarry(self.stack.start(encoded.final), self.attention.init_carry(memory), ())

  def recur(
    self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[CellCarry, StepTrace]:
    before = carry.states[-1][0]
    carry, trace = self.attend(carry, before, memory, deterministic)
    if self.gate:
      trace = trace._replace(context=trace.context * jax.nn.sigmoid(self.wanted(before)))
    states, state = self.stack(carry.states, inputs + self.context_gates(trace.context), deterministic)
    return carry._replace(states=states), trace._replace(state=state)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    return self.output(self.read(traces, embeddings, memory), traces)

  def features_of(self, state: jax.Array, context: jax.Array, embeddings: jax.Array) -> jax.Array:
    return jnp.tanh(self.deep(state, context, embeddings))


class Luong(Cell):
  """The RNN first, then attend with its new state. Luong, Pham & Manning 2015, section 3.

  s_t = RNN(s_{t-1}, [y_{t-1}; a_{t-1}]); c_t = attend(s_t); a_t = tanh(W [c_t; s_t]), the attentional vector, which is
  the output and, with input feeding, part of the next input. Without it nothing of attention is in the recurrence, and
  all steps are attended at once wherever the alignment allows it. Attributes as in Cell.
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
  """Attend with the lowest layer; the context is an input of all layers. Wu et al. 2016, section 3.

  c_t = attend(s_{t-1}) with the state that the lowest layer had, s_t = LSTM([y_{t-1}; c_t]), and every layer above gets
  [output below; c_t]. With `current` it is s_t = LSTM([y_{t-1}; c_{t-1}]) first and c_t = attend(s_t) for the layers
  above, as in the variant gnmt_v2 of github.com/tensorflow/nmt. Layers from the third on add what comes from below to
  their output. Attributes as in Cell.
  """

  rnn: str = 'lstm'
  layers: Size = 4
  residual: bool = True
  current: bool = True

  def setup(self):
    if self.traits.latent:
      name = self.attention.alignment
      raise UserError(f'gnmt: alignment {name!r} needs a readout of each position, which bahdanau and luong alone have')
    if self.layers < 2:
      raise UserError(f'gnmt: layers={self.layers}; possible: 2 or more, the lowest one attends')
    stack = lambda layers: RecurrentStack(
      self.rnn, self.features, layers, self.residual, self.dropout, self.bridge, self.dtype
    )
    self.stack, self.above = stack(1), stack(self.layers - 1)
    self.drop = Dropout(self.dropout)
    self.context_gates = Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = self.stack.start(encoded.final), self.above.start(encoded.final)
    nothing = jnp.zeros((encoded.final.shape[0], self.attention.context_width(memory)), self.dtype)
    return CellCarry(states, self.attention.init_carry(memory), nothing if self.current else ())

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
    given = jnp.concatenate([self.drop(output, deterministic=deterministic), trace.context], axis=-1)
    above, top = self.above(states[1], self.above.project(given), deterministic, trace.context)
    feed = trace.context if self.current else ()
    return carry._replace(states=(lowest, above), feed=feed), trace._replace(state=top)

  def compute_outputs(
    self, traces: StepTrace, embeddings: jax.Array, memory: Memory, deterministic: bool
  ) -> DecoderOutput:
    return self.output(traces.state, traces)


CELLS: Mapping[str, type[nn.Module]] = {'plain': Plain, 'bahdanau': Bahdanau, 'luong': Luong, 'gnmt': GNMTCell}
