"""Edits of attention weights: interventions that fix or change the weights of an alignment.

An edit is `f(weights [S], mask [S], *, ...) -> weights [S]`. Its keyword-only arguments declare what else it needs, as
those of an alignment do: an edit that takes `step` depends on the index of the query, and queries are scanned in order.
The option `at` is the index of a query, and the option `position` that of a position of the memory.

The spec string of any edit may restrict it to one layer or head: `'fixed(at=2, position=1, layer=0, head=3)'`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float, Int
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.dense import NUMBERS, hardmax, softmax
from attention_jax.functional.masking import at_least_float32, zero_masked
from attention_jax.functional.table import Row, check_table, lookup, parameter_names
from attention_jax.specs import Option, Range, check_value, format_spec, parse

Weights = Float[Array, ' S']
Mask = Bool[Array, ' S']
HEAD_AXES = ('head_groups', 'heads_of_group')  # names of the vmapped axes of heads, from the outer to the inner one


def uniform(weights: Weights, mask: Mask) -> Weights:
  """wₛ = 1 / n over the n unmasked positions. Wiegreffe & Pinter 2019, who train with these weights."""
  return zero_masked(jnp.ones_like(weights), mask) / jnp.maximum(mask.sum(), 1).astype(weights.dtype)


def largest(weights: Weights, mask: Mask) -> Weights:
  """1 at the position of the largest weight, the first of equal ones, 0 elsewhere; zeros for a query without weight."""
  return hardmax(weights, mask & (weights.max() > 0))


def drop_largest(weights: Weights, mask: Mask) -> Weights:
  """Sets the largest weight to 0; the others are divided by their sum. Serrano & Smith 2019."""
  remaining = weights * (1 - hardmax(weights, mask))
  total = remaining.sum()
  return remaining / jnp.where(total > 0, total, 1.0)


def permuted(weights: Weights, mask: Mask, *, step: Int[Array, ''], seed: int = 0) -> Weights:
  """The weights of the unmasked positions in random order. Jain & Wallace 2019, section 4.2.1."""
  rng = jax.random.fold_in(jax.random.key(seed), step)
  # One draw for each position, so that the order does not depend on the amount of padding.
  draws = jax.vmap(lambda s: jax.random.uniform(jax.random.fold_in(rng, s)))(jnp.arange(mask.size))
  random_order = jnp.argsort(jnp.where(mask, draws, 2.0))  # masked positions come last in both orders
  return jnp.zeros_like(weights).at[random_order].set(weights[jnp.argsort(~mask)])


def tempered(weights: Weights, mask: Mask, *, temperature: float = 1.0) -> Weights:
  """wₛ^(1/τ) / Σ w^(1/τ): flatter for a temperature τ above 1, sharper below.

  Raises:
    UserError: if the temperature is a number that is not positive.
  """
  if isinstance(temperature, NUMBERS) and not temperature > 0:
    raise UserError(f"tempered: temperature must be greater than 0, got {temperature} ('largest' is the limit at 0)")
  is_positive = mask & (weights > 0)
  return softmax(jnp.log(jnp.where(is_positive, weights, 1.0)) / temperature, is_positive)


def fixed(weights: Weights, mask: Mask, *, step: Int[Array, ''], at: int = 0, position: int = 0) -> Weights:
  """Query `at` attends to `position` with weight 1; other queries keep their weights.

  As for every edit, `with_edit` then sets masked weights to 0.

  Raises:
    UserError: for a negative index.
  """
  for name, index in (('at', at), ('position', position)):
    if isinstance(index, int) and index < 0:
      raise UserError(f'fixed: {name} must be at least 0, got {index}')
  return jnp.where(step == at, jax.nn.one_hot(position, weights.size, dtype=weights.dtype), weights)


EDITS: Mapping[str, Row] = check_table(
  {
    'uniform': Row(uniform),
    'largest': Row(largest),
    'drop_largest': Row(drop_largest),
    'permuted': Row(permuted),
    'tempered': Row(tempered),
    'fixed': Row(fixed),
  }
)


PLACE_OPTIONS = {name: Option(int, None, Range(0)) for name in ('layer', 'head')}  # options of every edit


class Edit(NamedTuple):
  """An edit and where it applies.

  Attributes:
    edit: a spec string of EDITS, a table row, or a function.
    layer: index of a layer of the decoder; None for all.
    head: index of a head; None for all.
  """

  edit: str | Row | Callable
  layer: int | None = None
  head: int | None = None


def resolve_edit(edit: str | Row | Callable | Edit) -> Edit:
  """Returns an edit with its table row, and the layer and the head of its spec string.

  Raises:
    UserError: for an unknown edit or option, and a layer or head that is no index.
  """
  if not isinstance(edit, Edit):
    edit = Edit(edit)
  place = {name: value for name, value in edit._asdict().items() if name in PLACE_OPTIONS and value is not None}
  spec = edit.edit
  if isinstance(spec, str):
    name, options = parse(spec, 'edit')
    place |= {option: options.pop(option) for option in PLACE_OPTIONS if option in options}
    spec = format_spec(name, options)
  for name, value in place.items():
    check_value(f'edit: {name}', value, PLACE_OPTIONS[name])
  return Edit(lookup(spec, EDITS, 'edit'), **place)


def check_indices(edit: str, queries: int, positions: int) -> None:
  """Checks that the query and the position that an edit names exist; the edit itself cannot, as lengths are padded.

  Args:
    edit: a spec string of EDITS.
    queries: number of queries.
    positions: number of positions of the memory.

  Raises:
    UserError: for an index that is too large.
  """
  _, options = parse(edit, 'edit')
  for name, count, side in (('at', queries, 'target'), ('position', positions, 'source')):
    if options.get(name, 0) >= count:
      raise UserError(f'edit {edit!r}: {name} must be less than {count}, the number of {side} tokens')


def head_index() -> Int[Array, '']:
  """Returns the index of the head that is computed, inside of vmaps over HEAD_AXES.

  Raises:
    UserError: outside of the module Attention.
  """
  try:
    return jax.lax.axis_index(HEAD_AXES)
  except NameError as error:
    raise UserError('edit: only heads of the module Attention have indices; expected an edit without head') from error


def replace_weights(weights: Float[Array, 'T S']) -> Callable:
  """Returns the edit that replaces the weights of every query.

  Args:
    weights: a row for each query. A query whose row starts with NaN, or that has no row, keeps its weights.
  """

  def replaced(original, mask, *, step):
    row = jnp.take(weights, step, axis=0, mode='fill', fill_value=jnp.nan)
    return jnp.where(jnp.isnan(row[0]), original, row)

  return replaced


def with_edit(alignment: str | Row | Callable, edit: str | Row | Callable | Edit) -> Row:
  """Adds an edit to an alignment: w = edit(alignment(e, mask), mask), and 0 at masked positions.

  An edited alignment is an alignment: it obeys the contract of masks and weights, and context and carry use its
  weights. Its private state stays that of the alignment without the edit.

  Args:
    alignment: a spec string, a table row or a function.
    edit: a spec string of EDITS, a table row, a function (weights [S], mask [S], *, ...) -> weights [S], or an Edit of
      one of them. An edit of one head needs the heads of the module Attention; the weights of its other heads are
      unchanged.

  Returns:
    The new row.

  Raises:
    UserError: for an unknown alignment, edit or option, an edit that has a state or learned parameters, an edit of one
      layer, and a latent alignment, whose weights are probabilities of a latent position.
  """
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  edit, layer, head = resolve_edit(edit)
  if layer is not None:
    raise UserError(f'edit: an alignment has no layers, got layer={layer}; use analysis.interventions.edited_model')
  if learned := parameter_names(edit):
    raise UserError(f'edit: an edit must have no learned parameters, got {sorted(learned)}; an option needs a default')
  if edit.init_state:
    raise UserError('edit: an edit must have no state, got a row with init_state')
  if alignment.latent:
    raise UserError(
      'edit: the weights of a latent alignment are probabilities of a latent position and cannot be edited'
    )
  at_test = alignment.at_test and _edited(alignment.at_test, edit.fn, head)
  fn = _edited(alignment.fn, edit.fn, head)
  return alignment._replace(fn=fn, at_test=at_test, form=None, lookback=None, dropout=None)


@functools.lru_cache(256)
def _edited(fn: Callable, edit: Callable, head: int | None) -> Callable:
  """The function of an alignment with an edit; cached, so that jax compiles it once for equal arguments."""
  accepted = set(inspect.signature(fn).parameters)
  needed = Row(edit).required_inputs

  def edited(scores, mask, **inputs):
    result = fn(scores, mask, **{name: value for name, value in inputs.items() if name in accepted})
    weights, *state = result if isinstance(result, tuple) else (result,)
    new_weights = edit(weights, mask, **{name: inputs[name] for name in needed})
    if head is not None:
      new_weights = jnp.where(head_index() == head, new_weights, weights)
    new_weights = zero_masked(at_least_float32(new_weights), mask)
    return (new_weights, *state) if state else new_weights

  # The signature is the schema of the new row: that of the alignment, and what the edit needs.
  added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(needed - accepted)]
  edited.__signature__ = inspect.Signature([*inspect.signature(fn).parameters.values(), *added])
  return edited
