"""Implementation 'flash': products q · k with softmax, block by block (Dao et al. 2022, algorithms 1, 2 and 4).

Neither the weights nor their gradients are stored: each block of them is computed from its queries and keys, used and
discarded. The backward pass computes it again, from the largest score of each query and the sum of its exponentials.
These two are stored separately, because a log-sum-exp would lose the log of the sum to rounding if the score is large.
Blocks that are masked for all their queries are skipped, up to half of all blocks under a causal mask, and only partly
masked blocks read the mask.

Blocks have shape [keys, queries]. Maxima and sums then run along the first axis, which compilers vectorise, and every
product has its operands in the order that CPUs multiply fastest. The sequences of a batch and heads run one after the
other: the working set is that of one, and each of its products is large enough for all cores.

Weights, where requested, are computed in addition by the formula, [T, S]. Dropout multiplies them by factors [T, S],
sampled beforehand and equal to those of the definition: with dropout, memory grows with T S. Second derivatives are not
supported.
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
  """Returns the reason why this pair is not supported, or ''."""
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
  """Attends block by block. Same arguments as `functional.attend.attend`."""
  q, k, v, mask, bias = operands(score, alignment, params, query, memory, bias)
  factors = None if deterministic else dropout_factors(alignment, rng, q.shape[0], k.shape[0])
  factors = None if factors is None else factors.astype(q.dtype)
  context = attention_context(q, k, v, mask, bias, factors).astype(memory.value.dtype)
  if not return_weights:
    return Attended(context, None)
  weights = softmax_weights(q, k, mask, bias)
  return Attended(context, weights if factors is None else weights * factors)


def operands(score: Row, alignment: Row, params, query, memory: Memory, bias) -> tuple[jax.Array, ...]:
  """Reduces a supported pair to the softmax of a product.

  Returns:
    q [T, D], k [S, D], v [S, V], mask [T, S] or [1, S], and bias [T, S] or None, floats of the type in which sums are
    computed. The alignment's temperature is applied to q and the bias, infinite biases are part of the mask, and
    masked entries are zero.
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
  """Returns the weights [T, S], by the formula, of arrays as returned by `operands`."""
  scores = q @ k.T if bias is None else q @ k.T + bias
  return jax.vmap(softmax)(scores, jnp.broadcast_to(mask, scores.shape))


@jax.custom_vjp
def attention_context(q, k, v, mask, bias, factors) -> jax.Array:
  """(factors · softmax(q kᵀ + bias)) v over unmasked positions, 0 where all positions are masked.

  Args:
    q: [T, D].
    k: [S, D], of the same floating type.
    v: [S, V], of the same floating type.
    mask: [T, S] or, if all queries share it, [1, S].
    bias: [T, S] or None.
    factors: factors of dropout [T, S] or None; their gradient is zero.

  Returns:
    [T, V].
  """
  return _forward(q, k, v, BlockedInputs.of(mask, bias, factors, (q.shape[0], k.shape[0])))[0]


def _attention_context_fwd(q, k, v, mask, bias, factors):
  inputs = BlockedInputs.of(mask, bias, factors, (q.shape[0], k.shape[0]))
  context, max_score, inverse_sum = _forward(q, k, v, inputs)
  return context, (q, k, v, inputs, context, max_score, inverse_sum)


def _attention_context_bwd(residuals, g):
  q, k, _, inputs, *_ = residuals
  steps = q.shape[0]
  size = k.shape[0]
  dq, dk, dv, dbias = _backward(*residuals, g)
  dbias = None if dbias is None else dbias[:size, :steps].T
  dfactors = None if inputs.factors is None else jnp.zeros((steps, size), inputs.factors.dtype)
  return dq, dk, dv, None, dbias, dfactors


attention_context.defvjp(_attention_context_fwd, _attention_context_bwd)


