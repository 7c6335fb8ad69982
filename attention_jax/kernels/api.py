"""Floor 1: the same mathematics in less time and memory. 'xla' defines what is right; a named one runs or raises."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.errors import UserError, choose
from attention_jax.functional import attend as definition
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended, Memory, project
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup, parameter_names
from attention_jax.kernels import auto, chunked, cudnn, factored, flash, pallas_additive, window
from attention_jax.kernels.sharding import batch_mesh_axis


class Implementation(NamedTuple):
  """One way to compute attention.

  Attributes:
    description: what it does and what for, in one line.
    attend: all queries of one sequence; the signature of `functional.attend.attend`.
    attend_step: one query; the signature of `functional.attend.attend_step`. None where it has no way of its own: one
      query is cheap by the definition.
    unsupported_reason: (score row, alignment row) -> why it cannot compute this pair, '' if it can.
  """

  description: str
  attend: Callable
  attend_step: Callable | None
  unsupported_reason: Callable[[Row, Row], str]


IMPLEMENTATIONS: Mapping[str, Implementation] = {
  'auto': Implementation(
    'the fastest of the others for these sizes on this machine, as measured; else `xla`, or `chunked` where that is '
    'too large',
    auto.attend,
    definition.attend_step,
    auto.unsupported_reason,
  ),
  'xla': Implementation(
    'the formulas as they stand, compiled by XLA: the definition',
    definition.attend,
    definition.attend_step,
    lambda score, alignment: '',
  ),
  'chunked': Implementation(
    'queries in blocks, each computed again for its gradient: of a long sequence, memory grows with T + S, not T S',
    chunked.attend,
    None,
    lambda score, alignment: '',
  ),
  'factored': Implementation(
    'additive scores from exponentials of queries and of keys, in such blocks: no [T, S, F], no tanh of each entry',
    factored.attend,
    None,
    factored.unsupported_reason,
  ),
  'flash': Implementation(
    'products q . k with softmax, block by block, hidden blocks left out: no weights in memory unless asked for',
    flash.attend,
    None,
    flash.unsupported_reason,
  ),
  'cudnn': Implementation(
    "products q . k with softmax by NVIDIA's kernel, in bfloat16 or float16; weights are made beside it where used",
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
  'window': Implementation(
    'local alignments that read nothing but their window: the cost of a query does not grow with S',
    window.attend,
    window.attend_step,
    window.unsupported_reason,
  ),
}


def get_implementation(name: str, score: Row, alignment: Row) -> Implementation:
  """The implementation behind a name. Raises: UserError for other names, and for a pair that it cannot compute."""
  found = IMPLEMENTATIONS[choose(name, IMPLEMENTATIONS, 'implementation')]
  if reason := found.unsupported_reason(score, alignment):
    raise UserError(f"implementation '{name}' cannot compute this: {reason}")
  return found


def attend(
  query: Float[Array, '*B T Dq'],
  key: Float[Array, '*B S Dk'],
  value: Float[Array, '*B S V'],
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

  Queries are scanned in order if the score or the alignment asks for `previous`, `coverage`, `step` or `state`, and
  attended all at once otherwise. Batch axes are vmapped.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, V].
    mask: bool, True = may be attended to; broadcastable to [..., T, S]. A query that may attend to nothing gets zero
      weights, a zero context and zero gradients.
    score, alignment: a spec string such as 'low_rank(rank=16)', a table row, or a function of the same signature.
    params: as `init_params` gives them; 'query' [Dq, F] and 'key' [Dk, F] project when they are there, and query and
      key are taken as already projected when they are not.
    bias: float, broadcastable to [..., T, S], added to the scores before masking; -inf masks.
    rng: a PRNG key, consumed; needed by variants that draw.
    deterministic: test-time behaviour, for variants that have one.
    implementation: a name of IMPLEMENTATIONS. It computes exactly this or raises.
    return_weights: whether to return the weights; they never change the context.

  Returns: Attended(context [..., T, V], weights [..., T, S] float32 or None).
  Raises: UserError (a ValueError) for unknown names and options, shapes that do not fit, missing params.
  """
  score, alignment = lookup(score, SCORES, 'score'), lookup(alignment, ALIGNMENTS, 'alignment')
  params = _checked(params)
  run = get_implementation(implementation, score, alignment).attend
  query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
  batch = _batch_shape(query, key, value)
  full = (*batch, query.shape[-2], key.shape[-2])
  mask = _shared_mask(mask, full)
  bias = None if bias is None else _broadcast('bias', bias, full, jnp.floating)
  if bias is not None:
    mask = (mask if mask.ndim == len(full) else mask[..., None, :]) & ~jnp.isneginf(bias)
  # Hidden before the projection, whose gradient would otherwise meet a NaN behind the mask.
  key = project(definition.zero_masked_memory(Memory(key, value, mask)).key, params, 'key')
  widths = {'query': query.shape[-1], 'key': key.shape[-1]}
  # A score that projects is not told how wide its query and its key were before.
  for kind, row, known in (
    ('score', score, {'features': key.shape[-1]} if score.project else widths),
    ('alignment', alignment, widths),
  ):
    _check_params(kind, row, params[kind], rng, deterministic)
    _check_sizes(kind, row, params[kind], known)
  rngs = None if rng is None else jax.random.split(rng, math.prod(batch)).reshape((*batch, *rng.shape))

  def one(query, key, value, mask, bias, rng):
    given = {'bias': bias, 'rng': rng, 'deterministic': deterministic, 'return_weights': return_weights}
    operands = params, query, Memory(key, value, mask)
    try:
      return run(score, alignment, *operands, **given)
    except UserError:
      raise
    except (TypeError, ValueError):  # the definition says in one line what does not fit
      jax.eval_shape(lambda *operands: definition.attend(score, alignment, *operands, **given), *operands)
      raise

  for axis in reversed(range(len(batch))):
    own = [None if x is None or x.shape[axis] == 1 else 0 for x in (mask, bias)]
    one = jax.vmap(one, in_axes=(0, 0, 0, *own, 0), spmd_axis_name=None if axis else batch_mesh_axis(batch[0]))
  return one(query, key, value, *(_without_ones(x, len(batch)) for x in (mask, bias)), rngs)


