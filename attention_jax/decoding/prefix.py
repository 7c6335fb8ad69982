"""Hypotheses that begin as they are told to, in any search: what a search may see of a model is wrapped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.decoding.search import IMPOSSIBLE_SCORE
from attention_jax.modules.embedding import oov_to_unk
from attention_jax.tokens import PAD


def force_prefix(step: Callable, carry: Any, memory: Any, prefix: jax.Array) -> tuple[Callable, Any, Any]:
  """step, carry and memory of a model whose outputs begin with prefix [B, P] ids, PAD after its end.

  The tokens of a prefix have the probability 1, so that scores are those of what follows, given it.
  """
  none = jnp.full((prefix.shape[0], 1), PAD, prefix.dtype)

  def forced(carry, token, memory):
    (own, at), (own_memory, prefix) = carry, memory
    own, (logits, *rest) = step(own, token, own_memory)
    wanted = jnp.take_along_axis(prefix, jnp.minimum(at, prefix.shape[1] - 1)[:, None], axis=1)
    only = jnp.where(jnp.arange(logits.shape[-1])[None] == oov_to_unk(wanted, logits.shape[-1]), 0.0, IMPOSSIBLE_SCORE)
    return (own, at + 1), (jnp.where(wanted == PAD, logits, only), *rest)

  at = jnp.zeros(prefix.shape[:1], jnp.int32)
  return forced, (carry, at), (memory, jnp.concatenate([prefix, none], axis=1))
