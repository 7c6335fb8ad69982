"""Attention one query at a time, for decoders outside of this package: `remember`, `init_carry` and `attend_step`.

The memory is prepared once for each source. Each step takes the carry of the previous step. A scan over all queries
returns the same as `attend`:

    memory = remember(key, value, mask, params=params)
    step = lambda carry, query: attend_step('coverage', 'softmax', params, carry, query, memory)
    carry, attended = jax.lax.scan(step, init_carry('coverage', 'softmax', len(key)), queries)

For a batch, vmap a function that calls all three.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float
from attention_jax.errors import UserError
from attention_jax.functional import attend as definition
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import (
  Attended,
  Carry,
  Memory,
  Params,
  project,
  with_remembered,
  without_key,
  zero_masked_memory,
)
from attention_jax.functional.masking import Dimension, check_size, float_array, mask_array
from attention_jax.functional.params import check_variants, normalize_params
from attention_jax.functional.programs import call_as_program
from attention_jax.functional.rngs import check_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, lookup

Variant = str | Row | Callable


class ProjectedMemory(NamedTuple):
  """A memory from `remember`; its fields are those of Memory. The type shows that its keys need no projection."""

  key: Float[Array, 'S D']
  value: Float[Array, 'S V']
  mask: Bool[Array, ' S']
  remembered: Float[Array, 'S ...'] | None = None


def remember(
  key: Float[Array, 'S Dk'],
  value: Float[Array, 'S V'],
  mask: Bool[Array, ' S'] | None = None,
  *,
  params: Params | None = None,
  alignment: Variant = 'softmax',
) -> ProjectedMemory:
  """Prepares a memory once for all steps: sets masked positions to zero, and projects the keys.

  Args:
    key: keys [S, Dk], not yet projected.
    value: values [S, V].
    mask: [S], True = may be attended to; by default all positions.
    params: parameters as `init_params` returns them; keys are projected if they contain 'key'.
    alignment: the alignment of the steps: a spec string, a table row, or a function. Some, such as `mocha`, also
      project the values. If the memory is prepared for an alignment without this projection, each step computes it.

  Returns:
    The memory for `attend_step`.

  Raises:
    UserError: for an unknown alignment or option, for missing params, if the shapes do not match, for a key or value
      that is not float, and for a mask that is not bool.
  """
  key = float_array('remember', 'key', key)
  value = float_array('remember', 'value', value)
  mask = jnp.ones(key.shape[:1], bool) if mask is None else mask_array('remember', mask)
  if key.ndim != 2 or value.ndim != 2 or not key.shape[:1] == value.shape[:1] == mask.shape:
    raise UserError(
      f'remember: key must be [S, Dk], value [S, V] and mask [S], got {key.shape}, {value.shape} and {mask.shape}; '
      'for a batch, vmap it'
    )
  memory = zero_masked_memory(Memory(key, value, mask))
  memory = with_remembered(lookup(alignment, ALIGNMENTS, 'alignment'), params or {}, memory)
  return ProjectedMemory(project(memory.key, params or {}, 'key'), *memory[1:4])


def init_carry(score: Variant, alignment: Variant, size: Dimension, dtype=jnp.float32) -> Carry:
  """Returns the carry before the first query.

  Args:
    score, alignment: a spec string, a table row, or a function.
    size: S, the number of positions of the memory.
    dtype: dtype of the weights, the sums and the private states in the carry.

  Raises:
    UserError: for an unknown variant or option, and for a size that is no whole number or is negative.
  """
  check_size('init_carry', 'size', size)
  return definition.init_carry(*_rows(score, alignment), size, dtype)


def attend_step(
  score: Variant,
  alignment: Variant,
  params: Params | None,
  carry: Carry,
  query: Float[Array, ' D'],
  memory: ProjectedMemory | Memory,
  *,
  bias: Float[Array, ' S'] | None = None,
  rng: jax.Array | None = None,
  deterministic: bool = True,
) -> tuple[Carry, Attended]:
  """Attends to one memory with one query: scores -> weights -> context = weights @ value.

  Args:
    score: a spec string, a table row, or a function.
    alignment: likewise.
    params: parameters as `init_params` returns them; None if there are none. The query is projected here if they
      contain 'query'.
    carry: from the previous step, or from `init_carry`.
    query: the query, [D].
    memory: from `remember`, which projects the keys once; or a Memory of keys that need no projection.
    bias: [S], added to the scores before masking; -inf masks a position.
    rng: a PRNG key, consumed by variants that sample.
    deterministic: whether an alignment is replaced by its test-time counterpart, if it has one.

  Returns:
    The carry for the next step, and the context [V] and weights [S].

  Raises:
    UserError: for an unknown variant or option, for missing or unknown params, if types or shapes do not match, for a
      Memory with params that project keys, for a carry of another variant, and for a missing or invalid rng.
  """
  params = normalize_params('attend_step', params)
  query = float_array('attend_step', 'query', query)
  if not isinstance(carry, Carry):
    raise UserError(f'attend_step: carry must be a Carry, from init_carry or the previous step, got {carry!r}')
  if not isinstance(memory, ProjectedMemory | Memory):
    raise UserError(f'attend_step: memory must be a memory from remember, or a Memory, got {memory!r}')
  if isinstance(memory, ProjectedMemory):
    params = without_key(params)
  key = float_array('attend_step', "the memory's key", memory.key)
  value = float_array('attend_step', "the memory's value", memory.value)
  mask = mask_array('attend_step', memory.mask)
  if key.ndim != 2 or value.ndim != 2 or not key.shape[:1] == value.shape[:1] == mask.shape:
    raise UserError(
      f'attend_step: the memory must have key [S, D], value [S, V] and mask [S], got {key.shape}, {value.shape} and '
      f'{mask.shape}; for a batch, vmap it'
    )
  memory = Memory(key, value, mask, memory.remembered)
  bias = None if bias is None else float_array('attend_step', 'bias', bias)
  size = key.shape[0]
  shapes = {'carry': jnp.shape(carry.previous)} | ({} if bias is None else {'bias': bias.shape})
  for name, shape in shapes.items():
    if shape != (size,):
      raise UserError(f'attend_step: {name} must be for the {size} positions of the memory, got shape {shape}')
  rows = _rows(score, alignment)
  expected = jax.eval_shape(lambda: definition.init_carry(*rows, size))
  if _shapes(carry) != _shapes(expected):
    raise UserError(
      f'attend_step: carry must have the state of this score and alignment, got {carry.state}; use init_carry'
    )
  check_rng('attend_step', rng)
  widths = {'query': query.shape[-1], 'key': key.shape[-1], 'value': value.shape[-1]}
  by_kind = dict(zip(('score', 'alignment'), rows, strict=True))
  check_variants('attend_step', by_kind, params, widths, rng, deterministic)
  return call_as_program(_attend_step, (*rows, deterministic), params, carry, query, memory, bias, rng)


def _attend_step(score: Row, alignment: Row, deterministic: bool, params, carry, query, memory, bias, rng):
  options = {'bias': bias, 'rng': rng, 'deterministic': deterministic}
  return definition.attend_step(score, alignment, params, carry, query, memory, **options)


def _shapes(tree: Any) -> tuple:
  """The structure of a tree, and the shapes of its leaves."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [jnp.shape(leaf) for leaf in leaves]


def _rows(score: Variant, alignment: Variant) -> tuple[Row, Row]:
  return lookup(score, SCORES, 'score'), lookup(alignment, ALIGNMENTS, 'alignment')
