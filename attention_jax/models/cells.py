"""Decoder cells: a cell is where attention sits. Every cell has the same four methods.

- remember(encoded) -> memory, once per source; start(encoded, memory) -> carry;
- before(embeddings [B, T, E]) -> inputs [B, T, ...]: what does not depend on the recurrence, for all steps at once;
- recur(carry, inputs [B, ...], memory, deterministic) -> carry, trace: the recurrence itself, one step;
- after(traces [B, T, ...], embeddings, memory, deterministic) -> Output: what follows it, for all steps at once.

One step of a decoder is `before`, `recur` and `after` with T = 1; all steps are the same three with a scan of `recur`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.attend import Memory
from attention_jax.models.encoders import Encoded
from attention_jax.modules.attention import Attention
from attention_jax.modules.recurrent import RecurrentStack


class Output(NamedTuple):
  """What a decoder step gives: features [..., D] for the output layer, the context [..., V], the weights [..., S]."""

  features: jax.Array
  context: jax.Array
  weights: jax.Array


class CellCarry(NamedTuple):
  """What one step hands to the next: recurrent states, the attention's carry, the vector fed back."""

  states: Any
  attention: Any
  feed: Any


class Trace(NamedTuple):
  """What one step of the recurrence leaves for `after`: the top state, and the context and weights if it attended."""

  state: jax.Array
  context: Any
  weights: Any


class Fixed(NamedTuple):
  """The memory of a cell without attention: one vector [B, D], and the mask of the source."""

  vector: jax.Array
  mask: jax.Array


def one_head(weights: jax.Array, heads: int) -> jax.Array:
  """Weights [B, N, ..., S] of several heads averaged to [B, ..., S]."""
  return weights if heads == 1 else weights.mean(1)


class Plain(nn.Module):
  """No attention: the source is one fixed vector. Sutskever, Vinyals & Le 2014; with `feed_context`, Cho et al. 2014.

  Attributes:
    attention: not used; it is there so that every cell is made alike.
    rnn: a row of RECURRENCES.
    features, layers, residual, dropout: of the recurrent stack.
    feed_context: whether the vector is an input of every step, and not only the source of the first state.
  """

  attention: Attention
  rnn: str = 'lstm'
  features: int = 512
  layers: int = 1
  residual: bool = False
  dropout: float = 0.0
  feed_context: bool = False
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.stack = RecurrentStack(self.rnn, self.features, self.layers, self.residual, self.dropout, self.dtype)
    if self.feed_context:
      self.context_gates = nn.Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  def remember(self, encoded: Encoded) -> Fixed:
    return Fixed(encoded.final, encoded.mask)

  def start(self, encoded: Encoded, memory: Fixed) -> CellCarry:
    gates = self.context_gates(memory.vector) if self.feed_context else ()
    return CellCarry(self.stack.start(encoded.final), (), gates)

  def before(self, embeddings: jax.Array) -> jax.Array:
    return self.stack.project(embeddings)

  def recur(self, carry: CellCarry, inputs: jax.Array, memory: Fixed, deterministic: bool) -> tuple[CellCarry, Trace]:
    if self.feed_context:
      inputs = inputs + carry.feed
    states, state = self.stack(carry.states, inputs, deterministic)
    return carry._replace(states=states), Trace(state, (), ())

  def after(self, traces: Trace, embeddings: jax.Array, memory: Fixed, deterministic: bool) -> Output:
    steps = traces.state.shape[:2]
    context = jnp.broadcast_to(memory.vector[:, None], (*steps, memory.vector.shape[-1]))
    nowhere = jnp.zeros((*steps, memory.mask.shape[-1]), jnp.float32)
    return Output(traces.state, context, nowhere)


