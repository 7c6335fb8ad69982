"""One step of attention, and all steps of one sequence.

A variant that takes `previous`, `coverage`, `step` or `state` is recurrent. Queries are scanned in order if the score
or the alignment is recurrent, and vmapped otherwise.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from attention_jax.annotations import Array, Bool, Float, Int
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.dense import clamp_to_finite, log_sum_exp
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import (
  Dimension,
  accumulation_dtype,
  at_least_float32,
  share_over_steps,
  type_for_mesh,
  vary_like,
  zero_masked,
)
from attention_jax.functional.rngs import split_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup, select_memory_params, select_params

Params = Mapping[str, Any]


class Memory(NamedTuple):
  """Keys and values of the positions that queries attend to.

  Attributes:
    key: [S, D], already projected if the score projects.
    value: [S, V].
    mask: [S], True = may be attended to; in a Problem a Mask.
    remembered: result of the alignment's `Row.remember`, if any; for None, `attend_step` and `attend` compute it anew.
    positions: of a memory of the module Attention, the positions of its keys, [S] or [B, S]; None for 0 ... S - 1.
  """

  key: Float[Array, 'S D']
  value: Float[Array, 'S V']
  mask: Bool[Array, ' S'] | Mask
  remembered: Float[Array, 'S ...'] | None = None
  positions: Int[Array, '... S'] | None = None


class Carry(NamedTuple):
  """Values that one step passes to the next.

  Attributes:
    previous: the weights of the previous query.
    coverage: the sum of the weights of all previous queries.
    step: the number of previous queries.
    state: the private states of the score and of the alignment.
  """

  previous: Float[Array, ' S']
  coverage: Float[Array, ' S']
  step: Int[Array, '']
  state: tuple[Any, Any]


class Attended(NamedTuple):
  """Result of attention.

  Attributes:
    context: weights @ value.
    weights: None if they are not requested.
  """

  context: Float[Array, '*T V']
  weights: Float[Array, '*T S'] | None


class AttendedWithLogSum(NamedTuple):
  """Result of attention with `return_log_sum`.

  Attributes:
    context, weights: those of Attended.
    log_sum: log Σ exp f over the unmasked positions, f the scores that the softmax normalises, without a sink; -inf
      for a query without positions. Float32, or float64 for float64 inputs.
  """

  context: Float[Array, '*T V']
  weights: Float[Array, '*T S'] | None
  log_sum: Float[Array, '*T']


class Problem(NamedTuple):
  """Attention with all queries of one sequence, or with a block of them.

  For `attend_batch` of an implementation, every array has the same leading axes, of length 1 where it is shared.

  Attributes:
    score, alignment: table rows.
    params: parameters as `init_params` returns them; 'key' is not used.
    query: the queries, not yet projected if `params` contain 'query'.
    memory: its key is already projected; its mask is a Mask.
    bias: added to the scores before masking; -inf masks a position. A Partial is a function of `query_position` [] and
      `key_position` [S].
    rng: a PRNG key, consumed by variants that sample; for a block of queries one key per query, [T].
    deterministic: whether an alignment is replaced by its test-time counterpart, if it has one.
    return_weights: whether the result contains the weights.
    return_log_sum: whether the result is AttendedWithLogSum; the alignment is then a SoftmaxForm.
    query_position: for a block of queries, their positions; None for those of the mask.
  """

  score: Row
  alignment: Row
  params: Params
  query: Float[Array, 'T D']
  memory: Memory
  bias: Float[Array, 'T S'] | Partial | None = None
  rng: jax.Array | None = None
  deterministic: bool = True
  return_weights: bool = True
  return_log_sum: bool = False
  query_position: Int[Array, ' T'] | None = None

  @property
  def query_positions(self) -> Int[Array, ' T']:
    """Positions of the queries of one sequence, or of a block of them."""
    if self.query_position is None:
      return self.memory.mask.query_positions(self.query.shape[0])
    return self.query_position


def zero_masked_memory(memory: Memory, num_queries: Dimension | None = None) -> Memory:
  """Returns `memory` with keys and values of 0 at positions that are masked for every query.

  After this not even a NaN at such a position can reach a result or a gradient.

  Args:
    memory: its mask is [..., S], or a Mask, with as many leading axes as the key.
    num_queries: T, for a Mask; None if it is not known, see `Mask.any_query`.
  """
  mask = memory.mask
  if isinstance(mask, Mask):
    if num_queries is not None and mask.is_everywhere(num_queries, memory.key.shape[-2]):
      return memory
    mask = mask.any_query(num_queries, memory.key.shape[-2])
    mask = mask.reshape(*(1 for _ in range(memory.key.ndim - 1 - mask.ndim)), *mask.shape)
  return memory._replace(key=zero_masked(memory.key, mask), value=zero_masked(memory.value, mask))


def with_remembered(alignment: Row, params: Params, memory: Memory) -> Memory:
  """Returns `memory` with the result of the alignment's `Row.remember`, if it has one. Arguments: see `attend`."""
  if alignment.remember is None or memory.remembered is not None:
    return memory
  remember_params = select_memory_params(params.get('alignment', {}), alignment)
  remembered = alignment.remember(memory.value, **remember_params)
  return memory._replace(remembered=remembered)


