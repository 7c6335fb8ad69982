"""Greedy and beam search over the step of a model, see generate.py.

Beams are a vmapped axis, and all beams of a source share its memory. The carry and the logits have the beams first, as
vmap computes them; with the sources first, every step would copy them into the other order. Reordering beams copies
only the carry and the coverage: each step records its tokens, weights and parents, and after the last step the
hypotheses are reconstructed by following the parents backwards.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding.generate import (
  IMPOSSIBLE_SCORE,
  Hypotheses,
  batch_size,
  broadcast_source_mask,
  end_and_continuation_masks,
  generate,
)
from attention_jax.decoding.loop import select_sources, shrinking_while_loop
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking, ranking_scores
from attention_jax.decoding.top_k import log_sum_exp, masked_top_k, pad_to_blocks
from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32
from attention_jax.tokens import BOS, EOS, PAD


class BeamHistory(NamedTuple):
  """Record of the steps: level t holds the beams before step t.

  Attributes:
    tokens: [T, B, K] last token of each beam.
    parents: [T, B, K] the beam of level t - 1 that each beam continues.
    weights: [T, B, K, S] weights of step t.
  """

  tokens: jax.Array
  parents: jax.Array
  weights: jax.Array


class Finished(NamedTuple):
  """Finished hypotheses, all fields [B, K]: beam `beam` emitted EOS at step `step`."""

  scores: jax.Array
  log_probs: jax.Array
  step: jax.Array
  beam: jax.Array


class BeamState(NamedTuple):
  """Live beams and finished hypotheses.

  Attributes:
    carry: carry of the model, leaves [K, B, ...].
    coverage: [B, K, S] weights of the live beams, summed over the steps.
    log_probs: [B, K] log-probabilities of the live beams.
    finished: the best finished hypotheses so far.
  """

  carry: Any
  coverage: jax.Array
  log_probs: jax.Array
  finished: Finished


def beam(
  step: Callable,
  carry: Any,
  memory: Any,
  *,
  beams: int,
  max_length: int,
  ranking: Ranking = DEFAULT_RANKING,
  source_mask: jax.Array | None = None,
  groups: int = 1,
  diversity: float = 0.5,
) -> Hypotheses:
  """Beam search with the length normalisation and the coverage penalty of Wu et al. 2016.

  A hypothesis ends where EOS is among the K best continuations of its source (with several groups: the K / G best of
  its group); an EOS outside them is dropped like any other token. A source is finished as soon as none of its live
  beams can still beat the worst of its K finished hypotheses. The last of `max_length` steps allows EOS alone, so that
  every hypothesis ends with EOS.

  With several groups this is the diverse beam search of Vijayakumar et al. 2018: at every step the groups of K / G
  beams are continued one after the other, and a token costs `diversity` for each time that an earlier group has chosen
  it in this step. The cost affects neither EOS nor the scores.

  Args:
    step: the step of the model.
    carry: the initial carry of the model, leaves [B, ...].
    memory: the memory of the model, leaves [B, ...].
    beams: K, the number of beams of all groups together.
    max_length: T, EOS included.
    ranking: the ranking of the finished hypotheses.
    source_mask: [B, S] bool, True = real; by default every position is. Rows without any real position are filler
      rows, which never prolong the search; their results have no meaning.
    groups: G, the number of groups.
    diversity: λ, the cost of a repeated token.

  Raises:
    UserError: if an option is out of range, or `groups` does not divide `beams`.
  """
  _check_beam_options(beams, max_length, groups, diversity)
  batch = batch_size(carry, memory)
  carry = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (beams, *x.shape)), carry)
  step = _over_beams(step)
  token = jnp.full((batch, beams), BOS, jnp.int32)
  _, logits, weights = jax.eval_shape(step, carry, token, memory)

  history = BeamHistory(
    jnp.full((max_length, batch, beams), BOS, jnp.int32),
    jnp.zeros((max_length, batch, beams), jnp.int32),
    jnp.zeros((max_length, *weights.shape), weights.dtype),
  )
  # All beams of a group are equal before the first step, so only the first one is continued.
  is_first = jnp.arange(beams) % (beams // groups) == 0
  log_probs = jnp.broadcast_to(jnp.where(is_first, 0.0, IMPOSSIBLE_SCORE)[None, :], (batch, beams))
  zeros = jnp.zeros((batch, beams), jnp.int32)
  impossible = jnp.full((batch, beams), IMPOSSIBLE_SCORE)
  finished = Finished(impossible, impossible, zeros, zeros)
  _, continues = end_and_continuation_masks(logits.shape[-1])
  source_mask = broadcast_source_mask(source_mask, batch, weights.shape[-1])

  def body(step_index, state, history, inputs):
    memory, source_mask = inputs
    carry, logits, weights = step(state.carry, history.tokens[step_index], memory)
    logits = pad_to_blocks(logits)
    log_normalizer = log_sum_exp(logits).T
    coverage = state.coverage + weights
    eos_log_probs = logits[..., EOS].T - log_normalizer
    log_probs_with_eos = state.log_probs + eos_log_probs
    log_probs, parents, tokens = _continue_groups(
      state.log_probs - log_normalizer, logits, continues, groups, diversity
    )
    log_probs = jnp.maximum(log_probs, IMPOSSIBLE_SCORE)
    threshold = _group_threshold(log_probs, log_probs_with_eos, groups)
    is_ending = (log_probs_with_eos >= threshold) | (step_index == max_length - 1)
    ended_log_probs = jnp.where(is_ending, log_probs_with_eos, IMPOSSIBLE_SCORE)
    scores = ranking_scores(ended_log_probs, eos_log_probs, step_index + 1, coverage, source_mask, ranking)
    finished = _update_finished(state.finished, ended_log_probs, scores, step_index, groups)
    carry = _take_carry_beams(carry, parents)
    coverage = _take_beams(coverage, parents)
    history = BeamHistory(
      history.tokens.at[step_index + 1].set(tokens, mode='drop'),
      history.parents.at[step_index + 1].set(parents, mode='drop'),
      history.weights.at[step_index].set(weights),
    )
    return BeamState(carry, coverage, log_probs, finished), history

  def is_active(state, inputs):
    # Log-probabilities only fall, and the length penalty is largest at the greatest length. The terms of EOS and of
    # coverage are at most 0. Hence no live beam can end with a score above this bound.
    bound = state.log_probs.max(1) / ranking.normalizer(max_length)
    _, source_mask = inputs
    return source_mask.any(-1) & (bound > state.finished.scores.min(1))

  coverage = at_least_float32(jnp.zeros(weights.shape, weights.dtype))
  state = BeamState(carry, coverage, log_probs, finished)
  finished, history = shrinking_while_loop(
    body,
    is_active,
    lambda state: state.finished,
    max_length,
    state,
    history,
    (memory, source_mask),
    select_state=_select_state,
  )
  order = jnp.argsort(-finished.scores, axis=1)
  return _backtrack(history, jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), finished))


def greedy(
  step: Callable,
  carry: Any,
  memory: Any,
  *,
  max_length: int,
  ranking: Ranking = DEFAULT_RANKING,
  source_mask: jax.Array | None = None,
) -> Hypotheses:
  """Greedy search: the most probable token at every step, until EOS.

  The arguments are those of `beam`, and the one hypothesis of each source (K = 1) is scored as there.

  Raises:
    UserError: if `max_length` is less than 1.
  """
  _check_beam_options(1, max_length, 1, 0.0)

  def step_one_beam(carry, token, memory):
    carry, (logits, weights, *_) = step(carry, token[:, 0], memory)
    return carry, (logits[:, None], weights[:, None])

  def choose_token(logits, step_index, _):
    return greedy_token(logits, step_index == max_length - 1)

  return generate(
    step_one_beam,
    carry,
    memory,
    choose_token,
    (),
    hypotheses=1,
    max_length=max_length,
    ranking=ranking,
    source_mask=source_mask,
  )


def greedy_token(logits: jax.Array, is_last: jax.Array | bool) -> jax.Array:
  """Returns the most probable token other than PAD and BOS, or EOS if `is_last`: logits [..., V] -> tokens [...]."""
  ends, continues = end_and_continuation_masks(logits.shape[-1])
  return jnp.where(is_last, EOS, masked_top_k(logits, continues | ends, 1)[1][..., 0])


def _check_beam_options(beams: int, max_length: int, groups: int, diversity: float) -> None:
  for name, value in (('beams', beams), ('max_length', max_length)):
    if value < 1:
      raise UserError(f'search: {name} must be at least 1, got {value}')
  if groups < 1 or beams % groups:
    raise UserError(f'search: groups must be at least 1 and divide beams={beams}, got groups={groups}')
  if not 0 <= diversity < math.inf:
    raise UserError(f'search: diversity must be at least 0 and finite, got {diversity}')


def _over_beams(step: Callable) -> Callable:
  """Maps a step over beams: carry [K, B, ...], token [B, K], memory -> carry, logits [K, B, V], weights [B, K, S]."""

  def step_one_beam(carry, token, memory):
    carry, (logits, weights, *_) = step(carry, token, memory)
    return carry, logits, weights

  return jax.vmap(step_one_beam, in_axes=(0, 1, None), out_axes=(0, 0, 1))


def _by_group(x: jax.Array, groups: int) -> jax.Array:
  """Splits the beams into groups: [B, K, ...] -> [B, G, K / G, ...]."""
  return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _continue_groups(
  log_probs: jax.Array, logits: jax.Array, allowed: np.ndarray, groups: int, diversity: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`_continue_beams` for one group after the other; a token that earlier groups chose costs `diversity` each time."""
  results = []
  penalty = 0.0
  size = log_probs.shape[1] // groups
  for group in range(groups):
    beams = slice(group * size, (group + 1) * size)
    totals, parents, tokens = _continue_beams(log_probs[:, beams], logits[beams] - penalty, allowed)
    if group > 0:
      totals = totals + jnp.take_along_axis(penalty[0], tokens, axis=1)
    if group < groups - 1:
      counts = jax.nn.one_hot(tokens, logits.shape[-1], dtype=logits.dtype).sum(1)
      penalty = penalty + diversity * counts[None]
    results.append((totals, parents + group * size, tokens))
  return tuple(jnp.concatenate(parts, axis=1) for parts in zip(*results, strict=True))


