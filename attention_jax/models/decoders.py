"""Decoders: start, step, and a call over all steps. Training uses the call, search uses step; both are one path."""

from typing import Any

import flax.linen as nn
import jax

from attention_jax.models.cells import Output
from attention_jax.models.encoders import Encoded


def over_steps(step):
  """step(module, carry, inputs [B, ...]) -> (carry, outputs) lifted to a scan over the axis T of inputs [B, T, ...]."""
  # To keep [B, S, F] of every step for the backward pass costs more than to compute it again; not so products with
  # kernels, which are most of the work and leave little.
  kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return nn.scan(
    nn.remat(step, prevent_cse=False, policy=kept),
    variable_broadcast='params',
    split_rngs={'params': False, 'dropout': True, 'attention': True},
    in_axes=1,
    out_axes=1,
  )


class Decoder(nn.Module):
  """A scan over a cell of CELLS."""

  cell: nn.Module

  def start(self, encoded: Encoded) -> tuple[Any, Any]:
    """What is prepared once per source: the first carry and the memory."""
    memory = self.cell.remember(encoded)
    return self.cell.start(encoded, memory), memory

  def observe(self, carry: Any, log_likelihood: jax.Array) -> Any:
    """The carry of a latent alignment when the output of its step is known; log_likelihood [B, S] of every position."""
    return self.cell.observe(carry, log_likelihood)

  def step(self, carry: Any, embedding: jax.Array, memory: Any, deterministic: bool = True) -> tuple[Any, Output]:
    """One step: embedding [B, E] of the token before -> Output with [B, ...]."""
    embeddings = embedding[:, None]
    carry, trace = self.cell.recur(carry, self.cell.before(embeddings)[:, 0], memory, deterministic)
    output = self.cell.after(jax.tree.map(lambda x: x[:, None], trace), embeddings, memory, deterministic)
    return carry, jax.tree.map(lambda x: x[:, 0], output)

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> Output:
    """All steps: embeddings [B, T, E] of the targets shifted right -> Output with [B, T, ...]."""
    carry, memory = self.start(encoded)

    def recur(cell, carry, inputs):
      return cell.recur(carry, inputs, memory, deterministic)

    _, traces = over_steps(recur)(self.cell, carry, self.cell.before(embeddings))
    return self.cell.after(traces, embeddings, memory, deterministic)
