"""Decoders: `start`, `step`, and a call over all steps. Training uses the call, search uses `step`; both are one path.

- start(encoded, max_length) -> carry, memory: prepared once per source, for at most `max_length` steps;
- step(carry, embedding [B, E], memory, deterministic) -> carry, DecoderOutput with [B, ...];
- a call: (encoded, embeddings [B, T, E], deterministic) -> DecoderOutput with [B, T, ...].
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory
from attention_jax.models.cells import CELLS, Cell, DecoderOutput
from attention_jax.models.convolutional import ConvDecoder
from attention_jax.models.encoded import Encoded
from attention_jax.models.layered import LayeredCarry, LayeredDecoder, initial_carry
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.transformer import DecoderLayer, Stack, require_backprop, visibility_mask
from attention_jax.specs import Fraction


def over_steps(step, module: nn.Module):
  """Lifts step(module, carry, inputs [B, ...]) -> (carry, outputs) to a scan over the axis T of inputs [B, T, ...]."""
  # Storing [B, S, F] of every step for the backward pass costs more than recomputing it. Products with kernels are
  # stored: they are most of the work and small.
  saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return nn.scan(
    nn.remat(step, prevent_cse=False, policy=saved),
    variable_broadcast='params',
    split_rngs={'params': False, 'dropout': True, 'attention': True},
    in_axes=1,
    out_axes=1,
    # True traces the step once more, which initialisation needs.
    check_constancy_invariants=module.is_initializing(),
  )


class Decoder(nn.Module):
  """A scan over a cell.

  Attributes:
    cell: an instance of a row of CELLS.
    dropout: dropout rate of the features for the output layer.
  """

  cell: Cell
  dropout: Fraction = 0.0

  def setup(self):
    self.drop = Dropout(self.dropout)

  @property
  def attention(self) -> Attention:
    """The attention over the source."""
    return self.cell.attention

  @property
  def traits(self) -> Traits:
    """Properties of the cell."""
    return self.cell.traits

  def start(self, encoded: Encoded, max_length: int) -> tuple[Any, Any]:
    memory = self.cell.remember(encoded)
    return self.cell.start(encoded, memory), memory

  def observe(self, carry: Any, log_likelihood: jax.Array) -> Any:
    """Updates the carry of a latent alignment when the output of its step is known; log_likelihood [B, S]."""
    return self.cell.observe(carry, log_likelihood)

  def step(
    self, carry: Any, embedding: jax.Array, memory: Any, deterministic: bool = True
  ) -> tuple[Any, DecoderOutput]:
    embeddings = embedding[:, None]
    carry, trace = self.cell.recur(carry, self.cell.project_inputs(embeddings)[:, 0], memory, deterministic)
    output = self.cell.compute_outputs(jax.tree.map(lambda x: x[:, None], trace), embeddings, memory, deterministic)
    return carry, self._dropped(jax.tree.map(lambda x: x[:, 0], output), deterministic)

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    carry, memory = self.start(encoded, embeddings.shape[1])

    def recur(cell, carry, inputs):
      return cell.recur(carry, inputs, memory, deterministic)

    _, traces = over_steps(recur, self)(self.cell, carry, self.cell.project_inputs(embeddings))
    return self._dropped(self.cell.compute_outputs(traces, embeddings, memory, deterministic), deterministic)

  def _dropped(self, output: DecoderOutput, deterministic: bool) -> DecoderOutput:
    return output._replace(features=self.drop(output.features, deterministic=deterministic))


class TransformerDecoder(LayeredDecoder, Stack, kw_only=True):
  """Layers with self-attention and attention to the memory. Vaswani et al. 2017, section 3.1.

  Attributes as in LayeredDecoder and Stack; the features of the attention must equal those of the decoder.
  """

  sublayers = 3

  def setup(self):
    self.prepare(causal=True)
    if self.attention.features != self.features:
      given = f'model.attention.features={self.attention.features}, decoder features={self.features}'
      raise UserError(f'transformer: {given}; they must be the same')
    self.check_layers('transformer')
    cross = functools.partial(require_backprop(self.attention).clone, project_values=True, joined=self.residual_scale)
    self.blocks = [
      DecoderLayer(self.self_attention(), cross(), self.feed_forward(), self.residual) for _ in range(self.layers)
    ]

  def start(self, encoded: Encoded, max_length: int) -> tuple[LayeredCarry, tuple[Memory, ...]]:
    self.positions.check(max_length)
    memory = self._remember(encoded)
    layers = zip(self.blocks, memory, strict=True)
    carries = tuple(block.start(own_memory, max_length, self.features) for block, own_memory in layers)
    return initial_carry(encoded.memory.shape[0], carries), memory

  def step(
    self, carry: LayeredCarry, embedding: jax.Array, memory: tuple[Memory, ...], deterministic: bool = True
  ) -> tuple[LayeredCarry, DecoderOutput]:
    at, size = carry.step[0], carry.layers[0].key.shape[2]
    x = self.embed_inputs(embedding[:, None], at[None])[:, 0]
    mask = jnp.broadcast_to(self._visible(at[None], size), (x.shape[0], size))
    carries, seen = [], []
    for block, own, own_memory in zip(self.blocks, carry.layers, memory, strict=True):
      own, x, weights = block.step(own, x, own_memory, mask, at, deterministic)
      carries.append(own)
      seen.append(weights)
    return LayeredCarry(carry.step + 1, tuple(carries)), self.gather(self.finalize(x), seen, 1)

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    at = jnp.arange(embeddings.shape[1])
    x, seen = self.embed_inputs(embeddings, at), []
    mask = jnp.broadcast_to(self._visible(at, len(at)), (x.shape[0], len(at), len(at)))
    for block, own_memory in zip(self.blocks, self._remember(encoded), strict=True):
      after, weights = block(x, own_memory, mask, at, deterministic)
      x = self.apply_layer_drop(x, after, deterministic)
      seen.append(jnp.moveaxis(weights, 2, 1))
    return self.gather(self.finalize(x), seen, 2)

  def _visible(self, at: jax.Array, size: int) -> jax.Array:
    return visibility_mask(at, size, causal=True, window=self.window, sinks=self.sinks)

  def _remember(self, encoded: Encoded) -> tuple[Memory, ...]:
    return tuple(block.remember(encoded.memory, encoded.mask, encoded.values) for block in self.blocks)


DECODERS: Mapping[str, type[nn.Module]] = {**CELLS, 'conv': ConvDecoder, 'transformer': TransformerDecoder}


def decoder_of(module: nn.Module, dropout: float) -> nn.Module:
  """Returns an instance of a row of DECODERS as a decoder: a cell is wrapped in a scan."""
  return Decoder(module, dropout) if isinstance(module, Cell) else module
