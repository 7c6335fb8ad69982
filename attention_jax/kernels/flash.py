"""Implementation 'flash': products q · k with softmax, block by block (Dao et al. 2022, algorithms 1, 2 and 4).

The weights are never in memory, in value or gradient: a block of them is made from its queries and keys, used and
forgotten, and made again where the gradient asks for it. For that the greatest score of each query and the sum of its
exponentials are saved, and not the log of that sum, which beside a large score rounds to the score. Blocks that no
query may look into are left out, up to half of them under a causal mask, and only those partly hidden read the mask.

Blocks stand as [keys, queries]. Maxima and sums then run along the first axis, which compilers vectorise, and every
product has its operands in the order that CPUs multiply fastest. Sequences of a batch and heads follow one another: the
working set is that of one, and each of its products is large enough for all cores.

Weights, where asked for, are made by the formula, [T, S], beside it. Dropout multiplies them by factors [T, S] that are
drawn before, the same as the definition draws: with it memory grows with T S. Derivatives of the gradient are not
offered.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from attention_jax.functional.attend import Attended, Memory, score_terms, zero_masked_memory
from attention_jax.functional.dense import softmax, softmax_temperature, strip_options
from attention_jax.functional.dropout import differs_at_test, dropout_factors, strip_dropout
from attention_jax.functional.masking import accumulation_dtype, min_finite, vary_like, zero_masked
from attention_jax.functional.table import Product, Row
from attention_jax.kernels.sharding import shard_over_rows

BLOCK = 512  # queries, and keys, of a block: 1 MB of scores in float32


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed so; '' if it can."""
  if not isinstance(score.form, Product):
    return 'the score is not a product q . k with q of the query and k of the key alone'
  if strip_options(strip_dropout(alignment)) is not softmax or differs_at_test(alignment):
    return 'the alignment is not softmax'
  return ''


def attend(
  score: Row,
  alignment: Row,
  params,
  query,
  memory: Memory,
  *,
  bias=None,
  rng=None,
  deterministic=True,
  return_weights=True,
) -> Attended:
  """As functional.attend."""
  q, k, v, mask, bias = operands(score, alignment, params, query, memory, bias)
  factors = None if deterministic else dropout_factors(alignment, rng, q.shape[0], k.shape[0])
  factors = None if factors is None else factors.astype(q.dtype)
  context = attention_context(q, k, v, mask, bias, factors).astype(memory.value.dtype)
  if not return_weights:
    return Attended(context, None)
  weights = softmax_weights(q, k, mask, bias)
  return Attended(context, weights if factors is None else weights * factors)


def operands(score: Row, alignment: Row, params, query, memory: Memory, bias) -> tuple[jax.Array, ...]:
  """What a pair that is not refused comes down to: q, k, v, mask [T, S] or [1, S], bias [T, S] or None.

  The alignment's temperature is in q and the bias, infinite biases are in the mask, and nothing hidden is left. All
  are of the type in which sums are made.
  """
  memory = zero_masked_memory(memory)
  q, k = score_terms(score.form.fn, params, query, memory)
  dtype = accumulation_dtype(q, k, memory.value)
  scale = 1 / jnp.asarray(softmax_temperature(strip_dropout(alignment)), dtype)
  mask = memory.mask if memory.mask.ndim == 2 else memory.mask[None]
  if bias is not None:
    mask = mask & ~jnp.isneginf(bias)
    bias = zero_masked(bias, mask).astype(dtype) * scale
  return q.astype(dtype) * scale, k.astype(dtype), memory.value.astype(dtype), mask, bias


def softmax_weights(q, k, mask, bias) -> jax.Array:
  """The weights [T, S] of what `operands` gives, by the formula."""
  scores = q @ k.T if bias is None else q @ k.T + bias
  return jax.vmap(softmax)(scores, jnp.broadcast_to(mask, scores.shape))


@jax.custom_vjp
def attention_context(q, k, v, mask, bias, factors) -> jax.Array:
  """(factors · softmax(q kᵀ + bias)) v [T, V] over what the mask shows, 0 where it shows nothing.

  Args: q [T, D], k [S, D], v [S, V] of one floating type; mask [T, S] or, for all queries, [1, S]; bias [T, S] or None;
    factors of dropout [T, S] or None, without a gradient.
  """
  return _forward(q, k, v, Shared.of(mask, bias, factors, (q.shape[0], k.shape[0])))[0]


