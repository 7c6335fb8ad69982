"""`attend` and the table of its implementations: 'xla' is the definition, and the others compute the same function."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float
from attention_jax.errors import UserError, choose
from attention_jax.functional import attend as definition
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Memory, Problem, project, without_key
from attention_jax.functional.masking import float_array
from attention_jax.functional.params import check_variants, normalize_params
from attention_jax.functional.programs import call_as_program
from attention_jax.functional.rngs import check_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup
from attention_jax.kernels import auto, chunked, cudnn, factored, flash, linear, pallas_additive, window
from attention_jax.kernels.sharding import batch_mesh_axis, explicit_axes_error, has_explicit_axes, shard_alike


class Implementation(NamedTuple):
  """One way to compute attention.

  Attributes:
    description: its method and its purpose, in one line.
    attend: attends with all queries of one sequence.
    attend_step: attends with one query; has the signature of `functional.attend.attend_step`. None if the
      implementation has no method for single queries: the module Attention then uses the definition, or raises for a
      decoder that attends inside its recurrence, see `Attention.check_step_support`.
    unsupported_reason: (score row, alignment row) -> the reason why it cannot compute this pair, '' if it can.
  """

  description: str
  attend: Callable[[Problem], Attended]
  attend_step: Callable | None
  unsupported_reason: Callable[[Row, Row], str]


IMPLEMENTATIONS: Mapping[str, Implementation] = {
  'auto': Implementation(
    'one of the others, by sizes and platform: on CPUs the fastest, as measured; on accelerators by estimates of time '
    'and memory; `chunked` where `xla` would store a large array [T, S, F]',
    auto.attend,
    auto.attend_step,
    auto.unsupported_reason,
  ),
  'xla': Implementation(
    'the definition: the formulas, compiled by XLA',
    definition.attend,
    definition.attend_step,
    lambda score, alignment: '',
  ),
  'chunked': Implementation(
    'blocks of queries, recomputed for the gradient: for long sequences, memory is linear in T + S, not T S',
    chunked.attend,
    None,
    lambda score, alignment: '',
  ),
  'factored': Implementation(
    'additive scores from exponentials of queries and of keys, in blocks: [T, S, F] is never stored, and tanh is '
    'computed for its entries only if the keys have a very wide range',
    factored.attend,
    None,
    factored.unsupported_reason,
  ),
  'flash': Implementation(
    'products q . k with a form of softmax, block by block, skipping masked blocks: no weights in memory unless '
    'requested',
    flash.attend,
    None,
    flash.unsupported_reason,
  ),
  'cudnn': Implementation(
    "products q . k with softmax by NVIDIA's cuDNN kernel, in bfloat16 or float16; weights, if used, by the definition",
    cudnn.attend,
    None,
    cudnn.unsupported_reason,
  ),
  'pallas_additive': Implementation(
    'additive scores with softmax in Pallas, on a GPU or a TPU: [T, S, F] never leaves fast memory',
    pallas_additive.attend,
    None,
    pallas_additive.unsupported_reason,
  ),
  'linear': Implementation(
    'weights proportional to products q . k >= 0, with sums over positions that all queries share, if these have one '
    'mask and weights are not requested',
    linear.attend,
    None,
    linear.unsupported_reason,
  ),
  'window': Implementation(
    'local alignments that read only their window: the cost of scores and contexts does not grow with S',
    window.attend,
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
  mask: Bool[Array, '...'] | None = None,
  *,
  score: str | Row | Callable = 'scaled_dot',
  alignment: str | Row | Callable = 'softmax',
  params: Mapping | None = None,
  bias: Float[Array, '...'] | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
  implementation: str = 'xla',
  return_weights: bool = True,
) -> Attended:
  """weights = alignment(score(query, key) + bias, mask); context = weights @ value.

  Queries are scanned in order if the score or the alignment takes `previous`, `coverage`, `step` or `state`; otherwise
  they are computed independently. Implementation 'window' never scans. Batch axes are vmapped.

  Args:
    query: [..., T, Dq]; the leading axes of query, key and value broadcast to each other.
    key: [..., S, Dk].
    value: [..., S, V].
    mask: bool, True = may be attended to; broadcastable to [..., T, S]. A mask of two axes is read as [T, S], also
      where B = T; pass a padding mask [B, S] as mask[:, None]. A query whose positions are all masked gets zero
      weights, a zero context and zero gradients. Keys and values that are masked for all queries of a sequence may be
      NaN; those that are masked for some queries must be finite: 0 times a NaN would be a NaN.
    score, alignment: a spec string such as 'low_rank(rank=16)', a table row, or a function with the arguments of a
      row's `fn`.
    params: parameters as returned by `init_params`. The entries 'query' [Dq, F] and 'key' [Dk, F], if present, project
      query and key. Without them, scores with `Row.project`, such as 'additive', expect both already projected.
    bias: float, broadcastable to [..., T, S], added to the scores before masking; -inf masks.
    rng: a PRNG key, consumed. Variants that sample require it, unless `deterministic` replaces them by a test-time
      counterpart.
    deterministic: whether to use the test-time behaviour of variants that have one.
    implementation: a key of IMPLEMENTATIONS; every one computes this function, up to rounding, or raises. Only 'xla'
      has second derivatives and forward mode (jax.hessian, jax.jvp, jax.jacfwd, jax.linearize) for every pair. 'auto'
      has first derivatives in reverse mode alone (jax.grad, jax.vjp, jax.jacrev), at every size: it raises UserError
      for others, in the call if that is eager and under jax.jit during the compilation.
    return_weights: whether to return the weights; does not affect the context.

  Returns:
    Attended(context [..., T, V], weights [..., T, S] or None). Weights are float32 or, for float64 inputs, float64.

  Raises:
    UserError: (a ValueError) for unknown names and options, dtypes and shapes that do not match, missing or unknown
      params, a missing rng, and inputs that the implementation does not support.
  """
  check_rng('attend', rng)
  score = lookup(score, SCORES, 'score')
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  params = normalize_params('attend', params)
  attend_sequence = get_implementation(implementation, score, alignment).attend
  operands = {'query': query, 'key': key, 'value': value}
  operands = {name: float_array('attend', name, array) for name, array in operands.items()}
  mask, bias = (array if array is None else jnp.asarray(array) for array in (mask, bias))
  static = (attend_sequence, score, alignment, deterministic, return_weights)
  return call_as_program(_attend_batch, static, params, *operands.values(), mask, bias, rng)


def _attend_batch(
  attend_sequence: Callable,
  score: Row,
  alignment: Row,
  deterministic: bool,
  return_weights: bool,
  params: Mapping,
  query: Array,
  key: Array,
  value: Array,
  mask: Array | None,
  bias: Array | None,
  rng: jax.Array | None,
) -> Attended:
  """Checks shapes, and vmaps `attend` of an implementation over the batch axes; arguments: see `attend`."""
  batch = _batch_shape(query, key, value)
  query = jnp.broadcast_to(query, (*batch, *query.shape[-2:]))
  key = _add_batch_axes(key, len(batch))
  value = _add_batch_axes(value, len(batch))
  weights_shape = (*batch, query.shape[-2], key.shape[-2])
  mask = _reshape_mask(mask, weights_shape)
  if bias is not None:
    bias = _align('bias', bias, weights_shape, jnp.floating)
    bias = jnp.broadcast_to(bias, (*bias.shape[:-2], *weights_shape[-2:]))
    mask = (mask if mask.ndim == len(weights_shape) else mask[..., None, :]) & ~jnp.isneginf(bias)
  # Masked keys are zeroed before the projection: a NaN at a masked position would make its gradient NaN.
  key = project(definition.zero_masked_memory(Memory(key, value, mask)).key, params, 'key')
  params = without_key(params)
  rows = {'score': score, 'alignment': alignment}
  widths = {'query': query.shape[-1], 'key': key.shape[-1], 'value': value.shape[-1]}
  check_variants('attend', rows, params, widths, rng, deterministic)
  rngs = None if rng is None else jax.random.split(rng, math.prod(batch)).reshape((*batch, *rng.shape))
  query, key, value, mask, bias, rngs = shard_alike((query, key, value, mask, bias, rngs), len(batch))

  def attend_one(query, key, value, mask, bias, rng):
    memory = Memory(key, value, mask)
    problem = Problem(score, alignment, params, query, memory, bias, rng, deterministic, return_weights)
    try:
      return attend_sequence(problem)
    except UserError:
      raise
    except Exception as error:  # jax has no public type for errors of shardings
      # The definition reports in one line which shapes do not match.
      jax.eval_shape(lambda: definition.attend(problem))
      if has_explicit_axes():
        raise explicit_axes_error() from error
      raise

  shared_key_axes = _shared_axes(key, batch)
  shared_value_axes = _shared_axes(value, batch)
  attend_batch = attend_one
  for axis in reversed(range(len(batch))):
    memory_axes = (None if axis in shared else 0 for shared in (shared_key_axes, shared_value_axes))
    in_axes = (0, *memory_axes, _vmap_axis(mask, axis), _vmap_axis(bias, axis), 0)
    mesh_axis = batch_mesh_axis(batch[0]) if axis == 0 else None
    attend_batch = jax.vmap(attend_batch, in_axes=in_axes, spmd_axis_name=mesh_axis)
  key = jnp.squeeze(key, shared_key_axes)
  value = jnp.squeeze(value, shared_value_axes)
  mask = _squeeze_shared_axes(mask, len(batch))
  bias = _squeeze_shared_axes(bias, len(batch))
  return attend_batch(query, key, value, mask, bias, rngs)


def _shared_axes(x: Array, batch: tuple[int, ...]) -> tuple[int, ...]:
  """Batch axes along which several queries share keys or values."""
  return tuple(axis for axis, size in enumerate(batch) if x.shape[axis] == 1 != size)


def _add_batch_axes(x: Array, batch_axes: int) -> Array:
  """Adds leading batch axes of length 1, along which an array is shared."""
  return x.reshape(*(1 for _ in range(batch_axes + 2 - x.ndim)), *x.shape)


def _vmap_axis(x: Array | None, axis: int) -> int | None:
  """in_axes of jax.vmap over a batch axis: None where the array is shared along it."""
  return None if x is None or x.shape[axis] == 1 else 0


def _squeeze_shared_axes(x: Array | None, batch_axes: int) -> Array | None:
  """Removes the batch axes of length 1, along which the array is shared."""
  if x is None:
    return None
  batch = (n for n in x.shape[:batch_axes] if n != 1)
  return x.reshape(*batch, *x.shape[batch_axes:])


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


def _reshape_mask(mask, weights_shape: tuple[int, ...]) -> Array:
  """The mask as [..., S] if all queries share it, else as [..., T, S]; batch axes that share it have length 1."""
  *batch, _, size = weights_shape
  if mask is None:
    return jnp.ones((*(1 for _ in batch), size), jnp.bool_)
  # Prevents XLA from constant-folding a large mask, which takes seconds.
  mask = _align('mask', jax.lax.optimization_barrier(mask), weights_shape, jnp.bool_)
  if mask.shape[-2] == 1:
    return jnp.broadcast_to(mask[..., 0, :], (*mask.shape[:-2], size))
  return jnp.broadcast_to(mask, (*mask.shape[:-2], *weights_shape[-2:]))


def _align(name: str, array, shape: tuple[int, ...], dtype) -> Array:
  """Adds leading axes of length 1. Raises UserError unless the array has type `dtype` and broadcasts to `shape`."""
  if not jnp.issubdtype(array.dtype, dtype):
    raise UserError(f'attend: {name} must be {"bool" if dtype is jnp.bool_ else "float"}, got {array.dtype}')
  aligned = (1,) * (len(shape) - array.ndim) + array.shape
  if len(aligned) != len(shape) or any(n not in (1, size) for n, size in zip(aligned, shape, strict=True)):
    hint = ''
    if len(shape) > 2:
      new_axes = ', '.join(['None'] * (len(shape) - 2))  # for T and all batch axes but the first
      hint = f'; pass a {"padding mask" if name == "mask" else name} [B, S] as {name}[:, {new_axes}]'
    raise UserError(f'attend: {name} {array.shape} does not broadcast to [..., T, S] = {shape}{hint}')
  return array.reshape(aligned)