def _without_ones(x: Array | None, axes: int) -> Array | None:
  """Without those of the leading axes over which it is the same everywhere."""
  return x if x is None else x.reshape(*(n for n in x.shape[:axes] if n != 1), *x.shape[axes:])


def _batch_shape(query: Array, key: Array, value: Array) -> tuple[int, ...]:
  shapes = f'query {query.shape}, key {key.shape}, value {value.shape}'
  if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (query, key, value)):
    raise UserError(f'attend: query, key and value must be float, got {query.dtype}, {key.dtype}, {value.dtype}')
  if min(query.ndim, key.ndim, value.ndim) < 2:
    raise UserError(f'attend: query is [..., T, Dq], key [..., S, Dk], value [..., S, V]; got {shapes}')
  if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
    raise UserError(f'attend: query, key and value must have the same leading (batch) axes; got {shapes}')
  if key.shape[-2] != value.shape[-2]:
    raise UserError(f'attend: key and value must have the same number of positions S; got {shapes}')
  if not key.shape[-2]:
    raise UserError(f'attend: the memory must have at least one position, masked or not; got {shapes}')
  if not min(x.shape[-1] for x in (query, key, value)):
    raise UserError(f'attend: query, key and value must have at least one feature; got {shapes}')
  return query.shape[:-2]


def _shared_mask(mask, full: tuple[int, ...]) -> Array:
  """The mask [..., S] where all queries have the same, [..., T, S] where each has its own. Batch axes over which it
  is the same everywhere are 1 long."""
  if mask is None:
    return jnp.ones((*(1 for _ in full[:-2]), full[-1]), jnp.bool_)
  # A compiler that knows a large mask would look for what is hidden by itself, and take seconds over it.
  mask = jax.lax.optimization_barrier(jnp.asarray(mask))
  if mask.ndim < 2 or mask.shape[-2] == 1:
    return _broadcast('mask', mask, (*full[:-2], 1, full[-1]), jnp.bool_)[..., 0, :]
  return _broadcast('mask', mask, full, jnp.bool_)


def _broadcast(name: str, array, full: tuple[int, ...], kind) -> Array:
  """With the axes of `full`, of which those of the batch may stay 1 long."""
  array = jnp.asarray(array)
  if not jnp.issubdtype(array.dtype, kind):
    raise UserError(f'attend: {name} must be {jnp.dtype(kind) if kind is jnp.bool_ else "float"}, got {array.dtype}')
  shape = (1,) * (len(full) - array.ndim) + array.shape
  if len(shape) != len(full) or any(own not in (1, size) for own, size in zip(shape, full, strict=True)):
    raise UserError(
      f'attend: {name} {array.shape} does not broadcast to [..., T, S] = {full}; a padding mask [B, S] is mask[:, None]'
    )
  return jnp.broadcast_to(array.reshape(shape), (*shape[:-2], *full[-2:]))


def _checked(params) -> dict[str, Any]:
  """The params with what they leave out. Raises: UserError for what they cannot hold."""
  if not isinstance(params or {}, Mapping):
    raise UserError(f"attend: params must be as init_params gives them, {{'score': {{...}}, ...}}, got {params!r}")
  params = {'score': {}, 'alignment': {}} | dict(params or {})
  for name, given in params.items():
    choose(name, ('score', 'alignment', 'query', 'key'), "entry of attend's params")
    if name in ('score', 'alignment') and not isinstance(given, Mapping):
      raise UserError(f"attend: params['{name}'] must be a dictionary, got {given!r}; init_params(...) makes them")
  return params


def _check_sizes(kind: str, row: Row, given: Mapping, known: Mapping[str, int]) -> None:
  """Raises: UserError for a learned parameter that is not of its sizes; one number would stand for all."""
  known = dict(known)
  for name, param in row.params.items():
    shape, parts = jnp.shape(given[name]), [size.split('+') for size in param.shape]
    wanted = [sum(known[part] for part in some) if known.keys() >= set(some) else None for some in parts]
    if len(shape) != len(wanted) or any(n not in (None, own) for n, own in zip(wanted, shape, strict=True)):
      said = ', '.join(size if n is None else f'{size} = {n}' for size, n in zip(param.shape, wanted, strict=True))
      raise UserError(f"attend: params['{kind}']['{name}'] must be [{said}], got {list(shape)}")
    known = {size: n for size, n in zip(param.shape, shape, strict=True)} | known


def _check_params(kind: str, row: Row, given: Mapping, rng, deterministic: bool) -> None:
  wanted = set(parameter_names(row))
  if wanted != set(given):
    raise UserError(
      f"attend: params['{kind}'] must hold {sorted(wanted)}, got {sorted(given)}; init_params(...) makes them"
    )
  if 'rng' in row.required_inputs and rng is None and not (deterministic and row.at_test):
    raise UserError(f'attend: this {kind} draws at random; give rng, a PRNG key')