class Bahdanau(nn.Module):
  """Attend with the state before, then the RNN; deep output. Bahdanau, Cho & Bengio 2015, section 3.1.

  c_t = attend(s_{t-1}); s_t = RNN(s_{t-1}, [y_{t-1}; c_t]); the output layer sees tanh(W [s_t; c_t; y_{t-1}]), where
  the paper has maxout. Attributes as in Plain; readout: the width of the deep output.
  """

  attention: Attention
  rnn: str = 'gru'
  features: int = 512
  layers: int = 1
  residual: bool = False
  dropout: float = 0.0
  readout: int = 512
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.stack = RecurrentStack(self.rnn, self.features, self.layers, self.residual, self.dropout, self.dtype)
    self.context_gates = nn.Dense(self.stack.width, use_bias=False, dtype=self.dtype)
    self.deep = nn.Dense(self.readout, dtype=self.dtype)

  def remember(self, encoded: Encoded) -> Memory:
    return self.attention.remember(encoded.memory, encoded.mask)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = self.stack.start(encoded.final)
    return CellCarry(states, self.attention.init_carry(memory), ())

  def before(self, embeddings: jax.Array) -> jax.Array:
    return self.stack.project(embeddings)

  def recur(self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool) -> tuple[CellCarry, Trace]:
    attention, (context, weights) = self.attention(carry.attention, carry.states[-1][0], memory, deterministic)
    states, state = self.stack(carry.states, inputs + self.context_gates(context), deterministic)
    return CellCarry(states, attention, ()), Trace(state, context, one_head(weights, self.attention.heads))

  def after(self, traces: Trace, embeddings: jax.Array, memory: Memory, deterministic: bool) -> Output:
    state, context, weights = traces
    deep = jnp.tanh(self.deep(jnp.concatenate([state, context, embeddings], axis=-1)))
    return Output(deep, context, weights)


class Luong(nn.Module):
  """The RNN first, then attend with its new state. Luong, Pham & Manning 2015, section 3.

  s_t = RNN(s_{t-1}, [y_{t-1}; a_{t-1}]); c_t = attend(s_t); a_t = tanh(W [c_t; s_t]), the attentional vector, which is
  the output and, with input feeding, part of the next input. Without it nothing of attention is in the recurrence, and
  all steps are attended at once wherever the alignment allows it. Attributes as in Plain.
  """

  attention: Attention
  rnn: str = 'lstm'
  features: int = 512
  layers: int = 1
  residual: bool = False
  dropout: float = 0.0
  input_feeding: bool = True
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.stack = RecurrentStack(self.rnn, self.features, self.layers, self.residual, self.dropout, self.dtype)
    self.attentional = nn.Dense(self.features, use_bias=False, dtype=self.dtype)
    if self.input_feeding:
      self.feed_gates = nn.Dense(self.stack.width, use_bias=False, dtype=self.dtype)

  @property
  def attends_inside(self) -> bool:
    """Whether attention is part of the recurrence."""
    return self.input_feeding or self.attention.recurrent

  def remember(self, encoded: Encoded) -> Memory:
    return self.attention.remember(encoded.memory, encoded.mask)

  def start(self, encoded: Encoded, memory: Memory) -> CellCarry:
    states = self.stack.start(encoded.final)
    attention = self.attention.init_carry(memory) if self.attends_inside else ()
    return CellCarry(states, attention, jnp.zeros_like(states[-1][0]) if self.input_feeding else ())

  def before(self, embeddings: jax.Array) -> jax.Array:
    return self.stack.project(embeddings)

  def recur(self, carry: CellCarry, inputs: jax.Array, memory: Memory, deterministic: bool) -> tuple[CellCarry, Trace]:
    if self.input_feeding:
      inputs = inputs + self.feed_gates(carry.feed)
    states, state = self.stack(carry.states, inputs, deterministic)
    carry = carry._replace(states=states)
    if not self.attends_inside:
      return carry, Trace(state, (), ())
    attention, (context, weights) = self.attention(carry.attention, state, memory, deterministic)
    carry = carry._replace(attention=attention)
    if self.input_feeding:
      carry = carry._replace(feed=self._attentional(state, context))
    return carry, Trace(state, context, one_head(weights, self.attention.heads))

  def after(self, traces: Trace, embeddings: jax.Array, memory: Memory, deterministic: bool) -> Output:
    state, context, weights = traces
    if not self.attends_inside:
      context, weights = self.attention.parallel(state, memory, deterministic)
      weights = one_head(weights, self.attention.heads)
    return Output(self._attentional(state, context), context, weights)

  def _attentional(self, state: jax.Array, context: jax.Array) -> jax.Array:
    return jnp.tanh(self.attentional(jnp.concatenate([context, state], axis=-1)))


CELLS: Mapping[str, type[nn.Module]] = {'plain': Plain, 'bahdanau': Bahdanau, 'luong': Luong}
