"""One step of attention, and all steps of one sequence. The law that decides how they run:

a variant that asks for `previous`, `coverage`, `step` or `state` is recurrent and its queries are scanned in order;
every other variant is vmapped over its queries.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import accumulation_dtype, vary_like, zero_masked
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row_params, lookup, parameter_names

Params = Mapping[str, Any]


class Memory(NamedTuple):
  """What is looked at. `key` is already projected if the score wants it; `mask` is True where it may be attended to."""

  key: Float[Array, 'S D']
  value: Float[Array, 'S V']
  mask: Bool[Array, 'S']


class Carry(NamedTuple):
  """What one step hands to the next: the last weights, the sum of all weights, how many steps, private states."""

  previous: Float[Array, 'S']
  coverage: Float[Array, 'S']
  step: Int[Array, '']
  state: tuple[Any, Any]


class Attended(NamedTuple):
  """The context and the weights it was made with (None where an implementation does not have them)."""

  context: Float[Array, '*T V']
  weights: Float[Array, '*T S'] | None


def zero_masked_memory(memory: Memory) -> Memory:
  """The memory with zeros where no query may look, so that not even a NaN there can reach a result or a gradient.

  A mask may be [S] or, per query, [T, S].
  """
  seen = memory.mask.any(-2) if memory.mask.ndim > memory.key.ndim - 1 else memory.mask
  return memory._replace(key=zero_masked(memory.key, seen), value=zero_masked(memory.value, seen))


def is_recurrent(score: Row, alignment: Row) -> bool:
  """Whether queries must be attended in order."""
  return score.is_recurrent or alignment.is_recurrent


def init_carry(score: Row, alignment: Row, size: int, dtype=jnp.float32) -> Carry:
  """The carry before the first query over a memory of `size` positions."""
  nothing = jnp.zeros((size,), dtype)
  state = tuple(row.init_state(size, dtype) if row.init_state else () for row in (score, alignment))
  return Carry(nothing, nothing, jnp.zeros((), jnp.int32), state)


def init_params(
  rng: jax.Array, *, score, alignment='softmax', query: int, key: int, features: int
) -> dict[str, dict[str, Array] | Array]:
  """Initial parameters for `attend`. Consumes rng.

  Args:
    rng: a PRNG key.
    score, alignment: spec string, table row or function.
    query, key, features: sizes Dq, Dk and F. Rows that do not project ignore F where they do not need it.

  Returns: `{'score': {...}, 'alignment': {...}}` and, for rows that project, 'query' [Dq, F] and 'key' [Dk, F].
  Raises: UserError for an unknown variant or option, and for sizes below 1.
  """
  score, alignment = lookup(score, SCORES, 'score'), lookup(alignment, ALIGNMENTS, 'alignment')
  sizes = {'query': query, 'key': key, 'features': features}
  if min(sizes.values()) < 1:
    raise UserError(f'init_params: sizes must be at least 1, got {sizes}')
  of = lambda i: jax.random.fold_in(rng, i)
  remembered = sizes | {'key': features if score.project else key}  # an alignment is given the key as it is remembered
  params = {'score': init_row_params(of(0), score, sizes), 'alignment': init_row_params(of(1), alignment, remembered)}
  if score.project:
    glorot = jax.nn.initializers.glorot_uniform()
    params |= {'query': glorot(of(2), (query, features)), 'key': glorot(of(3), (key, features))}
  return params


def project(x: Float[Array, '... D'], params: Params, name: str) -> Float[Array, '... F']:
  """x @ params[name] if it is there; x itself, taken as already projected, if not."""
  if name not in params:
    return x
  if params[name].ndim != 2 or params[name].shape[0] != x.shape[-1]:
    raise UserError(f"attend: params['{name}'] {params[name].shape} does not project {name} {x.shape}")
  return jnp.einsum('...d,df->...f', x, params[name])


def call_variant(fn, args: tuple, params: Params, step_inputs: Mapping[str, Any], state):
  """fn(*args) with what it asks for, which may be less for a test-time twin; the new state beside the result."""
  asks = Row(fn)
  given = {name: params[name] for name in parameter_names(asks)} | {
    name: step_inputs[name] for name in asks.required_inputs - {'state'}
  }
  if 'state' not in asks.required_inputs:
    return fn(*args, **given), state
  return fn(*args, **given, state=state)


def score_terms(fn, params: Params, query: Float[Array, 'T D'], memory: Memory) -> tuple:
  """fn(query, key), a row's `tanh_sum` or `product`: its first part for each query, and what is the same for all."""

  def one(query):
    first, *rest = call_variant(fn, (project(query, params, 'query'), memory.key), params.get('score', {}), {}, ())[0]
    return first, rest

  first, rest = jax.vmap(one, out_axes=(0, None))(query)
  return first, *rest


def score_keys(score: Row, query: Array, key: Array, params: Params, step_inputs: Mapping[str, Any], state):
  """The scores of one projected query, and the score's new state. Raises: UserError for shapes that do not fit."""
  run = lambda: call_variant(score.fn, (query, key), params, step_inputs, state)
  return _fitting('score', run, key.shape[0], {'query': query, 'key': key, **params})