def is_recurrent(score: Row, alignment: Row) -> bool:
  """Returns whether `attend` scans the queries in order with this score and this alignment."""
  return score.is_recurrent or alignment.is_recurrent


def init_carry(score: Row | str, alignment: Row | str, size: Dimension, dtype=jnp.float32) -> Carry:
  """Returns the carry before the first query over S = `size` positions. Arguments: see `steps.init_carry`."""
  score = lookup(score, SCORES, 'score')
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  zeros = jnp.zeros((size,), dtype)
  state = tuple(row.init_state(size, dtype) if row.init_state else () for row in (score, alignment))
  return type_for_mesh(Carry(zeros, zeros, jnp.zeros((), jnp.int32), state))


def without_key(params: Params) -> dict[str, Any]:
  """Returns `params` without the projection of the key, for a memory whose key is projected."""
  return {name: value for name, value in params.items() if name != 'key'}


def project(x: Float[Array, '... D'], params: Params, name: str) -> Float[Array, '... F']:
  """Projects queries or keys.

  Args:
    x: queries or keys.
    params: parameters as `init_params` returns them.
    name: 'query' or 'key'.

  Returns:
    x @ params[name], or x itself, taken as already projected, if `params` has no such entry.

  Raises:
    UserError: if the shapes do not match.
  """
  if name not in params:
    return x
  kernel = params[name]
  if kernel.ndim not in (2, x.ndim) or kernel.shape[-2] != x.shape[-1]:
    expected = f'[{x.shape[-1]}, F] to project {name} {list(x.shape)}'
    raise UserError(f"attend: params['{name}'] must be {expected}, got {list(kernel.shape)}")
  return jnp.einsum('...d,df->...f' if kernel.ndim == 2 else '...sd,...df->...sf', x, kernel)


def bias_of_query(bias: Partial, query_position: Array, key_position: Int[Array, ' S']) -> Float[Array, ' S']:
  """Returns the bias of one query that a function of positions computes. Raises UserError unless it is float, [S]."""
  row = bias(query_position=query_position, key_position=key_position)
  if jnp.shape(row) != key_position.shape or not jnp.issubdtype(jnp.result_type(row), jnp.floating):
    got = f'{jnp.result_type(row)} {list(jnp.shape(row))}'
    raise UserError(f'attend: a bias of positions must be float [S] = [{key_position.shape[0]}], got {got}')
  return row


def bias_of_queries(bias: Partial, query_positions: Int[Array, ' T'], size: Dimension) -> Float[Array, 'T S']:
  """Returns the array of a bias that is a function of positions."""
  return jax.vmap(lambda position: bias_of_query(bias, position, _key_positions(size)))(query_positions)


