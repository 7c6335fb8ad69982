"""Intra-attention: a recurrent layer that attends to all of its own past states (LSTMN)."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Carry, Memory
from attention_jax.functional.masking import zero_masked
from attention_jax.functional.table import lookup
from attention_jax.modules.attention import Attention
from attention_jax.modules.recurrent import RecurrentCell, State, zero_state
from attention_jax.modules.transformer_stack import require_backprop

BLOCK = 8  # steps per block; training stores one tape per block


class IntraAttentionCarry(NamedTuple):
  """Values that one step of an IntraAttentionLayer passes to the next.

  Attributes:
    summary: h̃ of the last step, [B, F].
    state: state after the last step, arrays [B, F].
    tape: all past states, a Memory with keys of h and values of the whole state ([h; c] of an LSTM); positions without
      a state are masked.
    attention: carry of the attention.
  """

  summary: jax.Array
  state: State
  tape: Memory
  attention: Carry


class IntraAttentionLayer(nn.Module):
  """Long short-term memory-network: the state before a step is a weighted sum of all past states.

  Cheng, Dong & Lapata 2016, section 3. With `additive` and softmax, and x_t and h̃_{t-1} as the query:

    a_i = v · tanh(W_h h_i + W_x x_t + W_h̃ h̃_{t-1}), s = softmax(a), [h̃_t; c̃_t] = Σ_{i<t} s_i [h_i; c_i],
    (h_t, c_t) = LSTM(x_t, (h̃_t, c̃_t)).

  The first step has no past: its h̃ and c̃ are zeros. Training stores the tape once per block of steps, which takes of
  the order of S² F / BLOCK numbers for each sequence.

  Attributes:
    kind: a key of RECURRENCES; all arrays of its state are stored on the tape.
    features: features F of the layer.
    reverse: whether the sequence is read from its end.
    score: spec of SCORES; the query has the features of x and h̃, the key those of h.
    alignment: spec of ALIGNMENTS that trains by backpropagation alone and has no state.
    dtype: dtype of the computation.
  """

  kind: str = 'lstm'
  features: int = 256
  reverse: bool = False
  score: str = 'additive'
  alignment: str = 'softmax'
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.cell = RecurrentCell(self.kind, self.features, self.dtype)
    attention = Attention(self.score, self.alignment, self.features, dtype=self.dtype)
    self.attention = require_backprop(attention, 'intra-attention')
    self._check_state()

  def _check_state(self) -> None:
    """Raises UserError for an alignment with a state: all of its probability is lost at the first, empty tape."""
    if lookup(self.alignment, ALIGNMENTS, 'alignment').init_state:
      expected = [name for name, row in ALIGNMENTS.items() if row.trains_by_backprop and not row.init_state]
      raise UserError(
        f'intra-attention: {self.alignment!r} starts at the first position, but the first step has no past; expected '
        f'one of: {", ".join(expected)}'
      )

  def __call__(
    self, inputs: jax.Array, mask: jax.Array, deterministic: bool = True
  ) -> tuple[jax.Array, State, jax.Array]:
    """Runs the layer over a whole sequence.

    Args:
      inputs: inputs, [B, S, D].
      mask: True at real positions, [B, S].
      deterministic: whether to use test-time behaviour.

    Returns:
      Outputs [B, S, F], zero where masked; the state after the last unmasked step; and the weights [B, S, S] of every
      position over the positions that were read before it.
    """
    order = self._reading_order(mask)
    back = jnp.argsort(order, axis=1)
    is_real = jnp.take_along_axis(mask, order, 1)
    inputs = _take_steps(zero_masked(inputs, mask).astype(self.dtype), order)
    state = zero_state(self.kind, inputs.shape[0], self.features, self.dtype)
    blank = jnp.zeros((*mask.shape, self.features), self.dtype)
    tape = self._remember((blank,) * len(state), jnp.zeros_like(mask))
    carry = IntraAttentionCarry(state[0], state, tape, self.attention.init_carry(tape))

    steps = (inputs, self.cell.project(inputs), is_real)
    steps = (*(jnp.moveaxis(x, 1, 0) for x in steps), jnp.arange(mask.shape[1]))
    carry, results = self._scan(carry, steps, deterministic)
    outputs, weights = (zero_masked(_take_steps(jnp.moveaxis(x, 0, 1), back), mask) for x in results)
    return outputs, carry.state, jnp.take_along_axis(weights, back[:, None], 2)

  def _reading_order(self, mask: jax.Array) -> jax.Array:
    """Returns the positions [B, S] in the order in which they are read, masked ones last.

    The tape is in this order, in which scores and alignments such as `local_m` and `windowed` count its entries.
    """
    positions = jnp.arange(mask.shape[1])
    return jnp.argsort(jnp.where(mask, (-positions if self.reverse else positions)[None], mask.shape[1]), axis=1)

  def _scan(self, carry: IntraAttentionCarry, steps: Any, deterministic: bool) -> tuple[IntraAttentionCarry, Any]:
    """Scans `_step` over arrays [S, ...] in blocks, so that training stores one tape per block instead of per step."""
    options = {
      'variable_broadcast': 'params',
      'split_rngs': {'params': False, 'attention': True},
      # True traces the step twice, which creating parameters requires.
      'check_constancy_invariants': self.is_initializing(),
    }

    def step(layer: IntraAttentionLayer, carry: IntraAttentionCarry, xs: Any):
      return layer._step(carry, *xs, deterministic)

    def block(layer: IntraAttentionLayer, carry: IntraAttentionCarry, xs: Any):
      return nn.scan(step, **options)(layer, carry, xs)

    size = steps[-1].shape[0]
    padding = -size % BLOCK  # steps with a mask of False, which change nothing
    blocks = jax.tree.map(
      lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, BLOCK, *x.shape[1:]), steps
    )
    carry, outputs = nn.scan(nn.remat(block, prevent_cse=False), **options)(self, carry, blocks)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], outputs)

  def _step(
    self,
    carry: IntraAttentionCarry,
    x: jax.Array,
    projected: jax.Array,
    is_real: jax.Array,
    position: jax.Array,
    deterministic: bool,
  ) -> tuple[IntraAttentionCarry, tuple[jax.Array, jax.Array]]:
    """Computes one step; returns the new carry, the output [B, F] and the weights [B, S]."""
    query = jnp.concatenate([x, carry.summary], axis=-1)
    attention, attended = self.attention(carry.attention, query, carry.tape, deterministic)
    state_before = tuple(jnp.split(attended.context.astype(self.dtype), len(carry.state), axis=-1))
    state = self.cell(state_before, projected)

    entry = self._remember(tuple(part[:, None] for part in state), is_real[:, None])

    def write(tape, new):
      return jax.lax.dynamic_update_index_in_dim(tape, new, position, axis=2)

    tape = jax.tree.map(write, carry.tape, entry)

    next_carry = IntraAttentionCarry(state_before[0], state, tape, attention)
    return _where(is_real, next_carry, carry), (state[0], attended.weights)

  def _remember(self, state: State, mask: jax.Array) -> Memory:
    """Returns entries of the tape: states [B, n, F] with mask [B, n]."""
    return self.attention.remember(state[0], mask, value=jnp.concatenate(state, axis=-1))


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
  """Selects rows of two trees of arrays [B, ...] by a condition [B]."""
  return jax.tree.map(lambda x, y: jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old)


def _take_steps(x: jax.Array, order: jax.Array) -> jax.Array:
  """Returns the steps of x [B, S, D] in another order [B, S]."""
  return jnp.take_along_axis(x, order[..., None], 1)
