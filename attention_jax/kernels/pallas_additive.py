"""Implementation 'pallas_additive': additive attention with softmax, one Pallas kernel source for GPU and TPU.

A program holds tanh(q + k) for a tile of queries, keys and features in fast memory; the whole array [T, S, F] is never
stored. The forward pass computes the softmax online, while a block of queries iterates over a span of keys: scores are
not written unless weights are requested. Splitting the keys into spans gives a GPU enough programs where sequences are
few, and lets the keys of a program fit into a TPU's memory; the results of the spans, [S / span, T, V], are combined at
the end.

The backward pass recomputes the weights from the largest score of each query and the sum of its exponentials. It runs
one block of queries after the other, and stores the weights of a block and the gradients of its scores, at most about
MAX_BLOCK_SCORES each: without a bias, a mask per query, dropout and returned weights, which are [T, S] each, memory is
linear in T + S. The sums over keys and over queries are two calls of one kernel, without atomic additions, so that
gradients are reproducible bit for bit. An entry [t, s, f] costs three tanh in this pass; two kernels that each
recompute the score as well would need four. A score's offset shifts all positions equally, which a softmax ignores: it
is not passed to the kernels.

Dropout multiplies weights by factors [T, S], sampled beforehand and equal to those of the definition.

All arithmetic is float32. On a CPU the kernels run only under `compile_for('interpret')`, for tests.
It has first derivatives in reverse mode only.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from attention_jax.errors import UserError
from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Problem, lifted, score_terms, zero_masked_memory
from attention_jax.functional.dense import clamp_to_finite, differs_from_softmax, softmax_temperature
from attention_jax.functional.dropout import differs_at_test, dropout_factors, strip_dropout
from attention_jax.functional.masking import vary_like, zero_masked
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.pallas_additive_kernels import (
  Tile,
  context_kernel,
  exponentials_kernel,
  pair_sums_kernel,
  round_up,
)
from attention_jax.kernels.products import beyond_contexts
from attention_jax.kernels.sharding import shard_over_rows
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import INTERPRET, kernel_platform, replaced_for_counting

MAX_BLOCK_SCORES = 2**20  # most scores of a block of queries in the backward pass: 4 MiB in float32


class Target(NamedTuple):
  """A platform that kernels are compiled for: its tile, and options of the compiler where its defaults are slow."""

  tile: Tile
  options: Any = None


# A GPU holds a tile in registers, a TPU in vector memory with features in its 128 lanes.
TARGETS: Mapping[str, Target] = {
  'gpu': Target(Tile(16, 16, 32, 256, 64), triton.CompilerParams(num_warps=8)),
  'tpu': Target(Tile(8, 128, 128, 512, 128)),
  INTERPRET: Target(Tile(16, 16, 16, 32, 16)),
}


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported on `kernel_platform()`, or ''."""
  if not isinstance(score.form, TanhSum):
    return 'the score is not v . tanh(q + k) with q depending on the query alone and k on the key alone'
  if reason := differs_from_softmax(strip_dropout(alignment)):
    return reason
  if differs_at_test(alignment):
    return 'the alignment is not softmax or has an edit'
  if kernel_platform() not in TARGETS:
    return f'needs a GPU or a TPU, got platform {kernel_platform()}'
  return ''


def unsupported_inputs(problem: Problem) -> str:
  """Returns the reason why a problem with these inputs is not supported, or ''."""
  if reason := beyond_contexts(problem):
    return reason
  types = [x.dtype.name for x in (problem.query, problem.memory.key, problem.memory.value)]
  if 'float64' in types:
    return f'query, key and value must not be float64 (the kernels compute in float32), got {", ".join(types)}'
  return ''