def _key_positions(size: Dimension) -> Int[Array, ' S']:
  return jnp.arange(size, dtype=jnp.int32)


def call_variant(fn: Callable, args: tuple, params: Params, step_inputs: Mapping[str, Any], state):
  """Calls a variant with the arguments that it declares; a test-time counterpart may declare fewer than its variant.

  Args:
    fn: a score, an alignment, or a companion of one, such as `Row.at_test`.
    args: its positional arguments.
    params: its learned parameters.
    step_inputs: arguments that the attention step supplies; an entry 'state' is not used.
    state: its private state.

  Returns:
    The result, and the new state (the old one if `fn` takes none).
  """
  row = Row(fn)
  arguments = select_params(params, row)
  arguments |= {name: step_inputs[name] for name in row.required_inputs - {'state'}}
  if 'state' not in row.required_inputs:
    return fn(*args, **arguments), state
  return fn(*args, **arguments, state=state)


def score_terms(problem: Problem) -> tuple:
  """Evaluates the terms of a score of the form Product or TanhSum, of which only the first depends on the query.

  Returns:
    The first term with a leading axis T, followed by the other terms.
  """
  score, _, params, queries, memory, *_ = problem

  def terms_of_query(query, position):
    operands = project(query, params, 'query'), memory.key
    positions = {'query_position': position, 'key_position': _key_positions(memory.key.shape[0])}
    terms, _ = call_variant(score.form.fn, operands, params.get('score', {}), positions, ())
    first, *shared = terms
    return first, shared

  first, shared = jax.vmap(terms_of_query, out_axes=(0, None))(queries, problem.query_positions)
  return first, *shared


def score_keys(score: Row, query: Array, key: Array, params: Params, step_inputs: Mapping[str, Any], state):
  """Returns the scores [S] of one projected query, and the new state of the score.

  Arguments: see `call_variant`; `query` [D] and `key` [S, D] are projected, and `params` are those of the score.

  Raises:
    UserError: for missing params, and if the shapes do not match.
  """
  run = functools.partial(call_variant, score.fn, (query, key), params, step_inputs, state)
  return _call_checked('score', run, key.shape[0], {'projected query': query, 'projected key': key, **params})


def _call_checked(kind: str, run: Callable, size: Dimension, operands: Mapping[str, Any]):
  """Calls run() -> ([S], state); raises UserError for operands that it rejects, and for results of another shape."""
  try:
    output = run()
  except (UserError, jax.errors.JAXTypeError):
    raise
  except (TypeError, ValueError) as error:
    shapes = ', '.join(f'{name} {jnp.shape(operand)}' for name, operand in operands.items())
    raise UserError(f'attend: the {kind} failed with {shapes} (of one sequence): {error}') from error
  if (shape := getattr(output[0], 'shape', ())) != (size,):
    raise UserError(f'attend: the {kind} of one query must be [S] = [{size}], got {shape}')
  return output


