"""Implementation 'pallas_additive': additive attention with softmax, one Pallas kernel source for GPU and TPU.

A program holds tanh(q + k) for a tile of queries, keys and features in fast memory, and nowhere else does an array
[T, S, F] exist. Forward the softmax is taken online, while a block of queries walks over a span of keys: scores are not
written unless weights are asked for. Spans make programs enough for a GPU where sequences are few, and let the keys of
one fit into a TPU's memory; their results, [S / span, T, V], are put together at the end.

Backward the weights are computed again from the greatest score of each query and the sum of its exponentials, and stand
in memory, [T, S], with the scores' gradient. With that, sums over keys and sums over queries are two runs of one
kernel, without atomic additions, the same bits every time. An entry costs three tanh there; kernels that also computed
its score each for itself would need four. A score's offset shifts all positions alike, which a softmax does not see: it
has no part in this.

Dropout multiplies weights by factors [T, S] that are drawn before, the same as the definition draws.

Inside, everything is float32. On a CPU it runs only under `compile_for('interpret')`, for tests.
Derivatives of the gradient are not offered.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from attention_jax.errors import UserError, choose
from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Memory, score_terms, zero_masked_memory
from attention_jax.functional.dense import softmax, softmax_temperature, strip_options
from attention_jax.functional.dropout import differs_at_test, dropout_factors, strip_dropout
from attention_jax.functional.masking import min_finite, vary_like, zero_masked
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels.sharding import shard_over_rows


class Tile(NamedTuple):
  """How much a program takes: queries and, in each of its steps, keys and features; in all its steps, `span` keys.

  All are powers of 2, because a GPU asks for it, whose products also need 16 rows.
  """

  queries: int
  keys: int
  features: int
  span: int

  def spans(self, size: int) -> tuple[int, int]:
    """How many spans there are over `size` keys, as even as can be, and the keys of each: whole steps."""
    spans = -(-size // self.span)
    return spans, _up(-(-size // spans), self.keys)


class Target(NamedTuple):
  """What programs are made for: their tile, and the compiler's options where its default would not do."""

  tile: Tile
  options: Any = None


# A GPU keeps a tile in registers, a TPU in vector memory with features in its 128 lanes.
TARGETS: Mapping[str, Target] = {
  'gpu': Target(Tile(16, 16, 32, 256), triton.CompilerParams(num_warps=8)),
  'tpu': Target(Tile(8, 128, 128, 512)),
  'interpret': Target(Tile(16, 16, 16, 32)),
}
_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar('pallas_target', default=None)


