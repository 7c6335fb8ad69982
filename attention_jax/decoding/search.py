"""Greedy and beam search. They know only `step`; the carry is never opened, it is reordered with one tree.map.

`step(carry, token [B], memory) -> carry, (logits [B, vocabulary], weights [B, S])`, every leaf of carry with the batch
first. Shapes are static. Beams are a vmapped axis beside the batch, and the memory is shared by them. Nothing is copied
when beams are reordered but the carry: each step leaves its tokens, weights and parents behind, and the hypotheses are
read off by walking back from their ends.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking, length_penalty, ranking_scores
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD

IMPOSSIBLE_SCORE = -1e9  # finite, so that sums and length normalisation of it stay ordered
MIN_SOURCES = 32  # sources: fewer cost hardly less
BLOCK = 64  # tokens among which one maximum is taken


class Hypotheses(NamedTuple):
  """The best hypotheses of each source, best first.

  Attributes:
    tokens: [B, K, T] ids, EOS at the end and PAD after it.
    scores: [B, K] by which they are ranked, see Ranking; IMPOSSIBLE_SCORE where there are fewer than K hypotheses.
    log_probs: [B, K] natural log of the probability, EOS included.
    lengths: [B, K] tokens, EOS included.
    weights: [B, K, T, S] of every hypothesis, zero after its end.
  """

  tokens: jax.Array
  scores: jax.Array
  log_probs: jax.Array
  lengths: jax.Array
  weights: jax.Array


class Trail(NamedTuple):
  """What the steps leave behind; level t holds the beams before step t. All arrays [T, B, K, ...]."""

  tokens: jax.Array  # the token that led to this beam
  parents: jax.Array  # the beam of level t - 1 it came from
  weights: jax.Array  # the weights of its own step


class Ends(NamedTuple):
  """Finished hypotheses [B, K]: EOS was chosen at step `level` by beam `beam`."""

  scores: jax.Array
  log_probs: jax.Array
  level: jax.Array
  beam: jax.Array


class BeamState(NamedTuple):
  """What beams [B, K] go on from: the model's carry, their coverage [B, K, S], their log-probabilities, and what of
  their source has ended."""

  carry: Any
  coverage: jax.Array
  alive: jax.Array
  ends: Ends


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

  A hypothesis ends where EOS is among the K best continuations of its source: an end that would have fallen out of the
  beam as any other word is none. A source is done as soon as none of its beams can still beat its K finished
  hypotheses. At the last of `max_length` steps only EOS may be chosen, so that every hypothesis ends with one.

  With several groups it is the diverse search of Vijayakumar et al. 2018: groups of K / G beams take turns at every
  step, and a word costs `diversity` for each time that an earlier group has just taken it. Ends and scores know nothing
  of that.

  Args:
    step, carry, memory: of the model, for sources [B].
    beams: K, of all groups.
    max_length: T, EOS included.
    ranking: of the finished hypotheses.
    source_mask: [B, S] bool, True = real; by default everything is. Rows without any are filler rows, which nobody
      waits for.
    groups, diversity: G and λ of a diverse search.

  Raises: UserError for numbers that mean nothing.
  """
  if beams < 1 or max_length < 1:
    raise UserError(f'search: beams={beams} and max_length={max_length} must be at least 1')
  if groups < 1 or beams % groups or not 0 <= diversity < math.inf:
    possible = f'groups that divide beams={beams}, diversity of 0 or more'
    raise UserError(f'search: groups={groups}, diversity={diversity}; possible: {possible}')
  batch = jax.tree.leaves(carry)[0].shape[0]
  carry = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (batch, beams, *x.shape[1:])), carry)
  step = jax.vmap(step, in_axes=(1, 1, None), out_axes=1)
  token = jnp.full((batch, beams), BOS, jnp.int32)
  _, (logits, weights, *_) = jax.eval_shape(step, carry, token, memory)

  trail = Trail(
    jnp.full((max_length, batch, beams), BOS, jnp.int32),
    jnp.zeros((max_length, batch, beams), jnp.int32),
    jnp.zeros((max_length, *weights.shape), weights.dtype),
  )
  only_first = jnp.where(jnp.arange(beams) % (beams // groups) == 0, 0.0, IMPOSSIBLE_SCORE)
  alive = jnp.broadcast_to(only_first[None, :], (batch, beams))
  none = jnp.zeros((batch, beams), jnp.int32)
  ends = Ends(jnp.full((batch, beams), IMPOSSIBLE_SCORE), jnp.full((batch, beams), IMPOSSIBLE_SCORE), none, none)
  _, continues = ending_and_continuing(logits.shape[-1])
  source_mask = all_real(source_mask, batch, weights.shape[-1])

  def body(level, going, trail, given):
    carry, coverage, alive, ends = going
    memory, source_mask = given
    carry, (logits, weights, *_) = step(carry, trail.tokens[level], memory)
    logits = _padded(logits)
    mass = _log_mass(logits)
    coverage, eos_log_probs = coverage + weights, logits[..., EOS] - mass
    ended = alive + eos_log_probs
    alive, parents, tokens = _continue(alive - mass, logits, continues, groups, diversity)
    alive = jnp.maximum(alive, IMPOSSIBLE_SCORE)
    among = jnp.concatenate([_by_group(alive, groups), _by_group(ended, groups)], axis=-1)
    worst = jnp.repeat(jax.lax.top_k(among, beams // groups)[0][..., -1], beams // groups, axis=-1)
    ended = jnp.where((ended >= worst) | (level == max_length - 1), ended, IMPOSSIBLE_SCORE)
    scores = ranking_scores(ended, eos_log_probs, level + 1, coverage, source_mask, ranking)
    ends = _finish(ends, ended, scores, level, groups)
    carry, coverage = jax.tree.map(lambda x: _pick(x, parents), (carry, coverage))
    trail = Trail(
      trail.tokens.at[level + 1].set(tokens, mode='drop'),
      trail.parents.at[level + 1].set(parents, mode='drop'),
      trail.weights.at[level].set(weights),
    )
    return BeamState(carry, coverage, alive, ends), trail

  def waits(going, given):
    # Log-probabilities only fall, and the penalty divides by most at the greatest length. The rest has a say only when
    # a hypothesis ends: EOS gives at most 0 whatever its factor, coverage at most 0, so that nothing rises above hope.
    hope = going.alive.max(1) / length_penalty(max_length, ranking.alpha)
    return given[1].any(-1) & (hope > going.ends.scores.min(1))

  going = BeamState(carry, jnp.zeros(weights.shape, weights.dtype), alive, ends)
  ends, trail = shrinking_while_loop(
    body, waits, lambda going: going.ends, max_length, going, trail, (memory, source_mask)
  )
  best_first = jnp.argsort(-ends.scores, axis=1)
  return _read_off(trail, jax.tree.map(lambda x: jnp.take_along_axis(x, best_first, axis=1), ends))


def greedy(
  step: Callable,
  carry: Any,
  memory: Any,
  *,
  max_length: int,
  ranking: Ranking = DEFAULT_RANKING,
  source_mask: jax.Array | None = None,
) -> Hypotheses:
  """The most probable token at every step, until EOS: K = 1 hypothesis. Arguments and scores as those of `beam`."""

  def of_one(carry, token, memory):
    carry, (logits, weights, *_) = step(carry, token[:, 0], memory)
    return carry, (logits[:, None], weights[:, None])

  def pick(logits, level, _):
    return greedy_token(logits, level == max_length - 1)

  return unroll(
    of_one, carry, memory, pick, (), hypotheses=1, max_length=max_length, ranking=ranking, source_mask=source_mask
  )


def unroll(
  step: Callable,
  carry: Any,
  memory: Any,
  pick: Callable,
  noise: Any,
  *,
  hypotheses: int,
  max_length: int,
  ranking: Ranking,
  source_mask: jax.Array | None,
) -> Hypotheses:
  """K hypotheses of each source, none of which knows of the others, until each has its EOS.

  Args:
    step: as everywhere, for tokens [B, K], with a carry of any shape.
    pick: (logits [B, K, vocabulary], level, noise) -> the next token [B, K]; EOS at the last level.
    noise: leaves [B, ...], what pick needs of each source.
    hypotheses: K.
  The others are those of `beam`.
  """
  batch = jax.tree.leaves(carry)[0].shape[0]
  token = jnp.full((batch, hypotheses), BOS, jnp.int32)
  _, (_, weights, *_) = jax.eval_shape(step, carry, token, memory)
  source_mask = all_real(source_mask, batch, weights.shape[-1])

  def body(level, going, trail, given):
    (carry, token, done, total, last), (tokens, history), (memory, noise) = going, trail, given
    carry, (logits, weights, *_) = step(carry, token, memory)
    token = pick(logits, level, noise)
    log_prob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - _log_mass(logits)
    token, last = jnp.where(done, PAD, token), jnp.where(done, last, log_prob)
    total = total + jnp.where(done, 0.0, last)
    weights = jnp.where(done[..., None], 0.0, weights)
    going = carry, token, done | (token == EOS), total, last
    return going, (tokens.at[level].set(token), history.at[level].set(weights))

  nothing = jnp.zeros((batch, hypotheses))
  filler = jnp.broadcast_to(~source_mask.any(-1)[:, None], nothing.shape)
  going = carry, token, filler, nothing, nothing
  trail = jnp.full((max_length, *nothing.shape), PAD, jnp.int32), jnp.zeros((max_length, *weights.shape), weights.dtype)
  # The last token is EOS: nothing else is allowed at the end.
  (total, eos_log_probs), (tokens, history) = shrinking_while_loop(
    body, lambda going, _: ~going[2].all(-1), lambda going: going[3:], max_length, going, trail, (memory, noise)
  )
  tokens, history = jnp.moveaxis(tokens, 0, -1), jnp.moveaxis(history, 0, -2)
  lengths = jnp.sum(tokens != PAD, axis=-1)
  scores = ranking_scores(total, eos_log_probs, lengths, history.sum(2), source_mask, ranking)
  return Hypotheses(tokens, scores, total, lengths, history)


def shrinking_while_loop(
  body: Callable,
  waits: Callable,
  kept: Callable,
  steps: int,
  going: Any,
  trail: Any,
  given: Any,
  level: int | jax.Array = 0,
) -> tuple[Any, Any]:
  """body(level, going, trail, given) -> going, trail, until no source waits or all steps are made.

  Sources that are done stop costing: whenever half of them are, the others go on by themselves, down to MIN_SOURCES.

  Args:
    waits: (going, given) -> [B], which sources are not done.
    kept: going -> what of it is wanted.
    going, given: leaves [B, ...], with what changes from step to step and what does not.
    trail: leaves [T, B, ...]; a step writes its level, and the first of them is `level`.
  Returns: what is kept, and the trail, of all sources.
  """
  size = jax.tree.leaves(trail)[0].shape[1]
  fewer = size // 2 if size >= 2 * MIN_SOURCES else 0

  def on(loop):
    level, going, _ = loop
    return (level < steps) & (jnp.sum(waits(going, given)) > fewer)

  def one(loop):
    level, going, trail = loop
    return level + 1, *body(level, going, trail, given)

  level, going, trail = jax.lax.while_loop(on, one, (jnp.asarray(level), going, trail))
  if not fewer:
    return kept(going), trail
  rest = jnp.argsort(~waits(going, given))[:fewer]  # stable: those that wait come first
  those = jax.tree.map(lambda x: x[rest], (going, given))
  seen = jax.tree.map(lambda x: x[:, rest], trail)
  found, seen = shrinking_while_loop(body, waits, kept, steps, those[0], seen, those[1], level)
  whole = jax.tree.map(lambda x, new: x.at[rest].set(new), kept(going), found)
  return whole, jax.tree.map(lambda x, new: x.at[:, rest].set(new), trail, seen)


def greedy_token(logits: jax.Array, last: jax.Array | bool) -> jax.Array:
  """logits [..., vocabulary] -> the most probable token [...] of those that may come; at the last step EOS."""
  ends, continues = ending_and_continuing(logits.shape[-1])
  return jnp.where(last, EOS, masked_top_k(logits, continues | ends, 1)[1][..., 0])


def _padded(logits: jax.Array) -> jax.Array:
  """logits [..., V], and -inf behind them up to a multiple of BLOCK.

  On CPUs each pass over the logits of a step costs as much as a layer. They are copied once, into this, and read twice:
  for the maxima of blocks, from which all else is found, and for the sum of exponentials.
  """
  missing = -logits.shape[-1] % BLOCK
  return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def _tops(padded: jax.Array) -> jax.Array:
  return padded.reshape(*padded.shape[:-1], -1, BLOCK).max(-1)


def _log_mass(logits: jax.Array) -> jax.Array:
  """log Σ exp of logits [..., V]."""
  padded = _padded(logits)
  top = _tops(padded).max(-1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, 0.0)  # where nothing can be said it is -inf, not NaN
  return jnp.log(jnp.exp(padded - top).sum(-1)) + top[..., 0]


def masked_top_k(logits: jax.Array, allowed: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` largest (or all, if there are fewer) of logits [..., V] where allowed [V], first of equals first.

  Only blocks with the largest maxima can hold them, so that one pass of maxima takes the place of a sort. A block whose
  maximum is not allowed may hold none of them: as many more are looked into as there are blocks with such ids.
  Returns: values [..., count], -inf where nothing is left, and indices.
  """
  padded, size = _padded(logits), len(allowed)
  tops = _tops(padded)
  doubtful = len(set(np.flatnonzero(~allowed) // BLOCK))
  _, which = jax.lax.top_k(tops, min(count + doubtful, tops.shape[-1]))
  which = jnp.sort(which, axis=-1)  # so that the first of equals stays the first
  inside = jnp.arange(BLOCK).reshape((1,) * logits.ndim + (BLOCK,))
  ids = (which[..., None] * BLOCK + inside).reshape(*which.shape[:-1], -1)
  allowed = jnp.asarray(np.pad(allowed, (0, padded.shape[-1] - size)))
  near = jnp.where(allowed[ids], jnp.take_along_axis(padded, ids, axis=-1), -jnp.inf)
  values, at = jax.lax.top_k(near, min(count, size))
  return values, jnp.take_along_axis(ids, at, axis=-1).astype(jnp.int32)


def all_real(given: jax.Array | None, batch: int, size: int) -> jax.Array:
  """A mask [batch, size]; one of [batch, 1], as pictures have it, holds for every position."""
  return jnp.broadcast_to(True if given is None else given, (batch, size))


def ending_and_continuing(size: int) -> tuple[np.ndarray, np.ndarray]:
  """[vocabulary] masks of what may end a hypothesis, and of what may continue one."""
  ids = np.arange(size)
  return ids == EOS, (ids != PAD) & (ids != BOS) & (ids != EOS)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
  """[B, K, ...] -> [B, G, K / G, ...]."""
  return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _continue(
  before: jax.Array, logits: jax.Array, allowed: np.ndarray, groups: int, diversity: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """As `_best`, by groups of beams, one after the other: words that earlier groups took cost `diversity` each time."""
  found, taken, size = [], 0.0, before.shape[1] // groups
  for group in range(groups):
    own = slice(group * size, (group + 1) * size)
    total, parents, tokens = _best(before[:, own], logits[:, own] - taken, allowed)
    if group:
      total = total + jnp.take_along_axis(taken[:, 0], tokens, axis=1)
    if group < groups - 1:
      cost = jax.nn.one_hot(tokens, logits.shape[-1], dtype=logits.dtype).sum(1, keepdims=True)
      taken = taken + diversity * cost
    found.append((total, parents + group * size, tokens))
  return tuple(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))


def _best(before: jax.Array, logits: jax.Array, allowed: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
  """before [B, K], to which logits [B, K, V] add -> the K best of each source: totals, beams they come from, tokens."""
  # First within each beam, then among those: the second sort is over K * K instead of K * V.
  beams = before.shape[-1]
  within, tokens = masked_top_k(logits, allowed, beams)
  within = before[..., None] + within
  flat = within.reshape(within.shape[0], -1)
  best, index = jax.lax.top_k(flat, beams)
  tokens = jnp.take_along_axis(tokens.reshape(flat.shape), index, axis=1)
  return best, index // within.shape[-1], tokens.astype(jnp.int32)


def _finish(ends: Ends, log_probs: jax.Array, scores: jax.Array, level: jax.Array, groups: int) -> Ends:
  """The K best of the finished hypotheses and of those [B, K] that end now: of each group, its own."""
  # A beam that does not exist must not climb above IMPOSSIBLE_SCORE by its length.
  scores = jnp.where(log_probs > IMPOSSIBLE_SCORE / 2, scores, IMPOSSIBLE_SCORE)
  here = jnp.broadcast_to(jnp.arange(scores.shape[1])[None, :], scores.shape)
  new = Ends(scores, log_probs, jnp.full_like(here, level), here)
  both = jax.tree.map(lambda *x: jnp.concatenate([_by_group(part, groups) for part in x], axis=-1), ends, new)
  _, index = jax.lax.top_k(both.scores, scores.shape[1] // groups)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=-1).reshape(scores.shape), both)


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
  """x [B, K, ...] at index [B, K]."""
  return jax.vmap(lambda x, index: x[index])(x, index)


def _read_off(trail: Trail, ends: Ends) -> Hypotheses:
  """Walks back from the ends [B, K] over the levels, last first."""
  steps = trail.tokens.shape[0]

  def back(beam, xs):
    level, (tokens, parents, weights) = xs
    inside = level <= ends.level
    at = jnp.where(inside, beam, 0)
    here = jax.tree.map(lambda x: _pick(x, at), (tokens, parents, weights))
    # The token that led to level t stands at position t - 1; position `ends.level` is EOS.
    before = jnp.where(inside, here[0], PAD)
    weights = jnp.where(inside[..., None], here[2], 0.0)
    return jnp.where(inside, here[1], beam), (before, weights)

  _, (before, weights) = jax.lax.scan(back, ends.beam, (jnp.arange(steps), trail), reverse=True)
  tokens = jnp.concatenate([before[1:], jnp.full_like(before[:1], PAD)])
  position = jnp.arange(steps)[:, None, None]
  tokens = jnp.where(position == ends.level[None], EOS, tokens)
  found = ends.scores > IMPOSSIBLE_SCORE
  tokens = jnp.where(found[None], tokens, PAD)
  weights = jnp.where(found[None, ..., None], weights, 0.0)
  lengths = jnp.where(found, ends.level + 1, 0)
  return Hypotheses(jnp.moveaxis(tokens, 0, 2), ends.scores, ends.log_probs, lengths, jnp.moveaxis(weights, 0, 2))
