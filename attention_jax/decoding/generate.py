"""Generation of independent hypotheses from the step of a model, and helpers of all kinds of decoding.

`step(carry, token [B], memory) -> carry, (logits [B, vocabulary], weights [B, S], ...)`; every leaf of the carry has
the batch first. Decoding depends on this function alone. Shapes are static. `vocabulary` is the number of tokens that a
model can emit, which includes copyable positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding.loop import shrinking_while_loop
from attention_jax.decoding.ranking import Ranking, ranking_scores
from attention_jax.decoding.top_k import log_sum_exp
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD

# Finite, so that sums and length-normalised values of it stay ordered, and below every score that a Ranking allows.
IMPOSSIBLE_SCORE = -1e30


class Hypotheses(NamedTuple):
  """K hypotheses of each source: those of a search with the best first, samples in the order of sampling.

  Attributes:
    tokens: [B, K, T] ids, EOS at the end and PAD after it.
    scores: [B, K] ranking scores, see Ranking; IMPOSSIBLE_SCORE where there is no hypothesis: where a beam search finds
      fewer than K, and where a hypothesis of another search has probability 0.
    log_probs: [B, K] natural log of the probability, EOS included.
    lengths: [B, K] tokens, EOS included; 0 where there is no hypothesis.
    weights: [B, K, T, S] attention weights, zero after the end of the hypothesis.
  """

  tokens: jax.Array
  scores: jax.Array
  log_probs: jax.Array
  lengths: jax.Array
  weights: jax.Array


class GenerationState(NamedTuple):
  """State of `generate`.

  Attributes:
    carry: carry of the model.
    token: [B, K] last token, PAD after the end.
    is_finished: [B, K] whether EOS has been emitted; True for filler rows.
    log_probs: [B, K] sum of the log-probabilities of all tokens so far.
    last_log_probs: [B, K] log-probability of the last token before any PAD.
  """

  carry: Any
  token: jax.Array
  is_finished: jax.Array
  log_probs: jax.Array
  last_log_probs: jax.Array


def generate(
  step: Callable,
  carry: Any,
  memory: Any,
  choose_token: Callable,
  choice_inputs: Any,
  *,
  hypotheses: int,
  max_length: int,
  ranking: Ranking,
  source_mask: jax.Array | None,
) -> Hypotheses:
  """Generates K hypotheses of each source independently of each other, until each has emitted EOS.

  Args:
    step: as that of a model, but with tokens, logits and weights [B, K, ...].
    carry: the first carry; axis 0 of every leaf is the batch of sources.
    memory: the memory, of sources [B].
    choose_token: (logits [B, K, vocabulary], step_index, choice_inputs) -> the next token [B, K]. Steps count from 0;
      at the last one, T - 1, the token must be EOS.
    choice_inputs: further inputs of choose_token for each source, leaves [B, ...].
    hypotheses: K.
    max_length: T, EOS included.
    ranking: the ranking that defines the scores.
    source_mask: [B, S] bool, True = real; None for all. Rows without any real position are filler rows, which are
      finished from the start.
  """
  batch = batch_size(carry, memory)
  token = jnp.full((batch, hypotheses), BOS, jnp.int32)
  _, (_, weight_shape, *_) = jax.eval_shape(step, carry, token, memory)
  source_mask = broadcast_source_mask(source_mask, batch, weight_shape.shape[-1])

  def body(step_index, state, history, inputs):
    memory, choice_inputs = inputs
    token_history, weight_history = history
    carry, (logits, weights, *_) = step(state.carry, state.token, memory)
    token = choose_token(logits, step_index, choice_inputs)
    log_prob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - log_sum_exp(logits)
    token = jnp.where(state.is_finished, PAD, token)
    last_log_probs = jnp.where(state.is_finished, state.last_log_probs, log_prob)
    log_probs = state.log_probs + jnp.where(state.is_finished, 0.0, last_log_probs)
    weights = jnp.where(state.is_finished[..., None], 0.0, weights)
    is_finished = state.is_finished | (token == EOS)
    history = (token_history.at[step_index].set(token), weight_history.at[step_index].set(weights))
    return GenerationState(carry, token, is_finished, log_probs, last_log_probs), history

  zeros = jnp.zeros((batch, hypotheses))
  is_filler = jnp.broadcast_to(~source_mask.any(-1)[:, None], zeros.shape)
  token_history = jnp.full((max_length, *zeros.shape), PAD, jnp.int32)
  weight_history = jnp.zeros((max_length, *weight_shape.shape), weight_shape.dtype)
  # The last token of every hypothesis is EOS, so the last log-probability is that of EOS.
  (log_probs, eos_log_probs), (tokens, weights) = shrinking_while_loop(
    body,
    lambda state, _: ~state.is_finished.all(-1),
    lambda state: (state.log_probs, state.last_log_probs),
    max_length,
    GenerationState(carry, token, is_filler, zeros, zeros),
    (token_history, weight_history),
    (memory, choice_inputs),
  )
  tokens = jnp.moveaxis(tokens, 0, -1)
  weights = jnp.moveaxis(weights, 0, -2)
  lengths = jnp.sum(tokens != PAD, axis=-1)
  scores = ranking_scores(log_probs, eos_log_probs, lengths, weights.sum(2), source_mask, ranking)
  exists = log_probs > IMPOSSIBLE_SCORE / 2
  return Hypotheses(
    jnp.where(exists[..., None], tokens, PAD),
    jnp.where(exists, scores, IMPOSSIBLE_SCORE),
    jnp.where(exists, log_probs, IMPOSSIBLE_SCORE),
    jnp.where(exists, lengths, 0),
    jnp.where(exists[..., None, None], weights, 0.0),
  )


def batch_size(carry: Any, memory: Any) -> int:
  """Returns the number of sources. Raises UserError if neither the carry nor the memory has an array."""
  leaves = jax.tree.leaves((carry, memory))
  if not leaves:
    raise UserError(
      'search: carry or memory must have an array [B, ...], which defines the number of sources B, got none'
    )
  return leaves[0].shape[0]


def end_and_continuation_masks(size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns bool masks [vocabulary] of the ids that end a hypothesis and of the ids that continue one."""
  ids = np.arange(size)
  return ids == EOS, (ids != PAD) & (ids != BOS) & (ids != EOS)


def broadcast_source_mask(mask: jax.Array | None, batch: int, size: int) -> jax.Array:
  """Returns a mask [batch, size], all True for None. Image models have masks [batch, 1].

  Args:
    mask: [batch, size] or [batch, 1] bool, True = real; None for all.
    batch: number of sources.
    size: number of source positions.
  """
  return jnp.broadcast_to(True if mask is None else mask, (batch, size))