class Blocks(NamedTuple):
  """Partition of T queries and S keys into blocks of nearly equal size.

  Attributes:
    num_query_blocks: number of blocks of queries.
    query_block: number of queries in a block.
    num_key_blocks: number of blocks of keys.
    key_block: number of keys in a block.
  """

  num_query_blocks: int
  query_block: int
  num_key_blocks: int
  key_block: int

  @classmethod
  def of(cls, steps: int, size: int) -> 'Blocks':
    """The partition of T = `steps` queries and S = `size` keys."""
    return cls(*_split_evenly(steps), *_split_evenly(size))

  def by_query(self, x: jax.Array) -> jax.Array:
    """[T, ...] -> [blocks, query_block, ...], padded with zeros."""
    return _split_blocks(x, self.num_query_blocks, self.query_block)

  def by_key(self, x: jax.Array) -> jax.Array:
    """[S, ...] -> [blocks, key_block, ...], padded with zeros."""
    return _split_blocks(x, self.num_key_blocks, self.key_block)

  def pad(self, x: jax.Array) -> jax.Array:
    """Pads [T or 1, S] with zeros or False to complete blocks; an axis of length 1 is kept."""
    rows = 0 if x.shape[0] == 1 else self.num_query_blocks * self.query_block - x.shape[0]
    return jnp.pad(x, ((0, rows), (0, self.num_key_blocks * self.key_block - x.shape[1])))

  def slice_block(self, x: jax.Array, i, j) -> jax.Array:
    """Returns block (i, j) [key_block, query_block or 1] of a padded and transposed array [S, T or 1]."""
    is_shared = x.shape[1] == 1
    rows = 1 if is_shared else self.query_block
    first_row = 0 if is_shared else i * self.query_block
    return jax.lax.dynamic_slice(x, (j * self.key_block, first_row), (self.key_block, rows))

  def classify_blocks(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Classifies the blocks of a padded mask [T or 1, S].

    Returns:
      live, full: bool [blocks of queries, blocks of keys]. A live block has an unmasked position, a full block no
      masked one.
    """
    rows = mask.reshape(1 if mask.shape[0] == 1 else self.num_query_blocks, -1, mask.shape[1])
    live = self._group_keys(rows.any(1)).any(-1)
    full = self._group_keys(rows.all(1)).all(-1)
    shape = (self.num_query_blocks, self.num_key_blocks)
    return jnp.broadcast_to(live, shape), jnp.broadcast_to(full, shape)

  def _group_keys(self, x: jax.Array) -> jax.Array:
    """[rows, S] -> [rows, blocks, key_block]."""
    return x.reshape(x.shape[0], self.num_key_blocks, -1)


class BlockedInputs(NamedTuple):
  """Inputs of `attention_context` that the sequences of a batch may share, prepared once for all of them.

  Attributes:
    mask, bias, factors: transposed and padded, see Blocks.pad.
    live, full: bool [blocks of queries, blocks of keys], see Blocks.classify_blocks.
  """

  mask: jax.Array
  bias: jax.Array | None
  factors: jax.Array | None
  live: jax.Array
  full: jax.Array

  @classmethod
  def of(cls, mask, bias, factors, sizes: tuple[int, int]) -> 'BlockedInputs':
    """Prepares the inputs of `attention_context`; `sizes` are T and S."""
    blocks = Blocks.of(*sizes)
    padded = [None if x is None else blocks.pad(x) for x in (mask, bias, factors)]
    transposed = [None if x is None else x.T for x in padded]
    return cls(*transposed, *blocks.classify_blocks(padded[0]))

  def apply_dropout(self, blocks: Blocks, weights: jax.Array, i, j) -> jax.Array:
    """Multiplies block (i, j) of the weights by the factors of dropout, if there are any."""
    return weights if self.factors is None else weights * blocks.slice_block(self.factors, i, j)


def _split_evenly(n: int) -> tuple[int, int]:
  """(number of blocks, size of a block) for n rows, at most BLOCK rows to a block."""
  blocks = max(1, -(-n // BLOCK))
  return blocks, -(-n // blocks)


def _split_blocks(x: jax.Array, blocks: int, rows: int) -> jax.Array:
  """[n, ...] -> [blocks, rows, ...], padded with zeros."""
  x = jnp.pad(x, ((0, blocks * rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
  return x.reshape(blocks, rows, *x.shape[1:])


def _block_order(live: jax.Array, full: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Orders each row of blocks: full blocks, other live blocks, masked blocks.

  Returns:
    The indices of the blocks in that order, the number of full blocks, and the number of live blocks, per row.
  """
  rank = jnp.where(full, 0, jnp.where(live, 1, 2))
  return jnp.argsort(rank, axis=1), full.sum(1), live.sum(1)


def _fold_live_blocks(step: Callable, order, num_full, num_live, carry):
  """Folds step(has_masked, block, carry) over the live blocks of a row, in the order of `_block_order`."""
  carry = jax.lax.fori_loop(0, num_full, lambda n, carry: step(False, order[n], carry), carry)
  return jax.lax.fori_loop(num_full, num_live, lambda n, carry: step(True, order[n], carry), carry)


@shard_over_rows
@sequential_vmap
def _forward(q, k, v, inputs: BlockedInputs):
  """Returns the context [T, V], and per query [T] the largest score and 1 / Σ exp(score - largest score)."""
  steps = q.shape[0]
  size, width = v.shape
  blocks = Blocks.of(steps, size)
  keys = blocks.by_key(k)
  values = blocks.by_key(v).swapaxes(1, 2)

  def attend_row(xs):
    i, query, order, num_full, num_live = xs

    def step(has_masked, j, carry):
      max_score, total, context = carry
      scores = _scores(keys[j], query, blocks, inputs, has_masked, i, j)
      new_max = jnp.maximum(max_score, scores.max(0, keepdims=True))
      exps = jnp.exp(scores - new_max)
      rescale = jnp.exp(max_score - new_max)
      total = total * rescale + exps.sum(0, keepdims=True)
      context = context * rescale + values[j] @ inputs.apply_dropout(blocks, exps, i, j)
      return new_max, total, context

    def zeros(size):
      return jnp.zeros((size, blocks.query_block), q.dtype)

    start = vary_like((zeros(1) + min_finite(q.dtype), zeros(1), zeros(width)), q, k, v, *inputs)
    max_score, total, context = _fold_live_blocks(step, order, num_full, num_live, start)
    is_attending = total != 0  # True also for NaN, which then fills the whole row, as in the definition
    inverse_sum = jnp.where(is_attending, 1 / jnp.where(is_attending, total, 1.0), 0.0)
    return (context * inverse_sum).T, max_score[0], inverse_sum[0]

  order = _block_order(inputs.live, inputs.full)
  xs = (jnp.arange(blocks.num_query_blocks), blocks.by_query(q), *order)
  context, max_score, inverse_sum = jax.lax.map(attend_row, xs)
  return context.reshape(-1, width)[:steps], max_score.reshape(-1)[:steps], inverse_sum.reshape(-1)[:steps]


@shard_over_rows
@sequential_vmap
def _backward(q, k, v, inputs: BlockedInputs, context, max_score, inverse_sum, g):
  """Returns the gradients of q, k, v and of the bias, which is transposed and padded as in `inputs`."""
  steps, features = q.shape
  size, width = v.shape
  blocks = Blocks.of(steps, size)
  g = g * inverse_sum[:, None]  # exponentials can then be used in place of weights
  queries = blocks.by_query(q)
  g_rows = blocks.by_query(g)
  max_scores = blocks.by_query(max_score)
  mean_dweights = blocks.by_query((g * context).sum(1))  # Σ_s weight dweight of each query
  keys = blocks.by_key(k)

  def vary(start):
    return vary_like(start, q, k, v, *inputs, g)

  def differentiate_column(carry, xs):
    j, key, key_t, value, order, num_full, num_live = xs

    def step(has_masked, i, carry):
      (dq, dbias), dk, dv = carry
      scores = _scores(key, queries[i], blocks, inputs, has_masked, i, j)
      # Rounding can lift a recomputed score above the stored maximum, by much if scores are large.
      exps = jnp.exp(jnp.minimum(scores - max_scores[i][None], 0.0))
      dweights = inputs.apply_dropout(blocks, value @ g_rows[i].T, i, j)
      dscores = exps * (dweights - mean_dweights[i][None])
      if dbias is not None:
        dbias = jax.lax.dynamic_update_slice(dbias, dscores, (j * blocks.key_block, i * blocks.query_block))
      dq = dq.at[i].add(key_t @ dscores)
      dv = dv + inputs.apply_dropout(blocks, exps, i, j) @ g_rows[i]
      dk = dk + dscores @ queries[i]
      return (dq, dbias), dk, dv

    dk = jnp.zeros((blocks.key_block, features), q.dtype)
    dv = jnp.zeros((blocks.key_block, width), q.dtype)
    carry, dk, dv = _fold_live_blocks(step, order, num_full, num_live, (carry, *vary((dk, dv))))
    return carry, (dk, dv)

  dbias = None if inputs.bias is None else jnp.zeros_like(inputs.bias)
  dq = jnp.zeros((blocks.num_query_blocks, features, blocks.query_block), q.dtype)
  xs = (jnp.arange(blocks.num_key_blocks), keys, keys.swapaxes(1, 2), blocks.by_key(v))
  xs += _block_order(inputs.live.T, inputs.full.T)
  (dq, dbias), (dk, dv) = jax.lax.scan(differentiate_column, vary((dq, dbias)), xs)
  dq = dq.swapaxes(1, 2).reshape(-1, features)[:steps]
  return dq, dk.reshape(-1, features)[:size], dv.reshape(-1, width)[:size], dbias


def _scores(key, query, blocks: Blocks, inputs: BlockedInputs, has_masked: bool, i, j) -> jax.Array:
  """Scores [key_block, query_block] of block (i, j), -inf where masked; `has_masked`: whether any may be masked."""
  scores = key @ query.T
  if inputs.bias is not None:
    scores = scores + blocks.slice_block(inputs.bias, i, j)
  return jnp.where(blocks.slice_block(inputs.mask, i, j), scores, -jnp.inf) if has_masked else scores
