"""The params of `attend` and `attend_step`: initial ones, and checks of those that a user passes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array
from attention_jax.errors import UserError, choose
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import Dimension, check_size
from attention_jax.functional.rngs import check_rng
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, init_row_params, lookup, parameter_names


def init_params(
  rng: jax.Array, *, score, alignment='softmax', query: int, key: int, features: int, value: int | None = None
) -> dict[str, dict[str, Array] | Array]:
  """Returns initial parameters for `attend`.

  Args:
    rng: a PRNG key, consumed.
    score: a spec string, a table row or a function.
    alignment: likewise.
    query: Dq, the width of queries.
    key: Dk, the width of keys.
    features: F, the width of projections and of hidden layers; variants that have neither ignore it.
    value: V, the width of values; by default that of keys.

  Returns:
    `{'score': {...}, 'alignment': {...}}` and, for scores that project, 'query' [Dq, F] and 'key' [Dk, F].

  Raises:
    UserError: for an unknown variant or option, a function with learned parameters, sizes below 1, and an invalid rng.
  """
  check_rng('init_params', rng, is_required=True)
  score = lookup(score, SCORES, 'score')
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  sizes = {'query': query, 'key': key, 'value': key if value is None else value, 'features': features}
  for name, size in sizes.items():
    check_size('init_params', name, size, smallest=1)
  alignment_sizes = sizes | {'key': features if score.project else key}  # alignments take the projected key
  params = {
    'score': init_row_params(jax.random.fold_in(rng, 0), score, sizes),
    'alignment': init_row_params(jax.random.fold_in(rng, 1), alignment, alignment_sizes),
  }
  if score.project:
    glorot = jax.nn.initializers.glorot_uniform()
    params['query'] = glorot(jax.random.fold_in(rng, 2), (query, features))
    params['key'] = glorot(jax.random.fold_in(rng, 3), (key, features))
  return params


def normalize_params(caller: str, params: Any, kinds: Sequence[str] = ('score', 'alignment')) -> dict[str, Any]:
  """Returns params with {} for a missing 'score' or 'alignment'.

  Args:
    caller: the function that the user called, for error messages.
    params: parameters as `init_params` returns them, or None.
    kinds: the entries that are dictionaries.

  Raises:
    UserError: for anything but a dictionary, and for unknown or malformed entries.
  """
  params = {} if params is None else params
  if not isinstance(params, Mapping):
    raise UserError(
      f"{caller}: params must be a dictionary {{'score': {{...}}, ...}} as returned by init_params, got {params!r}"
    )
  params = {kind: {} for kind in kinds} | dict(params)
  for name, entry in params.items():
    choose(name, (*kinds, 'query', 'key'), f"entry of {caller}'s params")
    if name in kinds and not isinstance(entry, Mapping):
      raise UserError(f"{caller}: params['{name}'] must be a dictionary, got {entry!r}; use init_params")
    if name in ('query', 'key') and not hasattr(entry, 'ndim'):
      raise UserError(f"{caller}: params['{name}'] must be an array, got {entry!r}; use init_params")
  # Any mapping becomes a tree of jax.
  return {name: dict(entry) if isinstance(entry, Mapping) else entry for name, entry in params.items()}


def check_variants(
  caller: str,
  rows: Mapping[str, Row],
  params: Mapping[str, Any],
  widths: Mapping[str, int],
  rng: jax.Array | None,
  deterministic: bool,
  batch: tuple[Dimension, ...] = (),
) -> None:
  """Checks the parameters of a score and an alignment, and whether there is an rng for those that sample.

  Args:
    caller: the function that the user called, for error messages.
    rows: the table rows of 'score' and 'alignment', and 'bias' if that is a function.
    params: as `normalize_params` returns them.
    widths: those of 'query', not yet projected, of 'key', projected, and of 'value'.
    rng: a PRNG key, or None.
    deterministic: whether variants that sample are replaced by their test-time counterparts.
    batch: axes to which axes of a parameter before those that its row declares must broadcast.

  Raises:
    UserError: for missing or unknown parameters, for those of another shape, and for a missing rng.
  """
  # A score that projects does not depend on the widths of query and key before the projection.
  sizes = dict.fromkeys(rows, widths)
  if rows['score'].project:
    sizes['score'] = {'features': widths['key']}
  for kind, row in rows.items():
    _check_names(caller, kind, row, params[kind])
    if 'rng' in row.required_inputs and rng is None and not (deterministic and row.at_test):
      raise UserError(f'{caller}: this {kind} samples; rng must be a PRNG key, got None')
    _check_shapes(caller, kind, row, params[kind], sizes[kind], batch)


def _check_names(caller: str, kind: str, row: Row, params: Mapping) -> None:
  """Raises UserError for missing or unknown parameters of a row."""
  expected = set(parameter_names(row))
  if expected != set(params):
    raise UserError(
      f"{caller}: params['{kind}'] must have the entries {sorted(expected)}, got {sorted(params)}; use init_params"
    )


def param_ranks(params: Mapping[str, Any], rows: Mapping[str, Row]) -> dict[str, Any]:
  """Returns the number of axes of each parameter as its row declares it; that of the array if there is no declaration.

  Args:
    params: as `normalize_params` returns them.
    rows: the table rows of their entries; 'query' and 'key' are matrices.
  """

  def rank(kind: str, name: str, x: Array) -> int:
    declared = rows[kind].params
    return len(declared[name].shape) if name in declared else jnp.ndim(x)

  return {
    kind: {name: rank(kind, name, x) for name, x in entry.items()} if kind in rows else 2
    for kind, entry in params.items()
  }


def _check_shapes(
  caller: str, kind: str, row: Row, params: Mapping, sizes: Mapping[str, int], batch: tuple[Dimension, ...]
) -> None:
  """Raises UserError for a parameter of another shape than declared: a scalar would be broadcast without an error.

  A size that is not in `sizes`, such as a rank, is taken from the first parameter that has it.
  """
  sizes = dict(sizes)
  for name, param in row.params.items():
    array_shape = jnp.shape(params[name])
    expected = [_evaluate_size(size, sizes) for size in param.shape]
    num_leading = max(0, len(array_shape) - len(expected))
    leading, shape = array_shape[:num_leading], array_shape[num_leading:]
    fits = len(leading) <= len(batch) and all(
      n in (1, size) for n, size in zip(leading, batch[len(batch) - num_leading :], strict=True)
    )
    has_shape = len(shape) == len(expected) and all(
      n in (None, actual) for n, actual in zip(expected, shape, strict=True)
    )
    if not (fits and has_shape):
      axes = [size if n is None else f'{size} = {n}' for size, n in zip(param.shape, expected, strict=True)]
      hint = f'; axes before these must broadcast to {batch}' if leading and batch else ''
      got = f'{list(array_shape)}{hint}'
      raise UserError(f"{caller}: params['{kind}']['{name}'] must be [{', '.join(axes)}], got {got}")
    sizes = dict(zip(param.shape, shape, strict=True)) | sizes


def _evaluate_size(size: str, sizes: Mapping[str, int]) -> int | None:
  """The value of a size or of a sum such as 'query+key'; None if one of its terms is unknown."""
  terms = size.split('+')
  return sum(sizes[term] for term in terms) if sizes.keys() >= set(terms) else None
