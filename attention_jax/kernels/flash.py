"""Implementation 'flash': products q · k with a form of softmax, block by block (Dao et al. 2022, algorithms 1, 2, 4).

The alignments are those of the form SoftmaxForm: a scale changes q, a transform the scores of a block, and a sink b
multiplies contexts by σ(log Σ exp f(e) - b).

Neither the weights nor their gradients are stored: each block of them is computed from its queries and keys, used and
discarded. The backward pass computes it again, from the largest score of each query and the sum of its exponentials.
These two are stored separately, because a log-sum-exp would lose the log of the sum to rounding if the score is large.
Blocks that are masked for all their queries are skipped: up to half of all blocks under a causal mask. Bands, lengths
and segments of a Mask classify the blocks without an array [T, S], and are computed for the partly masked ones. An
array is read once to classify blocks, then for partly masked ones only.

Blocks have shape [keys, queries]. Maxima and sums then run along the first axis, which compilers vectorise, and every
product has its operands in the order that CPUs multiply fastest. On a CPU the sequences and heads of a batch run one
after the other: the working set is that of one of them, and each of its products is large enough for all cores. On
other devices they run together.

If weights are requested, the array [T, S] is computed separately. Dropout multiplies weights by factors [T, S],
sampled beforehand and equal to those of the definition, implementation 'xla': with dropout, memory grows with T S, as
it does with a bias that is an array, or a mask per query; a bias that is a function of positions is computed for each
block. First derivatives in reverse mode only.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from attention_jax.functional.attend import Attended, AttendedWithLogSum, Problem, lifted
from attention_jax.functional.dense import softmax
from attention_jax.functional.dropout import differs_at_test, dropout_factors
from attention_jax.functional.masking import min_finite, vary_alike, vary_like, zero_masked
from attention_jax.functional.table import Product, Row, SoftmaxForm
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.flash_blocks import BlockedInputs, Blocks, in_turn_on_cpus
from attention_jax.kernels.products import products_of
from attention_jax.kernels.sharding import shard_over_rows
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import replaced_for_counting


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported, or ''."""
  if not isinstance(score.form, Product):
    return 'the score is not a product q . k with q depending on the query alone and k on the key alone'
  if not isinstance(alignment.form, SoftmaxForm) or differs_at_test(alignment):
    return 'the alignment is not a form of softmax or has an edit'
  return ''


def attend(problem: Problem) -> Attended:
  """Attends block by block.

  Raises:
    UserError: for symbolic sizes, and as `products_of`.
  """
  require_fixed_sizes('flash', problem)
  q, k, v, mask, bias, transform, sink = products_of(problem, ())
  v = v.astype(q.dtype)
  change = None
  if callable(bias):
    change, bias = Partial(_change, transform, bias), None
  elif transform is not None:
    change = Partial(_change, transform, None)
  if bias is not None:
    is_allowed = ~jnp.isneginf(bias)
    mask, bias = mask & is_allowed, zero_masked(bias, is_allowed)
  factors = None if problem.deterministic else dropout_factors(problem.alignment, problem.rng, q.shape[0], k.shape[0])
  factors = None if factors is None else factors.astype(q.dtype)
  inputs = reverse_mode_only('flash', (q, k, v, mask, bias, factors, change))
  context, log_total = attention_context(*vary_alike(inputs))
  gate = 1.0 if sink is None else jax.nn.sigmoid(log_total - sink)[:, None]
  context = (context * gate).astype(problem.memory.value.dtype)
  weights = None
  if problem.return_weights:
    weights = softmax_weights(q, k, mask, bias, change) * gate
    weights = weights if factors is None else weights * factors
  if not problem.return_log_sum:
    return Attended(context, weights)
  return AttendedWithLogSum(context, weights, jnp.where(log_total > min_finite(q.dtype), log_total, -jnp.inf))


attend_batch = replaced_for_counting(lifted(attend))


def _change(transform: Partial | None, bias: Partial | None, scores, first_key, first_query) -> jax.Array:
  """f of `attention_context`: adds a bias of positions, applies the transform; -inf where the bias masks.

  Args:
    transform, bias: those of Products.
    scores: scores of a block, [keys, queries].
    first_key, first_query: indices of the first key and the first query of the block.
  """
  if bias is None:
    return transform(scores)
  num_keys, num_queries = scores.shape
  values = bias(first_query + jnp.arange(num_queries), first_key + jnp.arange(num_keys)).T
  is_allowed = ~jnp.isneginf(values)
  scores = scores + zero_masked(values, is_allowed)
  return jnp.where(is_allowed, scores if transform is None else transform(scores), -jnp.inf)


