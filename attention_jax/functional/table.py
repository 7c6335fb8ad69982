"""Tables of variants. A variant's signature is its schema: its keyword-only arguments say all that it needs.

- no default and one of SUPPLIED: the attention step passes it;
- no default and any other name: a learned parameter, whose shape stands in the table row;
- a default: an option, which a spec string may set: `'softmax(temperature=0.5)'`.
"""

import ast
import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose

SUPPLIED = frozenset({'query', 'key', 'rng', 'previous', 'coverage', 'step', 'state'})
RECURRENT = frozenset({'previous', 'coverage', 'step', 'state'})
SIZES = frozenset({'query', 'key', 'features'})  # sizes that every row knows; a row's own stand in Row.sizes

INITIALIZERS: Mapping[str, Callable] = {
  'glorot': lambda rng, shape, sizes: jax.nn.initializers.glorot_uniform()(rng, shape),
  'vector': lambda rng, shape, sizes: jax.random.uniform(rng, shape, minval=-1.0) * (3 / shape[-1]) ** 0.5,
  'inverse_root': lambda rng, shape, sizes: jnp.full(shape, sizes['features'] ** -0.5),
}


class Param(NamedTuple):
  """A learned parameter: `shape` names sizes or their sums ('query+key'), `init` a row of INITIALIZERS or a number.

  A parameter of shape () may be fixed by a spec string, and is then learned no more: `'entmax(alpha=1.3)'`.
  """

  shape: tuple[str, ...]
  init: str | float = 'glorot'


class Row(NamedTuple):
  """One variant of a table.

  Attributes:
    fn: the variant itself, a pure function.
    at_test: what replaces it when deterministic (the hard twin of an expected alignment); None keeps it.
    params: learned parameters by the name of the function's argument.
    sizes: the sizes of its own that `params` mention, with their defaults; a spec string may set them.
    project: whether the query and the key are projected to `features` before the function sees them.
    init_state: (memory size, dtype) -> where its private state starts; needed if and only if fn asks for `state`.
    tanh_sum: of a score that is v · tanh(q + k) + offset: (query, key, *, ...) -> (q [F], k [S, F], v [F], offset []),
      where q comes from the query alone and k from the keys alone.
    product: of a score that is q · k: (query, key, *, ...) -> (q [D], k [S, D]), as for tanh_sum.
    rotation_invariant: of a score: whether it is q · k up to a factor that does not change when both are turned alike.
    pointwise: of a score: whether that of a position comes from its key alone, whatever the others are.
    window: of an alignment that looks through a window: (unmasked positions, *, ...) -> local.Window.
    lookback: of an alignment that can follow a source while it still arrives: how far back it looks, by its options.
      At test it selects one position at or after that of its state, or gives only zeros; its state before the first
      query stands at the first position, and mirrored at the last.
    latent: of an alignment over which training sums: latent.LatentAlignment.
    loss: the auxiliary loss without which its scores learn nothing, '' where gradients are enough.
    dropout: of an alignment with dropout on its weights: dropout.WeightDropout.
  """

  fn: Callable
  at_test: Callable | None = None
  params: Mapping[str, Param] = {}
  sizes: Mapping[str, int] = {}
  project: bool = False
  init_state: Callable[[int, Any], Any] | None = None
  tanh_sum: Callable | None = None
  product: Callable | None = None
  rotation_invariant: bool = False
  pointwise: bool = False
  window: Callable | None = None
  lookback: Callable[..., int] | None = None
  latent: Any = None
  loss: str = ''
  dropout: Any = None

  @property
  def required_inputs(self) -> frozenset[str]:
    """What the attention step has to supply."""
    return frozenset(_required(self.fn)) & SUPPLIED

  @property
  def is_recurrent(self) -> bool:
    """Whether its queries must be scanned in order; every other variant is vmapped over them."""
    return bool(self.required_inputs & RECURRENT)

  @property
  def trains_by_backprop(self) -> bool:
    """Of an alignment: whether the gradient of what it gives is all that it learns by."""
    return not self.latent and not self.loss

  @property
  def is_stateless_pointwise(self) -> bool:
    """Of a score: whether a part of the memory can be scored by itself, with nothing but a query and its keys."""
    return self.pointwise and self.required_inputs <= {'query', 'key'}


# Functions of a row with the options of `fn`, as far as they have them.
TWINS = ('at_test', 'tanh_sum', 'product', 'window', 'lookback')


def _keywords(fn: Callable) -> dict[str, inspect.Parameter]:
  parameters = inspect.signature(fn).parameters.values()
  return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _required(fn: Callable) -> list[str]:
  return [name for name, p in _keywords(fn).items() if p.default is p.empty]


def parameter_names(row: Row) -> list[str]:
  """Names of the learned parameters that `row.fn` asks for."""
  return [name for name in _required(row.fn) if name not in SUPPLIED]


def default_options(row: Row) -> dict[str, Any]:
  """What a spec string may set: keyword defaults, the row's sizes, and parameters that are one number."""
  defaults = {k: p.default for k, p in _keywords(row.fn).items() if p.default is not p.empty}
  scalars = {k: p.init if isinstance(p.init, float) else 1.0 for k, p in row.params.items() if p.shape == ()}
  return defaults | dict(row.sizes) | scalars