def attend_step(
  score: Row | str,
  alignment: Row | str,
  params: Params,
  carry: Carry,
  query: Float[Array, ' D'],
  memory: Memory,
  *,
  bias: Float[Array, ' S'] | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
  query_position: Int[Array, ''] | None = None,
  return_log_sum: bool = False,
) -> tuple[Carry, Attended | AttendedWithLogSum]:
  """Attends to one memory with one query: scores -> weights -> context = weights @ value.

  Args:
    score: a table row or a spec string.
    alignment: likewise.
    params: parameters as `init_params` returns them, but without 'key'. The query is projected here if they contain
      'query'. The key is never projected here, because that is done once per memory.
    carry: from the previous step, or from `init_carry`.
    query: the query.
    memory: used as it is. If masked positions may contain NaN, apply `zero_masked_memory` once before the first step.
    bias: added to the scores before masking; -inf masks a position.
    rng: a PRNG key, consumed by variants that sample.
    deterministic: whether an alignment is replaced by its test-time counterpart, if it has one.
    query_position: position of the query, for variants that depend on it; None for the number of previous queries.
    return_log_sum: whether the result is AttendedWithLogSum; the alignment is then a SoftmaxForm.

  Returns:
    The carry for the next step, and the context and weights.

  Raises:
    UserError: for an unknown variant or option, missing params, shapes that do not match, and params that contain
      'key': the memory could then be one whose key is not projected yet, which often has the same shape.
  """
  score = lookup(score, SCORES, 'score')
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  if 'key' in params:
    raise UserError(
      'attend_step takes a memory whose key is projected already: make it once by remember(key, value, mask, '
      "params=params), or pass params without 'key'"
    )
  score_rng, alignment_rng = (None, None) if rng is None else jax.random.split(rng)
  query_position = carry.step if query_position is None else query_position
  step_inputs = _step_inputs(carry, query, memory, score_rng, query_position)
  projected = project(query, params, 'query')
  scores, state = score_keys(score, projected, memory.key, params.get('score', {}), step_inputs, carry.state[0])
  carry = carry._replace(state=(state, carry.state[1]))
  options = {'deterministic': deterministic, 'query_position': query_position, 'return_log_sum': return_log_sum}
  return attend_from_scores(alignment, params, carry, scores, query, memory, bias=bias, rng=alignment_rng, **options)


def _step_inputs(carry: Carry, query: Array, memory: Memory, rng: jax.Array | None, query_position: Array):
  """The arguments that a step supplies to its score and its alignment."""
  positions = {'query_position': query_position, 'key_position': _key_positions(memory.key.shape[0])}
  return carry._asdict() | positions | {'query': query, 'key': memory.key, 'rng': rng}


def attend_from_scores(
  alignment: Row,
  params: Params,
  carry: Carry,
  scores: Float[Array, ' S'],
  query: Float[Array, ' D'],
  memory: Memory,
  *,
  bias: Float[Array, ' S'] | None,
  rng: jax.Array | None,
  deterministic: bool,
  query_position: Int[Array, ''],
  return_log_sum: bool = False,
) -> tuple[Carry, Attended | AttendedWithLogSum]:
  """Second half of `attend_step`, after the scores.

  Arguments: see `attend_step`; `scores` are those of `score_keys`, and `carry` contains the new state of the score.
  """
  mask = memory.mask
  if bias is not None:
    mask = mask & ~jnp.isneginf(bias)
    scores = scores + zero_masked(bias, mask).astype(scores.dtype)
  align = alignment.at_test if deterministic and alignment.at_test else alignment.fn
  memory = with_remembered(alignment, params, memory)
  step_inputs = _step_inputs(carry, query, memory, rng, query_position) | {'remembered': memory.remembered}
  align_params = params.get('alignment', {})
  run = functools.partial(call_variant, align, (scores, mask), align_params, step_inputs, carry.state[1])
  operands = {'query': query, 'projected key': memory.key, **align_params}
  weights, state = _call_checked('alignment', run, mask.shape[-1], operands)
  context = jnp.einsum('s,sv->v', weights, memory.value.astype(weights.dtype)).astype(memory.value.dtype)
  previous = weights.astype(carry.previous.dtype)
  carry = Carry(previous, carry.coverage + previous, carry.step + 1, (carry.state[0], state))
  if not return_log_sum:
    return carry, Attended(context, weights)
  return carry, AttendedWithLogSum(context, weights, _log_sum(alignment, align_params, scores, mask))


def _log_sum(alignment: Row, params: Params, scores: Float[Array, ' S'], mask: Bool[Array, ' S']) -> Float[Array, '']:
  """The log of the sum that the softmax of an alignment divides by, without a sink; see AttendedWithLogSum."""
  scores = zero_masked(clamp_to_finite(at_least_float32(scores)), mask)
  terms, _ = call_variant(alignment.form.fn, (jnp.sum(mask).astype(scores.dtype),), params, {}, ())
  scale, transform, _ = jax.tree.map(lambda x: jnp.asarray(x, scores.dtype), terms)
  return log_sum_exp(scale * scores if transform is None else transform(scale * scores), mask)