def softmax_weights(q, k, mask, bias, change=None) -> jax.Array:
  """Returns the weights [T, S], by the formula, without a sink. Arguments: see `attention_context`."""
  scores = q @ k.T if bias is None else q @ k.T + bias
  dense = mask.dense(*scores.shape)
  if change is not None:
    scores = change(zero_masked(scores, dense).T, 0, 0).T
    dense = dense & ~jnp.isneginf(scores)
  return jax.vmap(softmax)(scores, dense)


@jax.custom_vjp
def attention_context(q, k, v, mask, bias, factors, change) -> tuple[jax.Array, jax.Array]:
  """(factors · softmax(f(q kᵀ + bias))) v over unmasked positions, 0 where all positions are masked.

  Args:
    q: [T, D].
    k: [S, D], of the same floating type.
    v: [S, V], of the same floating type.
    mask: the Mask of one sequence.
    bias: [T, S] or None.
    factors: factors of dropout [T, S] or None; their gradient is zero.
    change: f, a Partial of the scores of a block [keys, queries] and the indices of its first key and its first query;
      None is the identity.

  Returns:
    The contexts [T, V], and log Σ exp f(q kᵀ + bias) of each query [T], the lowest number where all are masked.
  """
  return _attention_context_fwd(q, k, v, mask, bias, factors, change)[0]


def _attention_context_fwd(q, k, v, mask, bias, factors, change):
  inputs = BlockedInputs.of(mask, bias, factors, Blocks.of(q.shape[0], k.shape[0]), k.shape[0])
  context, max_score, inverse_sum = _forward(q, k, v, inputs, change)
  log_total = max_score - jnp.log(jnp.where(inverse_sum == 0, 1.0, inverse_sum))
  return (context, log_total), (q, k, v, inputs, change, context, max_score, inverse_sum)


def _attention_context_bwd(residuals, g):
  q, k, _, inputs, change, *_ = residuals
  num_queries = q.shape[0]
  size = k.shape[0]
  dq, dk, dv, dbias, dchange = _backward(*residuals, *g)
  dbias = None if dbias is None else dbias[:size, :num_queries].T
  dfactors = None if inputs.factors is None else jnp.zeros((num_queries, size), inputs.factors.dtype)
  no_gradient = jax.tree.map(lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0), change)
  return dq, dk, dv, None, dbias, dfactors, _with_leaves(no_gradient, dchange)


attention_context.defvjp(_attention_context_fwd, _attention_context_bwd)


@shard_over_rows
@in_turn_on_cpus
def _forward(q, k, v, inputs: BlockedInputs, change):
  """Returns the context [T, V], and for each query [T] the largest score and 1 / Σ exp(score - largest).

  The inverse sum is 0 for a query whose positions are all masked.
  """
  num_queries = q.shape[0]
  size, width = v.shape
  blocks = Blocks.of(num_queries, size)
  keys = blocks.pad_keys(k)
  # The product with a column of ones is the sum of the exponentials: another pass over them would take longer.
  values = blocks.pad_keys(jnp.concatenate([v, jnp.ones((size, 1), v.dtype)], axis=1)).T

  def attend_query_block(xs):
    i, query, schedule = xs

    def step(span, has_masked, j, carry):
      max_score, sums = carry
      scores = _scores(blocks, inputs, keys, query, i, j, span)
      scores = scores if change is None else change(scores, j * blocks.key_block, i * blocks.query_block)
      scores = _mask(blocks, inputs, scores, i, j, span) if has_masked else scores
      new_max = jnp.maximum(max_score, scores.max(0, keepdims=True))
      exps = jnp.exp(scores - new_max)
      block_values = blocks.slice_keys(values, j, span, axis=1)
      if inputs.factors is None:
        block_sums = block_values @ exps
      else:
        exps_after_dropout = exps * blocks.slice_block(inputs.factors, i, j, span)
        block_sums = jnp.concatenate([block_values[:-1] @ exps_after_dropout, exps.sum(0, keepdims=True)])
      return new_max, sums * jnp.exp(max_score - new_max) + block_sums

    lowest = jnp.full((1, blocks.query_block), min_finite(q.dtype))
    start = vary_like((lowest, jnp.zeros((width + 1, blocks.query_block), q.dtype)), q, k, v, *inputs)
    max_score, sums = blocks.fold(step, schedule, start)
    total = sums[-1]
    is_attending = total != 0  # True also for NaN, which then fills the whole row, as in the definition
    inverse_sum = jnp.where(is_attending, 1 / jnp.where(is_attending, total, 1.0), 0.0)
    return (sums[:-1] * inverse_sum[None]).T, max_score[0], inverse_sum

  xs = (jnp.arange(blocks.num_query_blocks), blocks.by_query(q), inputs.schedule)
  context, max_score, inverse_sum = jax.lax.map(attend_query_block, xs)
  return (
    context.reshape(-1, width)[:num_queries],
    max_score.reshape(-1)[:num_queries],
    inverse_sum.reshape(-1)[:num_queries],
  )