@contextlib.contextmanager
def compile_for(name: str) -> Iterator[None]:
  """What is traced inside is made for this row of TARGETS, whatever this machine has: tests, compiling ahead."""
  token = _chosen.set(choose(name, TARGETS, 'target of Pallas'))
  try:
    yield
  finally:
    _chosen.reset(token)


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed so, here; '' if it can."""
  if not isinstance(score.form, TanhSum):
    return 'the score is not v . tanh(q + k) with q of the query and k of the key alone'
  if strip_options(strip_dropout(alignment)) is not softmax or differs_at_test(alignment):
    return 'the alignment is not softmax'
  if kernel_platform() not in TARGETS:
    return f'needs a GPU or a TPU, this machine has {kernel_platform()}'
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
  """As functional.attend. Raises: UserError for float64, which the kernels would round."""
  if jnp.float64 in (query.dtype, memory.key.dtype, memory.value.dtype):
    raise UserError("implementation 'pallas_additive' computes in float32; give it no float64, or take 'factored'")
  if not query.shape[0]:
    return definition.attend(score, alignment, params, query, memory, bias=bias, rng=rng, deterministic=deterministic)
  memory = zero_masked_memory(memory)
  q, k, v, _ = score_terms(score.form.fn, params, query, memory)
  scale = 1 / jnp.asarray(softmax_temperature(strip_dropout(alignment)), jnp.float32)
  mask = memory.mask if memory.mask.ndim == 2 else memory.mask[None]
  barred = jnp.where(mask, 0.0, -jnp.inf)
  if bias is not None:
    mask = mask & ~jnp.isneginf(bias)
    barred = jnp.where(mask, zero_masked(bias, mask).astype(jnp.float32) * scale, -jnp.inf)
  factors = None if deterministic else dropout_factors(alignment, rng, q.shape[0], k.shape[0])
  plan = Plan(kernel_platform(), return_weights, bias is not None, factors is not None)
  factors = jnp.ones((1, 1)) if factors is None else factors
  given = [jnp.asarray(x, jnp.float32) for x in (q, k, v * scale, barred, factors, memory.value)]
  nothing = vary_like(jnp.zeros(()), *given)  # shard_map: all arrays of a kernel vary over the same axes of the mesh
  given = [x + nothing for x in given]
  context, weights = attended(plan, *given)
  return Attended(context.astype(memory.value.dtype), weights)


def kernel_platform() -> str:
  """What kernels are made for: what this machine has, unless `compile_for` says otherwise."""
  return _chosen.get() or jax.default_backend()


class Plan(NamedTuple):
  """What is fixed when a program is made.

  Attributes: target, a row of TARGETS; whether weights are wanted, bias has a gradient, weights are dropped.
  """

  target: str
  weights: bool
  biased: bool
  dropout: bool

  @property
  def tile(self) -> Tile:
    return TARGETS[self.target].tile

  def run(self, kernel: Callable, grid: tuple[int, ...], ins: list, outs: list) -> list[jax.Array]:
    """kernel over a grid; ins: (array, block, index), outs: (shape, block, index), all outs float32."""
    varying = jax.typeof(ins[0][0]).manual_axis_type
    specs = lambda blocks: [pl.BlockSpec(block, index) for _, block, index in blocks]
    program = pl.pallas_call(
      functools.partial(kernel, self.tile),
      out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying) for shape, _, _ in outs],
      grid=grid,
      in_specs=specs(ins),
      out_specs=specs(outs),
      compiler_params=TARGETS[self.target].options,
      interpret=self.target == 'interpret',
    )
    return shard_over_rows(program)(*(array for array, _, _ in ins))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(plan: Plan, q, k, v, barred, factors, value) -> tuple[jax.Array, jax.Array | None]:
  """weights = factors · softmax over s of v · tanh(q + k) + barred; context = weights @ value. All float32.

  Args: q [T, F], k [S, F], v [F], barred [T, S] or, for all queries, [1, S]: the bias, -inf where masked; factors
    [T, S], of dropout, which have no gradient, or anything where the plan has none; value [S, V].
  Returns: context [T, V], weights [T, S] or None.
  """
  return _forward(plan, q, k, v, barred, factors, value)[0]


def _forward(plan: Plan, q, k, v, barred, factors, value):
  """Each program has a block of queries and a span of keys; what comes of the spans is then put together."""
  rows = plan.tile.queries
  spans, span = plan.tile.spans(k.shape[0])
  padded, (queries, keys, features) = _padded(plan.tile, q, k, v, barred)
  width = _power(value.shape[1], plan.tile.features)
  mine, other = lambda t, s: (t, 0), lambda t, s: (s, 0)
  ins = [
    (padded[0], (rows, features), mine),
    (padded[1], (span, features), other),
    (padded[2], (1, features), lambda t, s: (0, 0)),
    (padded[3], *_bar_block(barred, rows, span)),
    (_grown(value, (keys, width)), (span, width), other),
  ]
  everywhere = (rows, span), lambda t, s: (t, s)
  if plan.dropout:
    ins.append((_grown(factors, (queries, keys)), *everywhere))
  part = lambda size: ((spans, queries, size), (None, rows, size), lambda t, s: (s, t, 0))
  outs = [part(width), part(1), part(1)] + [((queries, keys), *everywhere)] * plan.weights
  kernel = functools.partial(_context_kernel, plan.dropout)
  mixed, tops, totals, *scores = plan.run(kernel, (queries // rows, spans), ins, outs)
  context, top, share = _together(mixed, tops, totals)
  steps, size = q.shape[0], k.shape[0]
  weights = (jnp.exp(scores[0] - top) * share)[:steps, :size] * (factors if plan.dropout else 1.0) if scores else None
  return (context[:steps, : value.shape[1]], weights), (q, k, v, barred, factors, value, top, share)


def _together(mixed: jax.Array, tops: jax.Array, totals: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Of C spans: sums of values [C, T, V] and of exponentials [C, T, 1] beside the greatest scores [C, T, 1] -> context
  [T, V], the greatest score [T, 1], what one of its exponentials beside that weighs [T, 1].

  The log of a sum would not do: beside a large score it rounds to the score.
  """
  top = jnp.max(tops, axis=0)
  shrink = jnp.exp(tops - top[None])
  total = jnp.sum(shrink * totals, axis=0)
  share = jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1.0), 0.0)  # NaN shows, as it does in the definition
  return jnp.sum(shrink * mixed, axis=0) * share, top, share