def attend(problem: Problem) -> Attended:
  """Attends with all queries of one sequence: scanned if the score or the alignment is recurrent, else vmapped.

  This is implementation 'xla', the definition that every other implementation is tested against.

  Returns:
    Contexts [T, V] and, if requested, weights [T, S].

  Raises:
    UserError: for missing params, and if shapes do not match.
  """
  score, alignment, _, query, memory, _, rng, *_ = problem
  steps = query.shape[0]
  problem = problem._replace(query_position=problem.query_positions)
  memory = zero_masked_memory(memory, steps)
  carry = init_carry(score, alignment, memory.key.shape[0], accumulation_dtype(query, memory.key))
  _, attended = attend_queries(problem._replace(memory=memory, rng=split_rng(rng, steps)), carry)
  return attended if problem.return_weights else attended._replace(weights=None)


def lifted(attend: Callable[[Problem], Attended]) -> Callable[[Problem, Axes], Attended]:
  """Returns the `attend_batch` of an implementation that computes one sequence of one head at a time."""

  def attend_batch(problem: Problem, axes: Axes) -> Attended:
    def attend_one(params, query, memory, bias, rng):
      return attend(problem._replace(params=params, query=query, memory=memory, bias=bias, rng=rng))

    return lift(attend_one, axes, problem.params, problem.query, problem.memory, problem.bias, problem.rng)

  return attend_batch


attend_batch = lifted(attend)


def attend_queries(
  problem: Problem, carry: Carry, *, wrap: Callable[[Callable], Callable] | None = None
) -> tuple[Carry, Attended]:
  """Applies `attend_step` to every query of a block, scanned or vmapped.

  Args:
    problem: the block, with a PRNG key per query.
    carry: the carry before the first query.
    wrap: transforms the step if it is scanned, for example jax.checkpoint.

  Returns:
    The carry after the last query (unchanged if the queries are vmapped), and contexts and weights.
  """
  score, alignment, params, query, memory, bias, rngs, deterministic, *_ = problem
  is_function = callable(bias)
  shared = without_key(params), with_remembered(alignment, params, memory)
  recurrent = is_recurrent(score, alignment)
  get_shared = share_over_steps(shared) if recurrent else lambda: shared

  def step(carry, x):
    query, position, mask_fields, bias_row, rng = x
    params, memory = get_shared()
    memory = memory._replace(mask=memory.mask.row(mask_fields, memory.key.shape[0]))
    if is_function:
      bias_row = bias_of_query(bias, position, _key_positions(memory.key.shape[0]))
    options = {'deterministic': deterministic, 'query_position': position, 'return_log_sum': problem.return_log_sum}
    return attend_step(score, alignment, params, carry, query, memory, bias=bias_row, rng=rng, **options)

  if wrap is not None and recurrent:
    step = wrap(step)
  mask_fields = memory.mask.by_query(query.shape[0])
  xs = (query, problem.query_positions, mask_fields, None if is_function else bias, rngs)
  return scan_or_map_queries(step, recurrent, carry, xs, shared)


def scan_or_map_queries(step: Callable, recurrent: bool, carry: Any, xs: Any, constants: Any) -> tuple[Any, Any]:
  """Applies step(carry, x) -> (carry, y) to all xs.

  Args:
    step: the function to apply.
    recurrent: whether to scan; otherwise every x starts from the same carry, and the step is vmapped.
    carry: the carry before the first x.
    xs: a tree of arrays with a leading axis T.
    constants: other arrays that the step depends on.

  Returns:
    The last carry (unchanged if vmapped), and ys.
  """
  if recurrent:
    return jax.lax.scan(step, vary_like(carry, constants, xs), xs)
  return carry, jax.vmap(lambda x: step(carry, x)[1])(xs)
