"""Encoders: from a source to a memory. All of them return `Encoded`, so that every decoder takes every encoder."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.masking import masked
from attention_jax.modules.recurrent import RecurrentLayer

DIRECTIONS: Mapping[str, tuple[bool, ...]] = {'forward': (False,), 'backward': (True,), 'both': (False, True)}


class Encoded(NamedTuple):
  """An encoded source: memory [B, S, D] (zero where masked), mask [B, S], and a summary `final` [B, D']."""

  memory: jax.Array
  mask: jax.Array
  final: jax.Array


class RNN(nn.Module):
  """Stacked recurrent layers over embedded tokens; `final` is every layer's last state, side by side.

  Attributes:
    embedding: module from ids to vectors.
    rnn: a row of RECURRENCES.
    features: of each layer; a bidirectional layer has half of them in each direction.
    layers, residual: how many, and whether each above the first adds its input (where the widths agree).
    direction: 'forward', 'backward' (Sutskever et al. 2014 read the source backward) or 'both'.
    dropout: on the memory and between layers.
  """

  embedding: nn.Module
  rnn: str = 'gru'
  features: int = 512
  layers: int = 1
  residual: bool = False
  direction: str = 'forward'
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """source [B, S] ids, mask [B, S] -> Encoded."""
    directions = DIRECTIONS[self.direction]
    if self.layers < 1 or self.features % len(directions):
      raise UserError(f'encoder: features={self.features} in {self.direction!r} direction(s), layers={self.layers}')
    outputs, finals = self.embedding(source, deterministic), []
    drop = nn.Dropout(self.dropout)
    for layer in range(self.layers):
      inputs, sides = outputs, []
      for reverse in directions:
        side = RecurrentLayer(self.rnn, self.features // len(directions), reverse, self.dtype)
        output, state = side(inputs, mask)
        sides.append(output)
        finals.extend(state)
      outputs = jnp.concatenate(sides, axis=-1)
      if self.residual and layer and inputs.shape == outputs.shape:
        outputs = outputs + masked(inputs, mask)
      outputs = drop(outputs, deterministic=deterministic)
    return Encoded(outputs, mask, jnp.concatenate(finals, axis=-1))


class BiRNN(RNN):
  """RNN in both directions."""

  direction: str = 'both'


ENCODERS: Mapping[str, type[nn.Module]] = {'rnn': RNN, 'birnn': BiRNN}