def _fitting(kind: str, run: Callable, size: int, given: Mapping[str, Any]):
  """run() -> ([S], state). Raises: UserError where it cannot take what it is given, or gives something else."""
  try:
    found = run()
  except (UserError, jax.errors.JAXTypeError):
    raise
  except (TypeError, ValueError) as error:
    shapes = ', '.join(f'{k} {jnp.shape(v)}' for k, v in given.items())
    raise UserError(f'attend: the {kind} cannot take {shapes} (of one sequence, projected): {error}') from error
  if (shape := getattr(found[0], 'shape', ())) != (size,):
    raise UserError(f'attend: the {kind} of one query must be [S] = [{size}], got {shape}')
  return found


def attend_step(
  score: Row,
  alignment: Row,
  params: Params,
  carry: Carry,
  query: Float[Array, 'D'],
  memory: Memory,
  *,
  bias: Float[Array, 'S'] | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
) -> tuple[Carry, Attended]:
  """One query over one memory: scores -> weights -> context = weights @ value.

  Args:
    params: as `init_params` gives them. The query is projected here when 'query' is among them; the key never is,
      because that is done once per memory.
    bias: added to the scores before masking; -inf in it masks.
    rng: consumed, by variants that draw.
    deterministic: replaces an expected alignment by its test-time twin.

  The memory is taken as it is: `zero_masked_memory` it once if NaNs may stand behind its mask, not at every step.
  """
  rngs = (None, None) if rng is None else jax.random.split(rng)
  step_inputs = carry._asdict() | {'query': query, 'key': memory.key, 'rng': rngs[0]}
  projected = project(query, params, 'query')
  scores, state = score_keys(score, projected, memory.key, params.get('score', {}), step_inputs, carry.state[0])
  carry = carry._replace(state=(state, carry.state[1]))
  return attend_from_scores(
    alignment, params, carry, scores, query, memory, bias=bias, rng=rngs[1], deterministic=deterministic
  )


def attend_from_scores(
  alignment: Row,
  params: Params,
  carry: Carry,
  scores: Float[Array, 'S'],
  query: Float[Array, 'D'],
  memory: Memory,
  *,
  bias: Float[Array, 'S'] | None,
  rng: jax.Array | None,
  deterministic: bool,
) -> tuple[Carry, Attended]:
  """The second half of a step, from the scores on. As `attend_step`; the carry already has the score's new state."""
  mask = memory.mask
  if bias is not None:
    mask = mask & ~jnp.isneginf(bias)
    scores = scores + zero_masked(bias, mask).astype(scores.dtype)
  align = alignment.at_test if deterministic and alignment.at_test else alignment.fn
  step_inputs = carry._asdict() | {'query': query, 'key': memory.key, 'rng': rng}
  mine = params.get('alignment', {})
  run = lambda: call_variant(align, (scores, mask), mine, step_inputs, carry.state[1])
  weights, state = _fitting('alignment', run, mask.shape[-1], {'query': query, 'key': memory.key, **mine})
  context = jnp.einsum('s,sv->v', weights, memory.value.astype(weights.dtype)).astype(memory.value.dtype)
  kept = weights.astype(carry.previous.dtype)
  carry = Carry(kept, carry.coverage + kept, carry.step + 1, (carry.state[0], state))
  return carry, Attended(context, weights)


def attend(
  score: Row,
  alignment: Row,
  params: Params,
  query: Float[Array, 'T D'],
  memory: Memory,
  *,
  bias: Float[Array, 'T S'] | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
  return_weights: bool = True,
) -> Attended:
  """All queries of one sequence: scanned for recurrent variants, vmapped for the others.

  The definition that every kernel is held against. memory.mask may be [S] or, per query, [T, S].
  """
  memory = zero_masked_memory(memory)
  steps, size = query.shape[0], memory.key.shape[0]
  carry = init_carry(score, alignment, size, accumulation_dtype(query, memory.key))
  mask = jnp.broadcast_to(memory.mask, (steps, size))
  xs = (query, mask, bias, split_rng(rng, steps))
  attended = attend_queries(score, alignment, params, carry, xs, memory, deterministic)[1]
  return attended if return_weights else attended._replace(weights=None)


def attend_queries(
  score: Row, alignment: Row, params: Params, carry: Carry, xs, memory: Memory, deterministic: bool, *, wrap=None
) -> tuple[Carry, Attended]:
  """Steps over xs = (query [T, D], mask [T, S], bias [T, S] or None, rngs [T] or None) -> the last carry, Attended.

  Args: wrap, what becomes of the step where it is scanned, such as jax.checkpoint.
  """

  def one(carry, x):
    query, mask, bias, rng = x
    visible = memory._replace(mask=mask)
    return attend_step(score, alignment, params, carry, query, visible, bias=bias, rng=rng, deterministic=deterministic)

  recurrent = is_recurrent(score, alignment)
  return scan_or_map_queries(wrap(one) if wrap and recurrent else one, recurrent, carry, xs, (params, memory))


def split_rng(rng: jax.Array | None, steps: int) -> jax.Array | None:
  """One rng per query."""
  return None if rng is None else jax.random.split(rng, steps)


def scan_or_map_queries(step, recurrent: bool, carry, xs, given):
  """step(carry, x) -> (carry, y) over all xs: in order where it is recurrent, at once and from one carry if not.

  Args: given, what else the step works with.
  Returns: the last carry, and ys.
  """
  if recurrent:
    return jax.lax.scan(step, vary_like(carry, given, xs), xs)
  return carry, jax.vmap(lambda x: step(carry, x)[1])(xs)