def _saved(q, k, v, mask, bias, factors):
  shared = Shared.of(mask, bias, factors, (q.shape[0], k.shape[0]))
  context, top, share = _forward(q, k, v, shared)
  return context, (q, k, v, shared, context, top, share)


def _gradients(saved, slope):
  steps, size, shared = saved[0].shape[0], saved[1].shape[0], saved[3]
  dq, dk, dv, dbias = _backward(*saved, slope)
  dbias = None if dbias is None else dbias[:size, :steps].T
  dfactors = None if shared.factors is None else jnp.zeros((steps, size), shared.factors.dtype)
  return dq, dk, dv, None, dbias, dfactors


attention_context.defvjp(_saved, _gradients)


class Blocks(NamedTuple):
  """How T queries and S keys are cut: so many blocks of so many rows, as even as can be."""

  queries: int
  rows: int
  keys: int
  columns: int

  @classmethod
  def of(cls, steps: int, size: int) -> 'Blocks':
    def even(n):
      blocks = max(1, -(-n // BLOCK))
      return blocks, -(-n // blocks)

    return cls(*even(steps), *even(size))

  def by_query(self, x: jax.Array) -> jax.Array:
    """[T, ...] -> [blocks, rows, ...], filled up with zeros."""
    return _cut(x, self.queries, self.rows)

  def by_key(self, x: jax.Array) -> jax.Array:
    return _cut(x, self.keys, self.columns)

  def pad(self, x: jax.Array) -> jax.Array:
    """[T or 1, S], filled up with zeros or False."""
    rows = 0 if x.shape[0] == 1 else self.queries * self.rows - x.shape[0]
    return jnp.pad(x, ((0, rows), (0, self.keys * self.columns - x.shape[1])))

  def at(self, x: jax.Array, i, j) -> jax.Array:
    """Block (i, j) of what `pad` gave, turned: x [S, T or 1] -> [columns, rows or 1]."""
    rows, first = (1, 0) if x.shape[1] == 1 else (self.rows, i * self.rows)
    return jax.lax.dynamic_slice(x, (j * self.columns, first), (self.columns, rows))

  def classify_blocks(self, shown: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[blocks of queries, of keys] bool: where something is shown, and where nothing is hidden."""
    rows = shown.reshape(1 if shown.shape[0] == 1 else self.queries, -1, shown.shape[1])
    by_key = lambda x: x.reshape(x.shape[0], self.keys, -1)
    kinds = by_key(rows.any(1)).any(-1), by_key(rows.all(1)).all(-1)
    return tuple(jnp.broadcast_to(kind, (self.queries, self.keys)) for kind in kinds)


class Shared(NamedTuple):
  """What the sequences of a batch may have in common: made once for all of them, as blocks are multiplied.

  Attributes:
    shown, bias, factors: of `attention_context`, turned and filled up, see Blocks.pad.
    live, full: [blocks of queries, of keys] bool, see Blocks.classify_blocks.
  """

  shown: jax.Array
  bias: jax.Array | None
  factors: jax.Array | None
  live: jax.Array
  full: jax.Array

  @classmethod
  def of(cls, mask, bias, factors, sizes: tuple[int, int]) -> 'Shared':
    """Args: sizes, T and S."""
    cut = Blocks.of(*sizes)
    whole = [None if x is None else cut.pad(x) for x in (mask, bias, factors)]
    return cls(*(None if x is None else x.T for x in whole), *cut.classify_blocks(whole[0]))

  def left(self, cut: Blocks, block: jax.Array, i, j) -> jax.Array:
    """What dropout leaves of block (i, j) of the weights."""
    return block if self.factors is None else block * cut.at(self.factors, i, j)


def _cut(x: jax.Array, blocks: int, rows: int) -> jax.Array:
  x = jnp.pad(x, ((0, blocks * rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
  return x.reshape(blocks, rows, *x.shape[1:])


def _block_order(live: jax.Array, full: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Of each row of blocks: the full ones, then the other live ones, then the rest; how many of the first, of both."""
  rank = jnp.where(full, 0, jnp.where(live, 1, 2))
  return jnp.argsort(rank, axis=1), full.sum(1), live.sum(1)


def _walk(step: Callable, order, full, live, carry):
  """step(masked, block, carry) over the live blocks of a row."""
  one = lambda hidden: lambda n, carry: step(hidden, order[n], carry)
  carry = jax.lax.fori_loop(0, full, one(False), carry)
  return jax.lax.fori_loop(full, live, one(True), carry)


@shard_over_rows
@sequential_vmap
def _forward(q, k, v, shared: Shared):
  """The context [T, V]; of each query [T] the greatest score, and what an exponential beside that weighs."""
  (steps, _), (size, width) = q.shape, v.shape
  cut = Blocks.of(steps, size)
  keys, values = cut.by_key(k), cut.by_key(v).swapaxes(1, 2)

  def row(xs):
    i, query, order, full, live = xs

    def step(hidden, j, carry):
      top, total, context = carry
      scores = _scores(keys[j], query, cut, shared, hidden, i, j)
      highest = jnp.maximum(top, scores.max(0, keepdims=True))
      weights, before = jnp.exp(scores - highest), jnp.exp(top - highest)
      total = total * before + weights.sum(0, keepdims=True)
      return highest, total, context * before + values[j] @ shared.left(cut, weights, i, j)

    zeros = lambda size: jnp.zeros((size, cut.rows), q.dtype)
    start = vary_like((zeros(1) + min_finite(q.dtype), zeros(1), zeros(width)), q, k, v, *shared)
    top, total, context = _walk(step, order, full, live, start)
    some = total != 0  # also for NaN, which shows in the whole row, as it does in the definition
    share = jnp.where(some, 1 / jnp.where(some, total, 1.0), 0.0)
    return (context * share).T, top[0], share[0]

  order = _block_order(shared.live, shared.full)
  context, *sums = jax.lax.map(row, (jnp.arange(cut.queries), cut.by_query(q), *order))
  return context.reshape(-1, width)[:steps], *(x.reshape(-1)[:steps] for x in sums)


@shard_over_rows
@sequential_vmap
def _backward(q, k, v, shared: Shared, context, top, share, slope):
  """The gradients of q, k, v and, as it stands in `shared`, bias."""
  (steps, features), (size, width) = q.shape, v.shape
  cut = Blocks.of(steps, size)
  slope = slope * share[:, None]  # with it, exponentials stand for weights
  queries, slopes, tops = cut.by_query(q), cut.by_query(slope), cut.by_query(top)
  common = cut.by_query((slope * context).sum(1))
  keys = cut.by_key(k)
  vary = lambda start: vary_like(start, q, k, v, *shared, slope)

  def column(carry, xs):
    j, key, key_t, value, order, full, live = xs

    def step(hidden, i, carry):
      (dq, dbias), dk, dv = carry
      # Above the greatest one by rounding alone, which of large scores is much.
      beside = jnp.minimum(_scores(key, queries[i], cut, shared, hidden, i, j) - tops[i][None], 0.0)
      powers = jnp.exp(beside)
      dscores = powers * (shared.left(cut, value @ slopes[i].T, i, j) - common[i][None])
      if dbias is not None:
        dbias = jax.lax.dynamic_update_slice(dbias, dscores, (j * cut.columns, i * cut.rows))
      dq, dv = dq.at[i].add(key_t @ dscores), dv + shared.left(cut, powers, i, j) @ slopes[i]
      return (dq, dbias), dk + dscores @ queries[i], dv

    start = jnp.zeros((cut.columns, features), q.dtype), jnp.zeros((cut.columns, width), q.dtype)
    carry, dk, dv = _walk(step, order, full, live, (carry, *vary(start)))
    return carry, (dk, dv)

  no_bias = None if shared.bias is None else jnp.zeros_like(shared.bias)
  start = jnp.zeros((cut.queries, features, cut.rows), q.dtype), no_bias
  xs = (jnp.arange(cut.keys), keys, keys.swapaxes(1, 2), cut.by_key(v), *_block_order(shared.live.T, shared.full.T))
  (dq, dbias), (dk, dv) = jax.lax.scan(column, vary(start), xs)
  dq = dq.swapaxes(1, 2).reshape(-1, features)[:steps]
  return dq, dk.reshape(-1, features)[:size], dv.reshape(-1, width)[:size], dbias


def _scores(key, query, cut: Blocks, shared: Shared, hidden: bool, i, j) -> jax.Array:
  """The scores [columns, rows] of block (i, j), -inf where they are masked; `hidden`, whether any may be."""
  scores = key @ query.T
  if shared.bias is not None:
    scores = scores + cut.at(shared.bias, i, j)
  return jnp.where(cut.at(shared.shown, i, j), scores, -jnp.inf) if hidden else scores