def attend(problem: Problem) -> Attended:
  """Attends with the Pallas kernels.

  Raises:
    UserError: for float64, which the kernels would round, for symbolic sizes, and for a temperature that is a number
      but not positive.
  """
  require_fixed_sizes('pallas_additive', problem)
  if reason := unsupported_inputs(problem):
    raise UserError(f"implementation 'pallas_additive': {reason}; use 'factored'")
  if not problem.query.shape[0]:
    return definition.attend(problem)
  _, alignment, _, _, memory, bias, rng, deterministic, return_weights, *_ = problem
  memory = zero_masked_memory(memory, problem.query.shape[0])
  q, k, v, _ = score_terms(problem._replace(memory=memory))
  scale = 1 / jnp.asarray(softmax_temperature(strip_dropout(alignment)), jnp.float32)
  mask = memory.mask.dense(1 if memory.mask.is_shared else problem.query.shape[0], memory.key.shape[0])
  masked_bias = jnp.where(mask, 0.0, -jnp.inf)
  if bias is not None:
    mask = mask & ~jnp.isneginf(bias)
    finite_bias = clamp_to_finite(zero_masked(bias, mask).astype(jnp.float32) * scale)
    masked_bias = jnp.where(mask, finite_bias, -jnp.inf)
  factors = None if deterministic else dropout_factors(alignment, rng, q.shape[0], k.shape[0])
  plan = Plan(kernel_platform(), return_weights, has_bias=bias is not None, has_dropout=factors is not None)
  factors = jnp.ones((1, 1)) if factors is None else factors
  arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v * scale, masked_bias, factors, memory.value)]
  arrays = reverse_mode_only('pallas_additive', arrays)
  zero = vary_like(jnp.zeros(()), *arrays)  # shard_map: all arrays of a kernel must vary over the same mesh axes
  context, weights = attended(plan, *(x + zero for x in arrays))
  return Attended(context.astype(memory.value.dtype), weights)


attend_batch = replaced_for_counting(lifted(attend))


class Operand(NamedTuple):
  """Input of a program: an array, the shape of a block, and the function from the grid to the index of a block."""

  array: jax.Array
  block: tuple
  index: Callable


class Result(NamedTuple):
  """Float32 output of a program: its shape, and the shape and the index of a block as in Operand."""

  shape: tuple[int, ...]
  block: tuple
  index: Callable


def _query_index(t, s):
  return t, 0


def _key_index(t, s):
  return s, 0


def _pair_index(t, s):
  return t, s


def _constant_index(t, s):
  return 0, 0