def _backward(plan: Plan, saved, g):
  q, k, v, barred, factors, value, top, share = saved
  to_context, to_weights = g
  weights = _powers(plan, q, k, v, barred, top) * share[: q.shape[0]]
  left = factors if plan.dropout else 1.0
  einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
  to_weights = left * (einsum('tv,sv->ts', to_context, value) + (0.0 if to_weights is None else to_weights))
  to_scores = weights * (to_weights - jnp.sum(weights * to_weights, -1, keepdims=True))
  to_q, tanhs = _slopes(plan, q, k, to_scores, True)
  (to_k,) = _slopes(plan, k, q, to_scores.T, False)
  to_barred = to_scores if plan.biased else jnp.zeros_like(barred)
  to_value = einsum('ts,tv->sv', left * weights, to_context)
  return to_q * v[None], to_k * v[None], tanhs.sum(0), to_barred, jnp.zeros_like(factors), to_value


attended.defvjp(_forward, _backward)


def _powers(plan: Plan, q, k, v, barred, top) -> jax.Array:
  """The exponentials [T, S] again, of the scores beside the greatest ones [T, 1]."""
  padded, (queries, keys, features) = _padded(plan.tile, q, k, v, barred)
  rows, columns = plan.tile.queries, plan.tile.keys
  blocks = [
    ((rows, features), lambda t, s: (t, 0)),
    ((columns, features), lambda t, s: (s, 0)),
    ((1, features), lambda t, s: (0, 0)),
    _bar_block(barred, rows, columns),
    ((rows, 1), lambda t, s: (t, 0)),
  ]
  ins = [(x, *block) for x, block in zip([*padded, top], blocks, strict=True)]
  outs = [((queries, keys), (rows, columns), lambda t, s: (t, s))]
  return plan.run(_powers_kernel, (queries // rows, keys // columns), ins, outs)[0][: q.shape[0], : k.shape[0]]


def _bar_block(barred, rows: int, columns: int) -> tuple:
  """A block of barred [T, S], or of [1, S] where all queries have the same, and its index."""
  if barred.shape[0] == 1:
    return (1, columns), lambda t, s: (0, s)
  return (rows, columns), lambda t, s: (t, s)


def _slopes(plan: Plan, x, y, g, with_tanh: bool) -> list[jax.Array]:
  """Σ_j g_ij tanh'(x_i + y_j) and, if asked for, Σ_j g_ij tanh(x_i + y_j): x [I, F], y [J, F], g [I, J] -> [I, F]."""
  rows, part = plan.tile.queries, plan.tile.features
  spans, span = plan.tile.spans(y.shape[0])
  own, others, features = _up(x.shape[0], rows), spans * span, _up(x.shape[1], part)
  ins = [
    (_grown(x, (own, features)), (rows, part), lambda i, f, j: (i, f)),
    (_grown(y, (others, features)), (span, part), lambda i, f, j: (j, f)),
    (_grown(g, (own, others)), (rows, span), lambda i, f, j: (i, j)),
  ]
  outs = [((spans, own, features), (None, rows, part), lambda i, f, j: (j, i, f))] * (1 + with_tanh)
  sums = plan.run(_slopes_kernel, (own // rows, features // part, spans), ins, outs)
  return [jnp.sum(total, axis=0)[: x.shape[0], : x.shape[1]] for total in sums]


def _context_kernel(dropout: bool, tile: Tile, q, k, v, barred, value, *refs):
  """References of a block of queries and a span of keys, and factors where weights are dropped.

  They are followed by those of the sum of values, of the greatest score, of the sum of exponentials beside it, and of
  the scores if they are wanted.
  """
  factors, (mixed_out, tops, totals, *scores) = refs[:dropout], refs[dropout:]
  rows, width = mixed_out.shape

  def step(i, carry):
    top, total, mixed = carry
    at = _part(i, tile.keys)
    found, seen = _scores(tile, q, k, v, barred, at)
    if scores:
      scores[0][:, at] = jnp.where(seen, found, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(jnp.where(seen, found, min_finite(found.dtype)), axis=1, keepdims=True))
    powers = jnp.where(seen, jnp.exp(jnp.where(seen, found - higher, 0.0)), 0.0)
    shrink = jnp.exp(top - higher)
    left = powers * factors[0][:, at] if dropout else powers
    more = jax.lax.dot(left, value[at, :], precision=jax.lax.Precision.HIGHEST)
    return higher, total * shrink + jnp.sum(powers, axis=1, keepdims=True), mixed * shrink + more

  column = lambda fill: jnp.full((rows, 1), fill, jnp.float32)
  start = column(min_finite(jnp.float32)), column(0.0), jnp.zeros((rows, width), jnp.float32)
  top, total, mixed = jax.lax.fori_loop(0, k.shape[0] // tile.keys, step, start)
  mixed_out[:, :], tops[:, :], totals[:, :] = mixed, top, total


def _powers_kernel(tile: Tile, q, k, v, barred, top, powers):
  found, seen = _scores(tile, q, k, v, barred, pl.ds(0, tile.keys))
  # Above the greatest one by rounding alone, which of large scores is much.
  beside = jnp.minimum(jnp.where(seen, found - top[:, :], 0.0), 0.0)
  powers[:, :] = jnp.where(seen, jnp.exp(beside), 0.0)


def _slopes_kernel(tile: Tile, x, y, g, slopes, *tanhs):
  """References of a part of the features, of a block of rows and of a span of what they are paired with."""

  def step(i, totals):
    at = _part(i, tile.keys)
    tanh = jnp.tanh(x[:, :][:, None, :] + y[at, :][None, :, :])
    weight = g[:, at][:, :, None]
    terms = (weight * (1 - tanh * tanh), weight * tanh)[: 1 + len(tanhs)]
    return tuple(total + jnp.sum(term, axis=1) for total, term in zip(totals, terms, strict=True))

  start = (jnp.zeros(slopes.shape, jnp.float32),) * (1 + len(tanhs))
  totals = jax.lax.fori_loop(0, y.shape[0] // tile.keys, step, start)
  for ref, total in zip((slopes, *tanhs), totals, strict=True):
    ref[:, :] = total


def _scores(tile: Tile, q, k, v, barred, at) -> tuple[jax.Array, jax.Array]:
  """Scores of a block of queries and the keys `at`, and which of them count: [rows, keys] each."""

  def step(i, total):
    f = _part(i, tile.features)
    return total + v[:, f][None, :, :] * jnp.tanh(q[:, f][:, None, :] + k[at, f][None, :, :])

  start = jnp.zeros((q.shape[0], tile.keys, tile.features), jnp.float32)
  total = jnp.sum(jax.lax.fori_loop(0, q.shape[1] // tile.features, step, start), axis=2)
  bias = jnp.broadcast_to(barred[:, at], total.shape)
  seen = bias > -jnp.inf
  return total + jnp.where(seen, bias, 0.0), seen


def _part(i, size: int):
  return pl.ds(pl.multiple_of(i * size, size), size)


def _up(size: int, to: int) -> int:
  """The next multiple."""
  return -(-size // to) * to


def _power(size: int, least: int) -> int:
  """The next power of 2, which products on a GPU ask for."""
  return max(least, 1 << (size - 1).bit_length())


def _grown(x: jax.Array, shape: tuple[int, ...], fill: float = 0.0) -> jax.Array:
  return jnp.pad(x, [(0, new - old) for new, old in zip(shape, x.shape, strict=True)], constant_values=fill)


def _padded(tile: Tile, q, k, v, barred):
  """Whole tiles: features that weigh nothing, keys that are masked, queries whose results are cut off."""
  spans, span = tile.spans(k.shape[0])
  queries, keys, features = _up(q.shape[0], tile.queries), spans * span, _up(q.shape[1], tile.features)
  rows = 1 if barred.shape[0] == 1 else queries
  arrays = [
    _grown(q, (queries, features)),
    _grown(k, (keys, features)),
    _grown(v[None], (1, features)),
    _grown(barred, (rows, keys), -jnp.inf),
  ]
  return arrays, (queries, keys, features)
