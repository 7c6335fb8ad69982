"""Prefix-constrained decoding, for every search: the step of the model is wrapped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.decoding.generate import IMPOSSIBLE_SCORE
from attention_jax.modules.embedding import oov_to_unk
from attention_jax.tokens import PAD


def force_prefix(step: Callable, carry: Any, memory: Any, prefix: jax.Array) -> tuple[Callable, Any, Any]:
  """Wraps a model so that its outputs begin with a prefix.

  The tokens of a prefix have probability 1, so that log-probabilities are those of the tokens after it.

  Args:
    step: the step of the model, see generate.py.
    carry: its first carry.
    memory: its memory.
    prefix: [B, P] ids, PAD after the end of each prefix. The search must allow at least one more token, for EOS. Ids
      beyond the logits count as UNK.

  Returns:
    The step, the first carry and the memory of the wrapped model.
  """
  # One column of PAD at the end, so that every position after a prefix reads PAD.
  end = jnp.full((prefix.shape[0], 1), PAD, prefix.dtype)

  def forced_step(carry, token, memory):
    model_carry, position = carry
    model_memory, prefix = memory
    model_carry, (logits, *outputs) = step(model_carry, token, model_memory)
    column = jnp.minimum(position, prefix.shape[1] - 1)[:, None]
    required = jnp.take_along_axis(prefix, column, axis=1)
    is_required = jnp.arange(logits.shape[-1])[None] == oov_to_unk(required, logits.shape[-1])
    forced_logits = jnp.where(is_required, 0.0, IMPOSSIBLE_SCORE)
    return (model_carry, position + 1), (jnp.where(required == PAD, logits, forced_logits), *outputs)

  position = jnp.zeros(prefix.shape[:1], jnp.int32)
  return forced_step, (carry, position), (memory, jnp.concatenate([prefix, end], axis=1))
