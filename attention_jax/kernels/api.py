"""`attend` and the table of its implementations: 'xla' is the definition, and the others compute the same function."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from attention_jax.annotations import Array, Bool, Float
from attention_jax.errors import UserError, choose
from attention_jax.functional import attend as definition
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, AttendedWithLogSum, Memory, Problem, project, without_key
from attention_jax.functional.lifting import Axes
from attention_jax.functional.mask import CORE_AXES, Mask, align_mask, as_mask
from attention_jax.functional.masking import float_array
from attention_jax.functional.params import check_variants, normalize_params, param_ranks
from attention_jax.functional.programs import call_as_program
from attention_jax.functional.rngs import check_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import POSITIONS, Row, SoftmaxForm, lookup
from attention_jax.kernels import auto, chunked, cudnn, factored, flash, linear, pallas_additive, splash, window
from attention_jax.kernels.sharding import batch_mesh_axis, explicit_axes_error, has_explicit_axes, shard_alike


class Implementation(NamedTuple):
  """One way to compute attention.

  Attributes:
    description: its method and its purpose, in one line.
    attend_batch: (problem, axes) -> Attended: attends with all queries, of all leading axes; see `functional.lifting`.
      Made by `functional.attend.lifted` for a method that computes one sequence of one head at a time.
    attend_step: attends with one query; has the signature of `functional.attend.attend_step`. None if the
      implementation has no method for single queries: the module Attention then uses the definition, or raises for a
      decoder that attends inside its recurrence, see `Attention.check_step_support`.
    unsupported_reason: (score row, alignment row) -> the reason why it cannot compute this pair, '' if it can.
  """

  description: str
  attend_batch: Callable[[Problem, Axes], Attended]
  attend_step: Callable | None
  unsupported_reason: Callable[[Row, Row], str]


IMPLEMENTATIONS: Mapping[str, Implementation] = {
  'auto': Implementation(
    'one of the others, by sizes and platform: on CPUs the fastest, as measured; on accelerators by estimates of time '
    'and memory; `chunked` where `xla` would store a large array [T, S, F]',
    auto.attend_batch,
    auto.attend_step,
    auto.unsupported_reason,
  ),
  'xla': Implementation(
    'the definition: the formulas, compiled by XLA',
    definition.attend_batch,
    definition.attend_step,
    lambda score, alignment: '',
  ),
  'chunked': Implementation(
    'blocks of queries, recomputed for the gradient: for long sequences, memory is linear in T + S, not T S',
    chunked.attend_batch,
    None,
    lambda score, alignment: '',
  ),
  'factored': Implementation(
    'additive scores from exponentials of queries and of keys, in blocks: [T, S, F] is never stored, and tanh is '
    'computed for its entries only if the keys have a very wide range',
    factored.attend_batch,
    None,
    factored.unsupported_reason,
  ),
  'flash': Implementation(
    'products q . k with a form of softmax, block by block, skipping masked blocks: no weights in memory unless '
    'requested',
    flash.attend_batch,
    None,
    flash.unsupported_reason,
  ),
  'cudnn': Implementation(
    "products q . k with softmax by NVIDIA's cuDNN kernel, in bfloat16 or float16; weights, if used, by the definition",
    cudnn.attend_batch,
    None,
    cudnn.unsupported_reason,
  ),
  'splash': Implementation(
    'products q . k with softmax, a soft cap or a sink by the splash kernel of jax, on a TPU: no array [T, S]',
    splash.attend_batch,
    None,
    splash.unsupported_reason,
  ),
  'pallas_additive': Implementation(
    'additive scores with softmax in Pallas, on a GPU or a TPU: [T, S, F] never leaves fast memory',
    pallas_additive.attend_batch,
    None,
    pallas_additive.unsupported_reason,
  ),
  'linear': Implementation(
    'weights proportional to products q . k >= 0, with sums over positions that all queries share, if these have one '
    'mask and weights are not requested',
    linear.attend_batch,
    None,
    linear.unsupported_reason,
  ),
  'window': Implementation(
    'local alignments that read only their window: the cost of scores and contexts does not grow with S',
    window.attend_batch,
    window.attend_step,
    window.unsupported_reason,
  ),
}


def get_implementation(name: str, score: Row, alignment: Row) -> Implementation:
  """Returns the implementation of that name.

  Args:
    name: a key of IMPLEMENTATIONS.
    score, alignment: the pair that it is to compute.

  Raises:
    UserError: for an unknown name, and for a pair that the implementation does not support.
  """
  implementation = IMPLEMENTATIONS[choose(name, IMPLEMENTATIONS, 'implementation')]
  if reason := implementation.unsupported_reason(score, alignment):
    raise UserError(f"implementation '{name}' cannot compute this: {reason}")
  return implementation


def supported_implementations(score: Row, alignment: Row) -> list[str]:
  """Returns the names of the implementations that compute this pair."""
  return [name for name, row in IMPLEMENTATIONS.items() if not row.unsupported_reason(score, alignment)]


def attend(
  query: Float[Array, '... T Dq'],
  key: Float[Array, '... S Dk'],
  value: Float[Array, '... S V'],
  mask: Mask | Bool[Array, '...'] | None = None,
  *,
  score: str | Row | Callable = 'scaled_dot',
  alignment: str | Row | Callable = 'softmax',
  params: Mapping | None = None,
  bias: Float[Array, '...'] | Row | Callable | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
  implementation: str = 'xla',
  return_weights: bool = True,
  return_log_sum: bool = False,
) -> Attended | AttendedWithLogSum:
  """weights = alignment(score(query, key) + bias, mask); context = weights @ value.

  Queries are scanned in order if the score or the alignment takes `previous`, `coverage`, `step` or `state`; otherwise
  they are computed independently. Implementation 'window' never scans. Batch axes are vmapped.

  Args:
    query: [..., T, Dq]; the leading axes of query, key and value broadcast to each other. The last one may also have N
      heads of queries and G of keys and values, where G divides N: each is shared by N / G successive heads, without
      copies (Ainslie et al. 2023).
    key: [..., S, Dk].
    value: [..., S, V].
    mask: a Mask, or bool, True = may be attended to; broadcastable to [..., T, S]. An array of two axes is [T, S], also
      where B = T; pass a padding mask [B, S] as mask[:, None], and lengths [B] of queries [B, N, T, Dq] as
      Mask.lengths(lengths[:, None]). A query whose positions are all masked gets zero weights, a zero context and zero
      gradients. Keys and values that are masked for all queries of a sequence may be NaN; those that are masked for
      some queries must be finite: 0 times a NaN would be a NaN.
    score, alignment: a spec string such as 'low_rank(rank=16)', a table row, or a function with the arguments of a
      row's `fn`.
    params: parameters as returned by `init_params`. The entries 'query' [Dq, F] and 'key' [Dk, F], if present, project
      query and key. Without them, scores with `Row.project`, such as 'additive', expect both already projected. A
      parameter may have more axes than its row declares: they come first and broadcast to the leading axes of query,
      key and value, as in {'alignment': {'sink': ...}} with a sink [N] for N heads.
    bias: float, broadcastable to [..., T, S], added to the scores before masking; -inf masks. Or a function of
      positions, or a table row of one: f(*, query_position [], key_position [S], ...) -> [S]. Its learned parameters
      are params['bias']. Kernels that support it, such as 'flash', store no array [T, S] for it.
    rng: a PRNG key, consumed. Variants that sample require it, unless `deterministic` replaces them by a test-time
      counterpart.
    deterministic: whether to use the test-time behaviour of variants that have one.
    implementation: a key of IMPLEMENTATIONS; every one computes this function, up to rounding, or raises. Only 'xla'
      has second derivatives and forward mode (jax.hessian, jax.jvp, jax.jacfwd, jax.linearize) for every pair. 'auto'
      has first derivatives in reverse mode alone (jax.grad, jax.vjp, jax.jacrev), at every size: it raises UserError
      for others, in the call if that is eager and under jax.jit during the compilation.
    return_weights: whether to return the weights; does not affect the context.
    return_log_sum: whether to return log Σ exp of the scores that a form of softmax normalises, without a sink.

  Positions, which scores, alignments and biases may take as `query_position` and `key_position`, are 0 ... T - 1, plus
  the offset of a Mask, and 0 ... S - 1.

  Returns:
    Attended(context [..., T, V], weights [..., T, S] or None). Weights are float32 or, for float64 inputs, float64.
    With `return_log_sum`, AttendedWithLogSum: log_sum [..., T] follows, -inf for a query without positions.

  Raises:
    UserError: (a ValueError) for unknown names and options, dtypes and shapes that do not match, missing or unknown
      params, a missing rng, and inputs that the implementation does not support.
  """
  check_rng('attend', rng)
  score = lookup(score, SCORES, 'score')
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  rows = {'score': score, 'alignment': alignment}
  if isinstance(bias, Row) or callable(bias):
    rows['bias'] = _check_bias_row(bias if isinstance(bias, Row) else Row(bias))
    bias = None
  if return_log_sum and not isinstance(alignment.form, SoftmaxForm):
    expected = ', '.join(name for name, row in ALIGNMENTS.items() if isinstance(row.form, SoftmaxForm))
    raise UserError(f'attend: return_log_sum needs a form of softmax, without an edit; expected one of: {expected}')
  params = normalize_params('attend', params, tuple(rows))
  attend_batch = get_implementation(implementation, score, alignment).attend_batch
  operands = {'query': query, 'key': key, 'value': value}
  operands = {name: float_array('attend', name, array) for name, array in operands.items()}
  mask = as_mask('attend', mask)
  bias = None if bias is None else jnp.asarray(bias)
  static = (attend_batch, *rows.values(), *(None,) * (3 - len(rows)), deterministic, return_weights, return_log_sum)
  if groups := _groups_of_heads(*operands.values()):
    query, key, value = operands.values()
    operands = (_split_heads(query, groups, 2), _split_heads(key, groups, 2), _split_heads(value, groups, 2))
    leaves = {name: _split_heads(getattr(mask, name), groups, core) for name, core in CORE_AXES.items()}
    mask, bias = dataclasses.replace(mask, **leaves), _split_heads(bias, groups, 2)
    ranks = param_ranks(params, rows)
    params = jax.tree.map(lambda x, rank: _split_heads(jnp.asarray(x), groups, rank, query.shape[-3]), params, ranks)
    attended = call_as_program(_attend_batch, static, params, *operands, mask, bias, rng)
    axis = attended.context.ndim - 4
    return jax.tree.map(lambda x: jax.lax.collapse(x, axis, axis + 2), attended)
  return call_as_program(_attend_batch, static, params, *operands.values(), mask, bias, rng)


def _groups_of_heads(query: Array, key: Array, value: Array) -> int:
  """The number G of heads of keys and values, if there are more heads of queries and G divides them; otherwise 0."""
  if min(query.ndim, key.ndim, value.ndim) < 3:
    return 0
  heads, *sizes = (x.shape[-3] for x in (query, key, value))
  if not all(isinstance(size, int) for size in (heads, *sizes)):  # symbolic
    return 0
  groups = max(sizes)
  return groups if 1 < groups < heads and heads % groups == 0 and {*sizes} <= {1, groups} else 0


def _check_bias_row(row: Row) -> Row:
  """Returns the row of a bias. Raises UserError for arguments other than positions and learned parameters."""
  arguments = inspect.signature(row.fn).parameters.values()
  others = [p.name for p in arguments if p.kind is not p.KEYWORD_ONLY] + sorted(row.required_inputs - POSITIONS)
  if others:
    expected = 'query_position, key_position and learned parameters'
    raise UserError(f'attend: a bias that is a function takes only {expected}, by keyword; got {", ".join(others)}')
  return row


def _split_heads(x: Array | None, groups: int, core: int, heads: int | None = None) -> Array | None:
  """Splits the axis of heads, before the last `core` axes, into [G, N / G]; an array without it stays as it is.

  With `heads`, the number N, so does an array with an axis of another length than 1, G or N.
  """
  if x is None or x.ndim <= core:
    return x
  axis = x.ndim - core - 1
  size = x.shape[axis]
  if heads is not None and size not in (1, groups, heads):
    return x
  shape = (size, 1) if size in (1, groups) else (groups, size // groups)
  return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])


def _attend_batch(
  attend_batch: Callable[[Problem, Axes], Attended],
  score: Row,
  alignment: Row,
  bias_row: Row | None,
  deterministic: bool,
  return_weights: bool,
  return_log_sum: bool,
  params: Mapping,
  query: Array,
  key: Array,
  value: Array,
  mask: Mask,
  bias: Array | None,
  rng: jax.Array | None,
) -> Attended:
  """Checks shapes, and attends with all batch axes; arguments: see `attend`."""
  batch = _batch_shape(query, key, value)
  query, key, value = (x.reshape(*(1 for _ in range(len(batch) + 2 - x.ndim)), *x.shape) for x in (query, key, value))
  num_queries, size = query.shape[-2], key.shape[-2]
  # The barrier prevents XLA from constant-folding a large mask, which takes seconds.
  mask = align_mask('attend', jax.lax.optimization_barrier(mask), batch, num_queries, size)
  if bias is not None:
    bias = align_bias('attend', bias, (*batch, num_queries, size))
  # Masked keys are zeroed before the projection: a NaN at a masked position would make its gradient NaN.
  unmasked = mask if bias is None else mask & ~jnp.isneginf(bias)
  memory = definition.zero_masked_memory(Memory(key, value, unmasked), num_queries)._replace(mask=mask)
  rows = {'score': score, 'alignment': alignment} | ({'bias': bias_row} if bias_row else {})
  ranks = param_ranks(params, rows)
  aligned = jax.tree.map(lambda x, rank: _with_batch_axes(jnp.asarray(x), rank, len(batch)), params, ranks)
  key = project(memory.key, params if jnp.ndim(params.get('key', 0)) == 2 else aligned, 'key')
  widths = {'query': query.shape[-1], 'key': key.shape[-1], 'value': value.shape[-1]}
  check_variants('attend', rows, params, widths, rng, deterministic, batch)
  rngs = None if rng is None else jax.random.split(rng, math.prod(batch)).reshape((*batch, *rng.shape))
  operands = shard_alike((query, memory._replace(key=key), bias, rngs), len(batch))
  query, memory, bias, rngs = operands
  if bias_row:
    bias = Partial(functools.partial(_call_bias, bias_row), **aligned.pop('bias'))
  problem = Problem(
    score, alignment, without_key(aligned), query, memory, bias, rngs, deterministic, return_weights, return_log_sum
  )
  mesh_axis = batch_mesh_axis(batch[0]) if batch else None
  axes = [{'spmd_axis_name': mesh_axis} if mesh_axis and axis == 0 else {} for axis in range(len(batch))]
  return _attend_checked(attend_batch, problem, axes)


def _call_bias(row: Row, *, query_position: Array, key_position: Array, **params: Array) -> Array:
  """Calls the function of a bias with those of both positions that it takes."""
  positions = {'query_position': query_position, 'key_position': key_position}
  return row.fn(**{name: positions[name] for name in row.required_inputs}, **params)


def _with_batch_axes(x: Array, rank: int, num_axes: int) -> Array:
  """A parameter with `rank` axes after `num_axes` leading ones, of length 1 where it lacks them."""
  return x.reshape(*(1 for _ in range(num_axes - max(0, x.ndim - rank))), *x.shape)


def _attend_checked(attend_batch: Callable[[Problem, Axes], Attended], problem: Problem, axes: Axes) -> Attended:
  """Calls `attend_batch` of an implementation; an error of jax, such as shapes that do not match, is a UserError.

  Args:
    attend_batch: `Implementation.attend_batch`.
    problem, axes: its arguments.
  """
  try:
    return attend_batch(problem, axes)
  except UserError:
    raise
  except Exception as error:  # jax has no public type for errors of shardings
    # The definition reports in one line which shapes do not match.
    jax.eval_shape(lambda: definition.attend_batch(problem, axes))
    if has_explicit_axes():
      raise explicit_axes_error() from error
    raise


def _batch_shape(query: Array, key: Array, value: Array) -> tuple[int, ...]:
  """The shape of the batch axes. Raises UserError for shapes that do not match."""
  shapes = f'query {query.shape}, key {key.shape}, value {value.shape}'
  if min(query.ndim, key.ndim, value.ndim) < 2:
    raise UserError(f'attend: query must be [..., T, Dq], key [..., S, Dk] and value [..., S, V], got {shapes}')
  if key.shape[-2] != value.shape[-2]:
    raise UserError(f'attend: key and value must have the same number of positions S, got {shapes}')
  if not key.shape[-2]:
    raise UserError(f'attend: the memory must have at least one position, masked or not, got {shapes}')
  if not min(x.shape[-1] for x in (query, key, value)):
    raise UserError(f'attend: query, key and value must have at least one feature, got {shapes}')
  try:
    return jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
  except ValueError:
    raise UserError(
      f'attend: the leading (batch) axes of query, key and value must broadcast to each other, got {shapes}'
    ) from None


def align_bias(caller: str, bias: Array, shape: tuple[int, ...]) -> Array:
  """Returns a bias as [..., T, S] with all batch axes, of length 1 where it is shared.

  Args:
    caller: name of the caller, with which error messages begin.
    bias: float, broadcastable to `shape`.
    shape: [..., T, S].

  Raises:
    UserError: for another shape or dtype.
  """
  bias = float_array(caller, 'bias', bias)
  aligned = (1,) * (len(shape) - bias.ndim) + bias.shape
  if len(aligned) != len(shape) or any(n not in (1, size) for n, size in zip(aligned, shape, strict=True)):
    new_axes = ', '.join(['None'] * (len(shape) - 2))  # for T and all batch axes but the first
    hint = f'; pass a bias [B, S] as bias[:, {new_axes}]' if len(shape) > 2 else ''
    raise UserError(f'{caller}: bias {bias.shape} does not broadcast to [..., T, S] = {shape}{hint}')
  return jnp.broadcast_to(bias.reshape(aligned), (*aligned[:-2], *shape[-2:]))