@shard_over_rows
@in_turn_on_cpus
def _backward(q, k, v, inputs: BlockedInputs, change, context, max_score, inverse_sum, g, g_log_total):
  """Returns the gradients of q, k, v, of the bias, transposed and padded as in `inputs`, and of floats in `change`."""
  floats = _floats(change)
  num_queries, features = q.shape
  size = k.shape[0]
  blocks = Blocks.of(num_queries, size)
  g = g * inverse_sum[:, None]  # exponentials can then be used in place of weights
  keys = blocks.pad_keys(k)
  keys_t = keys.T
  values = blocks.pad_keys(v)

  def apply_dropout(weights, i, j, span):
    return weights if inputs.factors is None else weights * blocks.slice_block(inputs.factors, i, j, span)

  def differentiate_query_block(carry, xs):
    i, query, g_block, max_score, mean_dweight, schedule = xs

    def step(span, has_masked, j, carry):
      dq, dk, dv, dbias, dchange = carry
      scores = _scores(blocks, inputs, keys, query, i, j, span)
      if change is not None:
        first_key, first_query = j * blocks.key_block, i * blocks.query_block
        run = functools.partial(_change_with, change, first_key, first_query)
        scores, vjp = jax.vjp(run, floats, scores)
      scores = _mask(blocks, inputs, scores, i, j, span) if has_masked else scores
      # Rounding can lift a recomputed score above the stored maximum, by much if scores are large.
      exps = jnp.exp(jnp.minimum(scores - max_score[None], 0.0))
      dweights = apply_dropout(blocks.slice_keys(values, j, span) @ g_block.T, i, j, span)
      dscores = exps * (dweights - mean_dweight[None])
      if change is not None:
        dchange_of_block, dscores = vjp(dscores)
        dchange = jax.tree.map(jnp.add, dchange, dchange_of_block)
      if dbias is not None:
        dbias = jax.lax.dynamic_update_slice(dbias, dscores, (j * blocks.key_block, i * blocks.query_block))
      dq = dq + blocks.slice_keys(keys_t, j, span, axis=1) @ dscores
      dk = blocks.add_to_keys(dk, j, dscores @ query)
      dv = blocks.add_to_keys(dv, j, apply_dropout(exps, i, j, span) @ g_block)
      return dq, dk, dv, dbias, dchange

    dq = vary(jnp.zeros((features, blocks.query_block), q.dtype))
    dq, *carry = blocks.fold(step, schedule, (dq, *carry))
    return tuple(carry), dq.T

  def vary(start):
    return vary_like(start, q, k, v, *inputs, g)

  dbias = None if inputs.bias is None else jnp.zeros(inputs.bias.shape, q.dtype)
  dchange = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), floats)
  start = vary((jnp.zeros(keys.shape, q.dtype), jnp.zeros(values.shape, q.dtype), dbias, dchange))
  # Σ_s weight dweight of each query, and the gradient of the log, whose derivatives are the weights
  mean_dweights = (g * context).sum(1) - g_log_total * inverse_sum
  per_query = (q, g, max_score, mean_dweights)
  xs = (jnp.arange(blocks.num_query_blocks), *(blocks.by_query(x) for x in per_query), inputs.schedule)
  (dk, dv, dbias, dchange), dq = jax.lax.scan(differentiate_query_block, start, xs)
  return dq.reshape(-1, features)[:num_queries], dk[:size], dv[:size], dbias, dchange


def _change_with(change: Partial, first_key, first_query, floats: Mapping[int, jax.Array], scores) -> jax.Array:
  """Changes scores [keys, queries] with `floats` as the leaves of `change` that are floats."""
  return _with_leaves(change, floats)(scores, first_key, first_query)


def _floats(tree: Any) -> dict[int, jax.Array]:
  """Returns the leaves of a tree that are floats, by their index."""
  leaves = enumerate(jax.tree.leaves(tree))
  return {i: leaf for i, leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)}


def _with_leaves(tree: Any, new: Mapping[int, jax.Array]) -> Any:
  """Returns a tree with new leaves at the indices of `new`."""
  leaves, structure = jax.tree.flatten(tree)
  return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])


def _scores(blocks: Blocks, inputs: BlockedInputs, keys, query, i, j, span: int) -> jax.Array:
  """Scores [keys, query_block] of blocks (i, j ... j + span - 1)."""
  scores = blocks.slice_keys(keys, j, span) @ query.T
  return scores if inputs.bias is None else scores + blocks.slice_block(inputs.bias, i, j, span)


def _mask(blocks: Blocks, inputs: BlockedInputs, scores, i, j, span: int) -> jax.Array:
  """The scores of blocks (i, j ... j + span - 1), -inf where masked."""
  return jnp.where(inputs.mask_block(blocks, i, j, span), scores, -jnp.inf)
