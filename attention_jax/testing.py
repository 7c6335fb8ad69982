"""The contract of masks and weights as checks that raise: for variants of a user, and for the rows of the tables.

Weights are float32, and exactly 0 where masked. Masked content changes nothing. An empty memory gives zero weights, a
zero context and zero gradients. The result for an example depends neither on its padding nor on other examples. All of
it holds in training and at test time, in 16 bits, and under jax.jit without a second compilation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.annotations import Array
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Attended
from attention_jax.functional.params import init_params
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup
from attention_jax.kernels.api import attend

T, S, WIDTH, VALUE, FEATURES = 3, 7, 5, 13, 11
SHORT = 5  # a number of positions to which short examples may be cut
# One example without padding, one of padding alone, and two of other lengths.
LENGTHS = (S, 0, SHORT, 2)
FULL, EMPTY = 0, 1
PADDING_MASK = np.arange(S) < np.asarray(LENGTHS)[:, None]  # [B, S]
QUERY_MASK = np.broadcast_to(PADDING_MASK[:, None], (len(LENGTHS), T, S))
FILLERS = (np.nan, np.inf, -np.inf, 1e30)
CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


class AttentionInputs(NamedTuple):
  """Parameters and inputs of `attend`; the arrays may have a batch axis."""

  params: Mapping[str, Any]
  query: Array
  key: Array
  value: Array


def check_score(score: str | Row | Callable, *, quick: bool = False) -> None:
  """Checks that a score obeys the contract of masks and weights, together with softmax.

  Args:
    score: a spec string, a table row or a function, as of `attend`.
    quick: whether to check masks and gradients of one batch only, which takes a second or two.

  Raises:
    UserError: for the first law that the score breaks, with the value and what is expected.
  """
  row = lookup(score, SCORES, 'score')
  _check(_describe('score', score, row), row, lookup('softmax', ALIGNMENTS, 'alignment'), quick)


def check_alignment(alignment: str | Row | Callable, *, quick: bool = False) -> None:
  """Checks that an alignment obeys the contract of masks and weights, together with the score `scaled_dot`.

  Args:
    alignment: a spec string, a table row or a function, as of `attend`.
    quick: whether to check masks and gradients of one batch only, which takes a second or two.

  Raises:
    UserError: for the first law that the alignment breaks, with the value and what is expected.
  """
  row = lookup(alignment, ALIGNMENTS, 'alignment')
  _check(_describe('alignment', alignment, row), lookup('scaled_dot', SCORES, 'score'), row, quick)


def _describe(kind: str, spec: str | Row | Callable, row: Row) -> str:
  return f'{kind} {spec if isinstance(spec, str) else getattr(row.fn, "__name__", row.fn)!r}'


def _check(name: str, score: Row, alignment: Row, quick: bool) -> None:
  """Checks one pair of rows: the laws of masks in training, and unless `quick` also those at test time and the rest."""
  inputs = _make_inputs(score, alignment)
  rng = jax.random.key(1)
  modes = [{'rng': rng, 'deterministic': False}]
  if not quick and alignment.at_test:
    modes.append({'rng': rng})
  for options in modes:
    traces = []

    def run(inputs, mask, options=options, traces=traces):
      traces.append(mask)
      return jax.value_and_grad(lambda p: loss(score, alignment, p, mask, **options), has_aux=True)(inputs)

    run = jax.jit(run)
    try:
      run(inputs, QUERY_MASK)
    except jax.errors.JAXTypeError as error:
      reason = str(error).partition('\n')[0]
      raise UserError(
        f'{name}: must work under jax.jit, vmap and grad, got {type(error).__name__}: {reason}'
      ) from error
    check_masks(name, run, inputs)
    if len(traces) > 1:
      raise UserError(
        f'{name}: calls with equal shapes must compile once under jax.jit, got {len(traces)} compilations'
      )
  if quick:
    return
  if not _samples(score, alignment):
    check_rows(name, lambda inputs, mask: attend_inputs(score, alignment, inputs, mask), inputs)
  for dtype in (jnp.float16, jnp.bfloat16):
    check_half_precision(name, lambda p, mask: loss(score, alignment, p, mask, **modes[0]), inputs, dtype)


def _samples(score: Row, alignment: Row) -> bool:
  """Whether the result depends on an rng at test time: rows of a batch then have an rng of their own."""
  return 'rng' in score.required_inputs or ('rng' in alignment.required_inputs and alignment.at_test is None)


def _make_inputs(score: Row, alignment: Row) -> AttentionInputs:
  """A batch of random inputs, and initial parameters."""
  params = init_params(
    jax.random.key(0), score=score, alignment=alignment, query=WIDTH, key=WIDTH, value=VALUE, features=FEATURES
  )
  random = np.random.default_rng(0)
  shapes = (T, WIDTH), (S, WIDTH), (S, VALUE)
  return AttentionInputs(
    params, *(jnp.asarray(random.normal(size=(len(LENGTHS), *shape)), jnp.float32) for shape in shapes)
  )


def attend_inputs(score: str | Row, alignment: str | Row, inputs: AttentionInputs, mask=None, **options) -> Attended:
  """Calls `attend` on inputs. Arguments: see `attend`."""
  params, query, key, value = inputs
  return attend(query, key, value, mask, score=score, alignment=alignment, params=params, **options)


def loss(
  score: str | Row, alignment: str | Row, inputs: AttentionInputs, mask=None, **options
) -> tuple[Array, Attended]:
  """Returns a weighted sum of context and weights, and both. Arguments: see `attend`."""
  attended = attend_inputs(score, alignment, inputs, mask, **options)

  def probe(x: jax.Array) -> jax.Array:
    return jnp.sin(1 + jnp.arange(x.shape[-1])).astype(x.dtype)

  total = sum(jnp.sum(jnp.einsum('...i,i->...', x, probe(x)).astype(jnp.float32)) for x in attended if x is not None)
  return total, attended


def fill_masked(inputs: AttentionInputs, mask: Array, filler: float) -> AttentionInputs:
  """Fills masked positions of the keys and values of a batch.

  Args:
    inputs: inputs with a batch axis.
    mask: [B, S], True = keep.
    filler: the value at masked positions.
  """

  def fill(x):
    return np.where(mask[..., None], x, np.asarray(filler, x.dtype))

  return inputs._replace(key=fill(inputs.key), value=fill(inputs.value))


def check_masks(name: str, run: Callable, inputs: AttentionInputs) -> Attended:
  """Checks exact zeros, empty memories, finite gradients, masked content, and the place of an example in the batch.

  Args:
    name: name of the variant, for the error message.
    run: compiled function (inputs, mask [B, T, S]) -> ((loss, Attended), gradients of the inputs).
    inputs: a batch of examples, of the lengths LENGTHS, T queries and S positions.

  Returns:
    The result for QUERY_MASK.

  Raises:
    UserError: for the first law that is broken.
  """
  result = jax.device_get(run(inputs, QUERY_MASK))  # NumPy arrays: comparisons of them compile nothing
  (_, attended), gradients = result
  if attended.weights.dtype != jnp.float32:
    raise UserError(f'{name}: weights must be float32, got {attended.weights.dtype}')
  empty = 'of an example without unmasked positions must be 0'
  _require_zero(name, f'weights {empty}', attended.weights[EMPTY])
  _require_zero(name, 'weights of masked positions must be 0', attended.weights[~QUERY_MASK])
  _require_zero(name, f'the context {empty}', attended.context[EMPTY])
  _require_zero(name, f'gradients of queries {empty}', gradients.query[EMPTY])
  _require_finite(name, result)
  _require_zero(name, 'gradients of masked keys must be 0', gradients.key[~PADDING_MASK])
  _require_zero(name, 'gradients of masked values must be 0', gradients.value[~PADDING_MASK])
  for filler in FILLERS:
    filled = run(fill_masked(inputs, PADDING_MASK, filler), QUERY_MASK)
    _require_equal(name, f'{filler} in masked keys and values must change nothing', filled, result)

  # With a different mask for every query, one of them empty.
  mask = np.random.default_rng(1).random(QUERY_MASK.shape) < 0.6
  mask[:, 0, 0] = False
  mask[:, 1] = False
  mixed = jax.device_get(run(inputs, mask))
  (_, mixed_attended), mixed_gradients = mixed
  _require_zero(name, 'weights of masked positions must be 0', mixed_attended.weights[~mask])
  _require_zero(name, 'the context of a query without unmasked positions must be 0', mixed_attended.context[:, 1])
  _require_finite(name, mixed)
  never_attended = ~mask.any(1)
  _require_zero(name, 'gradients of masked keys must be 0', mixed_gradients.key[never_attended])
  # The first position is masked for the first query, not for all: its key then reaches the alignment.
  key = np.array(inputs.key)
  key[:, 0] *= -30
  (_, changed), _ = run(inputs._replace(key=key), mask)
  law = 'the key of a position must not change the weights of a query for which it is masked'
  _require_equal(name, law, changed.weights[:, 0], mixed_attended.weights[:, 0], **CLOSE)
  return attended


def check_rows(name: str, run: Callable, inputs: AttentionInputs) -> None:
  """Checks that examples of a batch equal the same examples alone, with their padding and without it.

  Args:
    name: name of the variant, for the error message.
    run: function (inputs, mask) -> Attended, for a batch and for one example. It does not sample.
    inputs: as of `check_masks`.

  Raises:
    UserError: for an example that differs.
  """
  run = jax.jit(run)
  batch = run(inputs, QUERY_MASK)
  reverse = AttentionInputs(inputs.params, *(np.asarray(x)[::-1] for x in inputs[1:]))
  law = 'the result must not depend on the place in the batch'
  _require_equal(name, law, jax.tree.map(lambda x: x[::-1], run(reverse, QUERY_MASK[::-1])), batch, **CLOSE)
  for i, length in enumerate(LENGTHS):
    example = AttentionInputs(inputs.params, inputs.query[i], inputs.key[i], inputs.value[i])
    attended = Attended(batch.context[i], batch.weights[i])
    law = 'an example alone must have the result that it has in a batch (vmap)'
    _require_equal(name, law, run(example, PADDING_MASK[i]), attended, **CLOSE)
    if length <= SHORT:
      cut = example._replace(key=example.key[:SHORT], value=example.value[:SHORT])
      attended = attended._replace(weights=attended.weights[:, :SHORT])
      law = 'the result must not depend on padding'
      _require_equal(name, law, run(cut, PADDING_MASK[i, :SHORT]), attended, **CLOSE)


def check_half_precision(name: str, run: Callable, inputs: AttentionInputs, dtype: Any) -> None:
  """Checks that inputs of 16 bits have float32 weights, a context of 16 bits, and finite results and gradients.

  Args:
    name: name of the variant, for the error message.
    run: function (inputs, mask) -> (loss, Attended).
    inputs: as of `check_masks`.
    dtype: bfloat16 or float16.

  Raises:
    UserError: for the first law that is broken.
  """
  inputs = jax.tree.map(lambda x: x.astype(dtype), inputs)
  result = jax.jit(jax.value_and_grad(run, has_aux=True))(inputs, QUERY_MASK)
  (_, attended), _ = result
  kind = jnp.dtype(dtype).name
  for part, actual, expected in (
    ('weights', attended.weights.dtype, jnp.float32),
    ('context', attended.context.dtype, dtype),
  ):
    if actual != expected:
      raise UserError(f'{name}: {part} of {kind} inputs must be {jnp.dtype(expected).name}, got {actual}')
  _require_finite(f'{name} in {kind}', jax.tree.map(lambda x: np.asarray(x, np.float32), result))


def _require_zero(name: str, law: str, array: np.ndarray) -> None:
  """Raises UserError with the entry that is farthest from 0."""
  if np.any(array != 0):
    raise UserError(f'{name}: {law}, got {array.flat[np.argmax(np.abs(array))]:.4g}')


def _require_finite(name: str, tree: Any) -> None:
  for path, array in jax.tree.leaves_with_path(tree):
    if not np.all(np.isfinite(array)):
      part = 'result' if path[0].idx == 0 else 'gradient'
      raise UserError(f'{name}: the {part} must be finite, got {array[~np.isfinite(array)].flat[0]}')


def _require_equal(name: str, law: str, actual: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
  """Raises UserError with the largest difference of two trees of arrays, unless they are equal up to a tolerance."""
  for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    if not np.allclose(x, y, rtol=rtol, atol=atol):
      raise UserError(f'{name}: {law}, got a difference of {np.max(np.abs(x - y)):.4g}')