def check_table(table: Mapping[str, Row]) -> Mapping[str, Row]:
  """Returns `table`; raises TypeError where a row contradicts its function. Every table is checked at import."""
  for name, row in table.items():
    if set(parameter_names(row)) != set(row.params):
      raise TypeError(
        f'{name}: the function learns {parameter_names(row)}, the row gives shapes for {list(row.params)}'
      )
    for param, (shape, init) in row.params.items():
      unknown = {name for size in shape for name in size.split('+')} - SIZES - set(row.sizes)
      if unknown or not (isinstance(init, float) or init in INITIALIZERS):
        raise TypeError(f'{name}: parameter {param} has unknown sizes {sorted(unknown)} or initialiser {init!r}')
    if ('state' in row.required_inputs) != (row.init_state is not None):
      raise TypeError(f'{name}: init_state must be given if and only if the function asks for state')
    for twin in TWINS:
      if (fn := getattr(row, twin)) and not set(_required(fn)) <= set(_required(row.fn)):
        raise TypeError(f'{name}: {twin} asks for what the variant itself does not have')
    if overlap := set(default_options(row)) & SUPPLIED:
      raise TypeError(f'{name}: {sorted(overlap)} cannot be options')
  return table


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
  """`'name(option=literal)'` -> (`'name'`, `{'option': literal}`). Raises UserError for anything else."""
  found = [_call(node) for node in _terms(spec)]
  if len(found) == 1 and found[0]:
    return found[0]
  raise UserError(f"cannot read {spec!r}; write 'name' or 'name(option=literal, ...)'")


def parse_specs(specs: str) -> dict[str, dict[str, Any]]:
  """`'a(option=literal) + b'` -> `{'a': {'option': literal}, 'b': {}}`; nothing in `''`. Raises UserError otherwise."""
  found = [_call(node) for node in _terms(specs)] if specs.strip() else []
  if all(found) and len(named := dict(found)) == len(found):
    return named
  raise UserError(f"cannot read {specs!r}; write 'name(option=literal, ...) + name + ...', each name once")


def _terms(specs: str) -> list[ast.expr | None]:
  """The terms of a sum from left to right; [None] for what is no expression."""
  try:
    node, terms = ast.parse(specs.strip(), mode='eval').body, []
  except (SyntaxError, ValueError, TypeError, AttributeError):
    return [None]
  while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    node, terms = node.left, [node.right, *terms]
  return [node, *terms]


def _call(node: ast.expr | None) -> tuple[str, dict[str, Any]] | None:
  """`name` or `name(option=literal)`; None for anything else. Raises UserError for an option that is given twice."""
  if isinstance(node, ast.Name):
    return node.id, {}
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
    names = [k.arg for k in node.keywords]
    if twice := [name for name in names if name and names.count(name) > 1]:
      raise UserError(f'{node.func.id}: option {twice[0]} is given twice; possible: once')
    with contextlib.suppress(ValueError, TypeError):
      given = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
      if None not in given:  # **options
        return node.func.id, given
  return None


def lookup(spec: str | Row | Callable, table: Mapping[str, Row], what: str) -> Row:
  """The row that `spec` means: a spec string, a row, or a user's own function of the same signature.

  Raises: UserError for an unknown name or option, with what is possible.
  """
  if isinstance(spec, Row):
    return spec
  if callable(spec):
    if 'state' in (row := Row(spec)).required_inputs:
      raise UserError(f'{what}: this function keeps a state; possible: Row(function, init_state=...), or a name')
    return row
  name, given = parse_spec(spec)
  row = table[choose(name, table, what)]
  possible = default_options(row)
  check_options(f'{what} {name!r}', given, possible)
  sizes = {k: given.pop(k, v) for k, v in row.sizes.items()}
  if any(size < 1 for size in sizes.values()):
    raise UserError(f'{name}: sizes must be at least 1, got {sizes}')
  params = {k: p for k, p in row.params.items() if k not in given}
  bound = {twin: _bind(getattr(row, twin), given) for twin in ('fn', *TWINS)}
  return row._replace(**bound, sizes=sizes, params=params)


def _bind(fn: Callable | None, given: Mapping[str, Any]) -> Callable | None:
  """`fn` with the given options, as far as it has them: a test-time twin may have fewer."""
  if fn is None:
    return None
  mine = {k: v for k, v in given.items() if k in _keywords(fn)}
  return functools.partial(fn, **mine) if mine else fn


def check_options(what: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Raises UserError unless each option that is given has a default and is of its kind."""
  for option, value in given.items():
    _check_option(what, option, value, defaults[choose(option, defaults, f'option of {what}:')])


def _check_option(what: str, option: str, value: Any, default: Any) -> None:
  """Whole numbers are numbers, and None takes anything."""
  kinds = (int, float) if type(default) is float else type(default)
  if default is not None and (not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool)):
    kind = _KINDS.get(type(default), type(default).__name__)
    raise UserError(f'{what}: option {option} is {kind} like {default!r}, got {value!r}')


_KINDS = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a string', tuple: 'a tuple'}


def init_row_params(rng: jax.Array, row: Row, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
  """Initial parameters of one row, float32. Consumes rng. Raises UserError when a user's function has no shapes."""
  if missing := set(parameter_names(row)) - set(row.params):
    raise UserError(f'no shapes for the parameters {sorted(missing)} of {row.fn}; give a Row(fn, params=...) instead')
  sizes = {**sizes, **row.sizes}
  params = {}
  for i, (name, (shape, init)) in enumerate(sorted(row.params.items())):
    shape = tuple(sum(sizes[part] for part in size.split('+')) for size in shape)
    make = INITIALIZERS.get(init, lambda rng, shape, sizes, value=init: jnp.full(shape, value))
    params[name] = make(jax.random.fold_in(rng, i), shape, sizes).astype(jnp.float32)
  return params