class Plan(NamedTuple):
  """Properties of a program that are fixed when it is compiled.

  Attributes:
    target: a key of TARGETS.
    return_weights: whether weights are an output.
    has_bias: whether there is a bias, which needs a gradient.
    has_dropout: whether weights are multiplied by factors of dropout.
  """

  target: str
  return_weights: bool
  has_bias: bool
  has_dropout: bool

  @property
  def tile(self) -> Tile:
    """Sizes of the blocks of a program."""
    return TARGETS[self.target].tile

  def run(self, kernel: Callable, grid: tuple[int, ...], operands: list, results: list) -> list[jax.Array]:
    """Runs a kernel over a grid; returns one array per Result.

    Args:
      kernel: (tile, *references to blocks of the operands, *references to blocks of the results) -> None.
      grid: number of programs along each axis.
      operands: an Operand for each input.
      results: a Result for each output.
    """
    varying = jax.typeof(operands[0].array).manual_axis_type
    program = pl.pallas_call(
      functools.partial(kernel, self.tile),
      out_shape=[jax.ShapeDtypeStruct(result.shape, jnp.float32, manual_axis_type=varying) for result in results],
      grid=grid,
      in_specs=[pl.BlockSpec(operand.block, operand.index) for operand in operands],
      out_specs=[pl.BlockSpec(result.block, result.index) for result in results],
      compiler_params=TARGETS[self.target].options,
      interpret=self.target == INTERPRET,
    )
    return shard_over_rows(program)(*(operand.array for operand in operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(plan: Plan, q, k, v, masked_bias, factors, value) -> tuple[jax.Array, jax.Array | None]:
  """weights = factors · softmax_s(v · tanh(q + k) + masked_bias); context = weights @ value. All float32.

  Args:
    plan: fixed properties of the programs.
    q: [T, F].
    k: [S, F].
    v: [F].
    masked_bias: [T, S] or, if all queries share it, [1, S]: the bias, -inf where masked.
    factors: factors of dropout [T, S], which get no gradient; of any shape if the plan has no dropout.
    value: [S, V].

  Returns:
    context [T, V], weights [T, S] or None.
  """
  return _attended_fwd(plan, q, k, v, masked_bias, factors, value)[0]


def _attended_fwd(plan: Plan, q, k, v, masked_bias, factors, value):
  """Runs a program for each block of queries and span of keys, then combines the spans."""
  rows = plan.tile.queries
  spans, span = plan.tile.split_keys(k.shape[0])
  padded, (queries, keys, features) = _pad_to_tiles(plan.tile, q, k, v, masked_bias)
  width = round_up(value.shape[1], plan.tile.values)
  operands = [
    Operand(padded[0], (rows, features), _query_index),
    Operand(padded[1], (span, features), _key_index),
    Operand(padded[2], (1, features), _constant_index),
    Operand(padded[3], *_bias_block(masked_bias, rows, span)),
    Operand(_pad(value, (keys, width)), (span, width), _key_index),
  ]
  if plan.has_dropout:
    operands.append(Operand(_pad(factors, (queries, keys)), (rows, span), _pair_index))

  def result_per_span(size):
    return Result((spans, queries, size), (None, rows, size), lambda t, s: (s, t, 0))

  results = [result_per_span(width), result_per_span(1), result_per_span(1)]
  if plan.return_weights:
    results.append(Result((queries, keys), (rows, span), _pair_index))
  kernel = functools.partial(context_kernel, plan.has_dropout)
  value_sums, max_scores, exp_sums, *scores = plan.run(kernel, (queries // rows, spans), operands, results)
  context, max_score, inverse_sum = _combine_spans(value_sums, max_scores, exp_sums)
  weights = None
  if plan.return_weights:
    weights = (jnp.exp(scores[0] - max_score) * inverse_sum)[: q.shape[0], : k.shape[0]]
    weights = weights * factors if plan.has_dropout else weights
  residuals = (q, k, v, masked_bias, factors, value, max_score, inverse_sum)
  return (context[: q.shape[0], : value.shape[1]], weights), residuals


def _combine_spans(value_sums, max_scores, exp_sums) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Combines the results of C spans.

  The maximum and the sum are returned separately: added to a large score, the log of the sum is lost to rounding.

  Args:
    value_sums: sums of values weighted by exponentials, [C, T, V].
    max_scores: largest score of each span, [C, T, 1].
    exp_sums: sums of exponentials relative to it, [C, T, 1].

  Returns:
    The context [T, V], the largest score [T, 1], and 1 / (the sum of exponentials relative to it) [T, 1].
  """
  max_score = jnp.max(max_scores, axis=0)
  rescale = jnp.exp(max_scores - max_score[None])
  total = jnp.sum(rescale * exp_sums, axis=0)
  # `!= 0` is True also for NaN, which must reach the result, as in the definition.
  inverse_sum = jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1.0), 0.0)
  return jnp.sum(rescale * value_sums, axis=0) * inverse_sum, max_score, inverse_sum


def _attended_bwd(plan: Plan, residuals, g):
  """Differentiates one block of queries after the other, with all keys: its temporary arrays are linear in T + S."""
  q, k, v, masked_bias, factors, value, max_score, inverse_sum = residuals
  num_queries = q.shape[0]
  blocks, rows = _split_queries(plan.tile, num_queries, k.shape[0])
  arrays = (q, masked_bias, factors, max_score[:num_queries], inverse_sum[:num_queries], *g)

  def split(x):
    """[T, ...] -> [blocks, rows, ...]; None for what all queries share."""
    if x is None or x.shape[0] != num_queries:
      return None
    return _pad(x, (blocks * rows, *x.shape[1:])).reshape(blocks, rows, *x.shape[1:])

  def run_block(sums, xs):
    operands = [whole if block is None else block for block, whole in zip(xs, arrays, strict=True)]
    terms, per_query = _differentiate_block(plan, k, v, value, *operands)
    return jax.tree.map(jnp.add, sums, terms), per_query

  start = vary_like(tuple(jnp.zeros(x.shape, x.dtype) for x in (k, v, value)), *residuals, *g)
  (dk, dv, dvalue), per_query = jax.lax.scan(run_block, start, [split(x) for x in arrays])
  dq, dbias = jax.tree.map(lambda x: x.reshape(blocks * rows, -1)[:num_queries], per_query)
  dbias = jnp.zeros_like(masked_bias) if dbias is None else dbias
  return dq, dk, dv, dbias, jnp.zeros_like(factors), dvalue


def _differentiate_block(
  plan: Plan, k, v, value, q, masked_bias, factors, max_score, inverse_sum, dcontext, dweights
) -> tuple[tuple, tuple]:
  """Gradients of a block of queries: ((of k, v and value), (of q, and of the bias or None))."""
  einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
  weights = _exponentials(plan, q, k, v, masked_bias, max_score) * inverse_sum
  dweights = einsum('tv,sv->ts', dcontext, value) + (0.0 if dweights is None else dweights)
  dweights = factors * dweights if plan.has_dropout else dweights
  dscores = weights * (dweights - jnp.sum(weights * dweights, -1, keepdims=True))
  dq, tanh_sums = _pair_sums(plan, q, k, dscores, with_tanh=True)
  (dk,) = _pair_sums(plan, k, q, dscores.T, with_tanh=False)
  weights_after_dropout = factors * weights if plan.has_dropout else weights
  dvalue = einsum('ts,tv->sv', weights_after_dropout, dcontext)
  return (dk * v[None], tanh_sums.sum(0), dvalue), (dq * v[None], dscores if plan.has_bias else None)


def _split_queries(tile: Tile, num_queries: int, num_keys: int) -> tuple[int, int]:
  """(number of blocks, queries of a block): nearly equal blocks in whole tiles, of at most MAX_BLOCK_SCORES scores.

  A block has at least one tile, even if that has more scores.
  """
  max_queries = max(1, MAX_BLOCK_SCORES // (num_keys * tile.queries)) * tile.queries
  blocks = -(-num_queries // max_queries)
  return blocks, round_up(-(-num_queries // blocks), tile.queries)


attended.defvjp(_attended_fwd, _attended_bwd)


def _exponentials(plan: Plan, q, k, v, masked_bias, max_score) -> jax.Array:
  """Recomputes the exponentials [T, S] of the scores relative to the largest ones [T, 1]."""
  padded, (queries, keys, features) = _pad_to_tiles(plan.tile, q, k, v, masked_bias)
  rows = plan.tile.queries
  columns = plan.tile.keys
  operands = [
    Operand(padded[0], (rows, features), _query_index),
    Operand(padded[1], (columns, features), _key_index),
    Operand(padded[2], (1, features), _constant_index),
    Operand(padded[3], *_bias_block(masked_bias, rows, columns)),
    Operand(_pad(max_score, (queries, 1)), (rows, 1), _query_index),
  ]
  results = [Result((queries, keys), (rows, columns), _pair_index)]
  (exps,) = plan.run(exponentials_kernel, (queries // rows, keys // columns), operands, results)
  return exps[: q.shape[0], : k.shape[0]]


def _bias_block(masked_bias, rows: int, columns: int) -> tuple[tuple[int, int], Callable]:
  """The shape and the index of a block of a bias [T, S], or [1, S] if all queries share it."""
  if masked_bias.shape[0] == 1:
    return (1, columns), lambda t, s: (0, s)
  return (rows, columns), _pair_index


def _pair_sums(plan: Plan, x, y, g, *, with_tanh: bool) -> list[jax.Array]:
  """Σ_j g_ij tanh'(x_i + y_j) and, if requested, Σ_j g_ij tanh(x_i + y_j): x [I, F], y [J, F], g [I, J] -> [I, F]."""
  rows = plan.tile.queries
  part = plan.tile.features
  spans, span = plan.tile.split_keys(y.shape[0])
  x_rows = round_up(x.shape[0], rows)
  y_rows = spans * span
  features = round_up(x.shape[1], part)
  operands = [
    Operand(_pad(x, (x_rows, features)), (rows, part), lambda i, f, j: (i, f)),
    Operand(_pad(y, (y_rows, features)), (span, part), lambda i, f, j: (j, f)),
    Operand(_pad(g, (x_rows, y_rows)), (rows, span), lambda i, f, j: (i, j)),
  ]
  result = Result((spans, x_rows, features), (None, rows, part), lambda i, f, j: (j, i, f))
  results = [result, result] if with_tanh else [result]
  sums = plan.run(pair_sums_kernel, (x_rows // rows, features // part, spans), operands, results)
  return [jnp.sum(total, axis=0)[: x.shape[0], : x.shape[1]] for total in sums]


def _pad_to_tiles(tile: Tile, q, k, v, masked_bias):
  """Pads to whole tiles: features of weight 0, masked keys, and queries whose results are discarded."""
  spans, span = tile.split_keys(k.shape[0])
  queries = round_up(q.shape[0], tile.queries)
  keys = spans * span
  features = round_up(q.shape[1], tile.features)
  bias_rows = 1 if masked_bias.shape[0] == 1 else queries
  arrays = [
    _pad(q, (queries, features)),
    _pad(k, (keys, features)),
    _pad(v[None], (1, features)),
    _pad(masked_bias, (bias_rows, keys), -jnp.inf),
  ]
  return arrays, (queries, keys, features)


def _pad(x: jax.Array, shape: tuple[int, ...], fill: float = 0.0) -> jax.Array:
  """Pads x to `shape`, at the end of each axis."""
  return jnp.pad(x, [(0, new - old) for new, old in zip(shape, x.shape, strict=True)], constant_values=fill)
