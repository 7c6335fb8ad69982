"""Inputs and results of the steps of a decoder."""

from typing import Any, NamedTuple

import jax

from attention_jax.functional.attend import Memory


class DecoderOutput(NamedTuple):
  """Output of one step of a decoder, or of all steps.

  Attributes:
    features: inputs of the output layer, [..., D]; with a latent alignment, one vector for each position, [..., S, D].
    context: context, [..., V]; () for a LayeredDecoder, even with a single layer.
    weights: attention weights, averaged over heads, [..., S].
    state: private state of the alignment after the step; () if it has none, and for a LayeredDecoder.
    layers: weights of every layer and head of a LayeredDecoder, [..., L, N, S]; () for a decoder with a cell.
    top: `StepTrace.state` of a decoder with a cell, or the features of a LayeredDecoder, [..., H].
  """

  features: jax.Array
  context: jax.Array
  weights: jax.Array
  state: Any = ()
  layers: Any = ()
  top: Any = ()


class CellCarry(NamedTuple):
  """Carry of a cell from one step to the next.

  Attributes:
    states: states of the recurrent layers.
    attention: carry of the attention; () if it is not in the recurrence.
    feed: vector that is an input of the next step; () if there is none.
  """

  states: Any
  attention: Any
  feed: Any


class StepTrace(NamedTuple):
  """Result of one step of the recurrence, an input of `compute_outputs`.

  Attributes:
    state: output of the highest layer, [..., H]; for the cell Bahdanau with previous=True, the state before the step.
    context, weights, alignment: context, weights and private state of the attention; () if it is not in the recurrence.
  """

  state: jax.Array
  context: Any = ()
  weights: Any = ()
  alignment: Any = ()


class FixedMemory(NamedTuple):
  """Memory of a cell without attention: a summary [B, D] and the mask [B, S] of the source."""

  vector: jax.Array
  mask: jax.Array


class SharedMemory(NamedTuple):
  """Memory that all hypotheses of a source share, with the products of its values and a kernel.

  For values [B, 1, S, V] and a kernel [V, W], the products `gates` are [B, S, W]. The product of a context and the
  kernel is then the weighted sum of the gates over the S positions, for any number of queries.
  """

  memory: Memory
  gates: jax.Array