def _continue_beams(
  log_probs: jax.Array, logits: jax.Array, allowed: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The K best sums of log_probs [B, K] and allowed logits [K, B, V]: sums, parent beams and tokens, all [B, K]."""
  # Selects the K best tokens of each beam first, so that the second top_k is over K * K entries instead of K * V.
  beams = log_probs.shape[-1]
  best_logits, tokens = (jnp.swapaxes(x, 0, 1) for x in masked_top_k(logits, allowed, beams))
  sums = log_probs[..., None] + best_logits
  flat = sums.reshape(sums.shape[0], -1)
  best, index = jax.lax.top_k(flat, beams)
  tokens = jnp.take_along_axis(tokens.reshape(flat.shape), index, axis=1)
  return best, index // sums.shape[-1], tokens.astype(jnp.int32)


def _group_threshold(log_probs: jax.Array, log_probs_with_eos: jax.Array, groups: int) -> jax.Array:
  """Returns for each beam, [B, K], the (K / G)-th best log-probability among all continuations of its group.

  Args:
    log_probs: [B, K] log-probabilities of the best continuations of each group without EOS.
    log_probs_with_eos: [B, K] log-probabilities of the beams if EOS follows.
    groups: G, the number of groups.
  """
  candidates = jnp.concatenate([_by_group(log_probs, groups), _by_group(log_probs_with_eos, groups)], axis=-1)
  size = log_probs.shape[1] // groups
  return jnp.repeat(jax.lax.top_k(candidates, size)[0][..., -1], size, axis=-1)


def _update_finished(
  finished: Finished, log_probs: jax.Array, scores: jax.Array, step_index: jax.Array, groups: int
) -> Finished:
  """The K / G best hypotheses of each group, among those already finished and its beams that end at this step."""
  # Resets hypotheses that do not exist: the division by the length penalty has raised their scores.
  scores = jnp.where(log_probs > IMPOSSIBLE_SCORE / 2, scores, IMPOSSIBLE_SCORE)
  beams = jnp.broadcast_to(jnp.arange(scores.shape[1])[None, :], scores.shape)
  new = Finished(scores, log_probs, jnp.full_like(beams, step_index), beams)
  candidates = jax.tree.map(lambda *x: jnp.concatenate([_by_group(part, groups) for part in x], axis=-1), finished, new)
  _, index = jax.lax.top_k(candidates.scores, scores.shape[1] // groups)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=-1).reshape(scores.shape), candidates)


def _take_beams(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the beams `index` [B, K] of x [B, K, ...]."""
  return jax.vmap(lambda x, index: x[index])(x, index)


def _take_carry_beams(carry: Any, index: jax.Array) -> Any:
  """The leaves [K, B, ...] of a carry at the beams `index` [B, K]."""
  sources = jnp.arange(index.shape[0])[None]
  return jax.tree.map(lambda x: x[index.T, sources], carry)


def _select_state(state: BeamState, rows: jax.Array) -> BeamState:
  """The state of the sources `rows`."""
  carry = jax.tree.map(lambda x: x[:, rows], state.carry)
  return select_sources(state._replace(carry=()), rows)._replace(carry=carry)


def _backtrack(history: BeamHistory, finished: Finished) -> Hypotheses:
  """Reads the finished hypotheses [B, K] off the history, from the last level to the first."""
  steps = history.tokens.shape[0]

  def previous_level(beam, xs):
    level, (tokens, parents, weights) = xs
    is_inside = level <= finished.step
    index = jnp.where(is_inside, beam, 0)
    token, parent, weight = jax.tree.map(lambda x: _take_beams(x, index), (tokens, parents, weights))
    token = jnp.where(is_inside, token, PAD)
    weight = jnp.where(is_inside[..., None], weight, 0.0)
    return jnp.where(is_inside, parent, beam), (token, weight)

  _, (tokens, weights) = jax.lax.scan(previous_level, finished.beam, (jnp.arange(steps), history), reverse=True)
  # The token of level t is at position t - 1, and EOS at position `finished.step`.
  tokens = jnp.concatenate([tokens[1:], jnp.full_like(tokens[:1], PAD)])
  positions = jnp.arange(steps)[:, None, None]
  tokens = jnp.where(positions == finished.step[None], EOS, tokens)
  exists = finished.scores > IMPOSSIBLE_SCORE
  tokens = jnp.where(exists[None], tokens, PAD)
  weights = jnp.where(exists[None, ..., None], weights, 0.0)
  lengths = jnp.where(exists, finished.step + 1, 0)
  return Hypotheses(
    jnp.moveaxis(tokens, 0, 2), finished.scores, finished.log_probs, lengths, jnp.moveaxis(weights, 0, 2)
  )
