"""Tables of variants: one row for each score, alignment or edit. The signature of a variant is its schema.

Its keyword-only arguments declare everything that it needs in addition to its positional ones:

- no default and one of SUPPLIED: the attention step passes it;
- no default and any other name: a learned parameter, whose shape `Row.params` specifies;
- a default: an option, which a spec string may set: `'softmax(temperature=0.5)'`. One of `Row.optional` has the
  default None and becomes a learned parameter by True: `'softmax(sink=True)'`.
"""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from attention_jax.annotations import AbstractArray
from attention_jax.errors import UserError, suggest
from attention_jax.specs import Option, Range, bind, schema_of

POSITIONS = frozenset({'query_position', 'key_position'})  # [] and [S], int32
SUPPLIED = frozenset({'query', 'key', 'remembered', 'rng', 'previous', 'coverage', 'step', 'state'}) | POSITIONS
RECURRENT = frozenset({'previous', 'coverage', 'step', 'state'})
SIZES = frozenset({'query', 'key', 'value', 'features'})  # defined for every row; Row.sizes defines further ones

_SUPPLIED_BY = {'state': 'init_state', 'remembered': 'remember'}  # argument of fn -> the field of Row that computes it


def _init_vector(rng: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, int]) -> jax.Array:
  """Uniform with variance 1 / n, n the last axis; a scalar is 1."""
  return jax.random.uniform(rng, shape, minval=-1.0) * (3 / shape[-1]) ** 0.5 if shape else jnp.ones(())


def _init_glorot(rng: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, int]) -> jax.Array:
  """Uniform with variance 2 / (n_in + n_out) of a matrix (Glorot & Bengio 2010); else as `_init_vector`."""
  return jax.nn.initializers.glorot_uniform()(rng, shape) if len(shape) > 1 else _init_vector(rng, shape, sizes)


INITIALIZERS: Mapping[str, Callable] = {
  'glorot': _init_glorot,
  'vector': _init_vector,
  'inverse_root': lambda rng, shape, sizes: jnp.full(shape, sizes['features'] ** -0.5),
}


class Param(NamedTuple):
  """A learned parameter.

  A spec string may fix a parameter of shape (), which is then no longer learned: `'entmax(alpha=1.3)'`.

  Attributes:
    shape: one entry per axis: the name of a size, or a sum of sizes such as 'query+key'.
    init: a key of INITIALIZERS, or the initial value. The default is 'glorot' for matrices, 'vector' for vectors and 1
      for scalars.
  """

  shape: tuple[str, ...]
  init: str | float = 'glorot'


class Product(NamedTuple):
  """Algebraic form of a score q · k, where q depends on the query alone and k on the keys alone.

  Attributes:
    fn: (query, key, *, ...) -> (q [D], k [S, D]).
    rotation_invariant: whether a common rotation of query and key leaves the score unchanged.
    nonnegative: whether no entry of q or k is negative.
    query_factor, key_factor: (query [D], *, ...) -> q [D] and (key [D], *, ...) -> k [D], whose product is the score:
      rotary positions rotate these if the score is not invariant to rotation. None if there are no such functions.
  """

  fn: Callable
  rotation_invariant: bool = False
  nonnegative: bool = False
  query_factor: Callable | None = None
  key_factor: Callable | None = None


class TanhSum(NamedTuple):
  """Algebraic form of a score v · tanh(q + k) + offset, where q depends on the query alone and k on the keys alone.

  Attributes:
    fn: (query, key, *, ...) -> (q [F], k [S, F], v [F], offset []).
  """

  fn: Callable


class Pointwise(NamedTuple):
  """A score without an algebraic form. Its value at a position depends on the query and that position's key alone."""

  fn: None = None


class ReverseMode(NamedTuple):
  """A score with a second function that returns equal results with a faster gradient, but does not support jax.jvp.

  Attributes:
    fn: the second function; its arguments are those of the score.
  """

  fn: Callable


class LocalWindow(NamedTuple):
  """Form of an alignment that assigns weights inside a window of positions only.

  Attributes:
    fn: (number of unmasked positions, first unmasked position, *, ...) -> local.Window.
  """

  fn: Callable


class SoftmaxForm(NamedTuple):
  """Form of an alignment that is a softmax of changed scores, which may also have a sink: see SoftmaxTerms.

  Attributes:
    fn: (number of unmasked positions [...], *, ...) -> SoftmaxTerms. Its options and parameters are those of the
      alignment.
  """

  fn: Callable


class SoftmaxTerms(NamedTuple):
  """The terms of weights σ(log Σ exp f(e) - b) softmax(f(e)), f(e) = transform(scale e).

  Attributes:
    scale: factor of the scores of a query, of the shape of the number of unmasked positions, or [].
    transform: elementwise function of the scaled scores, a jax.tree_util.Partial; None is the identity. Arrays that it
      depends on must be arguments of the Partial.
    sink: b []; None for weights softmax(f(e)).
  """

  scale: float | jax.Array
  transform: Callable | None = None
  sink: jax.Array | None = None


class RequiredLoss(NamedTuple):
  """Training requirement of an alignment whose sampled weights pass no gradient to the scores: an auxiliary loss.

  Attributes:
    name: a key of losses.auxiliary.LOSSES.
  """

  name: str


class Row(NamedTuple):
  """One variant of a table.

  Attributes:
    fn: the variant itself, a pure function.
    at_test: replaces `fn` when deterministic, as `hard_monotonic` replaces `monotonic`; None keeps `fn`.
    params: learned parameters of `fn` and of `remember`, by the name of the argument.
    optional: parameters of shape () that `fn` has only if a spec string sets them to True, by the name of the argument,
      whose default is None.
    sizes: sizes that only this row's `params` mention, with their defaults; a spec string may set them.
    project: whether query and key are projected to `features` before `fn` gets them.
    remember: of an alignment, value [S, V] -> [S, ...]: computes the argument `remembered` of `fn` once per memory. The
      keyword arguments of `remember` are learned parameters.
    init_state: (memory size, dtype) -> the initial private state; required if and only if `fn` takes `state`.
    form: the form that faster implementations rely on: Product, TanhSum, Pointwise or ReverseMode of a score,
      LocalWindow or SoftmaxForm of an alignment, or None. An alignment with dropout has that of the one without.
    training: requirement of training beyond the gradient of the weights: latent.LatentAlignment for an alignment that
      training marginalises over, RequiredLoss, or None.
    lookback: for an alignment that supports streaming: options -> number of positions before the selected one that it
      attends to. At test time the alignment selects one position, at or after the one that its state marks, or returns
      zero weights. The initial state marks the first position; flipped along its last axis, it marks the last one.
    dropout: dropout.WeightDropout of an alignment made by `with_dropout`, else None.
  """

  fn: Callable
  at_test: Callable | None = None
  params: Mapping[str, Param] = {}
  optional: Mapping[str, Param] = {}
  sizes: Mapping[str, int] = {}
  project: bool = False
  remember: Callable | None = None
  init_state: Callable[[int, Any], Any] | None = None
  form: Product | TanhSum | Pointwise | ReverseMode | LocalWindow | SoftmaxForm | None = None
  training: Any = None
  lookback: Callable[..., int] | None = None
  dropout: Any = None

  def __hash__(self) -> int:
    """Makes a row a static argument of jax.jit, although mappings have no hash."""
    return hash((self.fn, self.at_test))

  @property
  def required_inputs(self) -> frozenset[str]:
    """Names of the arguments that the attention step supplies."""
    return frozenset(_required(self.fn)) & SUPPLIED

  @property
  def with_fast_gradient(self) -> 'Row':
    """The same row with the faster gradient of a ReverseMode."""
    return self._replace(fn=self.form.fn) if isinstance(self.form, ReverseMode) else self

  @property
  def is_recurrent(self) -> bool:
    """Whether the definition must scan queries in order because of this variant."""
    return bool(self.required_inputs & RECURRENT)

  @property
  def latent(self) -> Any:
    """The latent.LatentAlignment of an alignment that training marginalises over, else None."""
    return None if isinstance(self.training, RequiredLoss) else self.training

  @property
  def required_loss(self) -> str:
    """Name of the auxiliary loss that training requires, or ''."""
    return self.training.name if isinstance(self.training, RequiredLoss) else ''

  @property
  def trains_by_backprop(self) -> bool:
    """Whether the gradient of the weights suffices to train the alignment."""
    return self.training is None

  @property
  def rotation_invariant(self) -> bool:
    """Whether a common rotation of query and key leaves the score unchanged."""
    return isinstance(self.form, Product) and self.form.rotation_invariant

  @property
  def supports_rotation(self) -> bool:
    """Whether rotary positions can rotate the query and the key, or the factors of the score that they become."""
    return self.rotation_invariant or (isinstance(self.form, Product) and self.form.key_factor is not None)

  @property
  def is_pointwise(self) -> bool:
    """Whether `form` declares that the score of a position depends on the query and that position's key alone."""
    return isinstance(self.form, Product | TanhSum | Pointwise) and self.required_inputs <= {'query', 'key'}


def parameter_names(row: Row) -> list[str]:
  """Returns the names of the learned parameters that `row.fn` takes, and those of `row.remember`."""
  return [name for name in _required(row.fn) if name not in SUPPLIED] + memory_parameter_names(row)


def memory_parameter_names(row: Row) -> list[str]:
  """Returns the names of the learned parameters that `row.remember` takes."""
  return _required(row.remember) if row.remember else []


def select_params(params: Mapping[str, Any], row: Row) -> dict[str, Any]:
  """Returns the learned parameters that `parameter_names` lists. Raises UserError if one is missing."""
  return _select(params, parameter_names(row))


def select_memory_params(params: Mapping[str, Any], row: Row) -> dict[str, Any]:
  """Returns the learned parameters that `row.remember` takes. Raises UserError if one is missing."""
  return _select(params, memory_parameter_names(row))


def _select(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
  if not params.keys() >= set(names):
    raise UserError(f'attend: params must have the entries {sorted(names)}, got {sorted(params)}; use init_params')
  return {name: params[name] for name in names}


def option_schema(row: Row) -> dict[str, Option]:
  """Returns the options that a spec string may set: keyword defaults, the row's sizes, and parameters of shape ()."""
  options = {
    name: option._replace(annotation=_without_arrays(option.annotation))
    for name, option in schema_of(row.fn).items()
    if name not in _required(row.fn)
  }
  options |= {name: options[name]._replace(annotation=float | bool | None) for name in row.optional}
  sizes = {name: Option(int, size, Range(1)) for name, size in row.sizes.items()}
  scalars = {
    name: Option(float, param.init if isinstance(param.init, int | float) else 1.0)
    for name, param in row.params.items()
    if not param.shape
  }
  return options | sizes | scalars


def check_table(table: Mapping[str, Row]) -> Mapping[str, Row]:
  """Returns `table`; raises TypeError for a row that contradicts its function.

  Every table of this package is checked at import, and every row when its parameters are initialised.
  """
  for name, row in table.items():
    if set(parameter_names(row)) != set(row.params):
      raise TypeError(
        f'{name}: the function takes the parameters {parameter_names(row)}, the row has shapes for {list(row.params)}'
      )
    for param, (shape, init) in row.params.items():
      unknown = {name for size in shape for name in size.split('+')} - SIZES - set(row.sizes)
      if unknown:
        expected = ', '.join(sorted(SIZES | set(row.sizes)))
        raise TypeError(f'{name}: parameter {param}: unknown sizes {sorted(unknown)}; expected some of: {expected}')
      if not (isinstance(init, int | float) or init in INITIALIZERS):
        expected = ', '.join(INITIALIZERS)
        raise TypeError(
          f'{name}: parameter {param}: unknown initialiser {init!r}; expected a number or one of: {expected}'
        )
    for supplied, field in _SUPPLIED_BY.items():
      if (supplied in row.required_inputs) != (getattr(row, field) is not None):
        raise TypeError(f'{name}: {field} is required if and only if the function takes {supplied}')
    for companion, fn in _companions(row).items():
      if extra := set(_required(fn)) - set(_required(row.fn)):
        raise TypeError(f'{name}: {companion} takes {sorted(extra)}, which the variant does not take')
    for param in row.optional:
      if param not in _keywords(row.fn) or _keywords(row.fn)[param].default is not None:
        raise TypeError(f'{name}: the function must take the optional parameter {param} by keyword, with default None')
    if overlap := set(option_schema(row)) & SUPPLIED:
      raise TypeError(f'{name}: {sorted(overlap)} are supplied by the attention step and cannot be options')
  return table


def lookup(spec: str | Row | Callable, table: Mapping[str, Row], kind: str) -> Row:
  """Resolves a variant.

  Args:
    spec: a spec string, a row, or a function with the arguments of a row's `fn`.
    table: rows by name.
    kind: the kind of entry, for error messages.

  Returns:
    The row, with the options of the spec string bound to its functions. A function of the table, with or without
    options (functools.partial), has the form of its row.

  Raises:
    UserError: for an unknown name or option, a table entry that is not a Row, a Row without a function, a function
      whose second positional argument is an option, or a bare function that takes `state` or `remembered`, or whose
      options it does not take.
  """
  if isinstance(spec, Row):
    if not callable(spec.fn):
      raise UserError(f'{kind}: the first field of a Row must be a function, got {spec.fn!r}')
    _check_positional(spec.fn, table, kind)
    return spec
  if callable(spec):
    _check_positional(spec, table, kind)
    row = Row(spec, form=_form_of(spec, table))
    for supplied, field in _SUPPLIED_BY.items():
      if supplied in row.required_inputs:
        raise UserError(f'{kind}: a function that takes {supplied} needs {field}: pass Row(function, {field}=...)')
    return row

  def schema(row: Any) -> dict[str, Option]:
    if not isinstance(row, Row):
      raise UserError(f'{kind} {spec!r}: the entry of the table must be a Row, got {row!r}; write Row(function)')
    _check_positional(row.fn, table, kind)
    return option_schema(row)

  _, row, options = bind(spec, table, kind, schema)
  learned = tuple(sorted(name for name in row.optional if options.get(name) is True))
  options = {name: value for name, value in options.items() if not (name in row.optional and isinstance(value, bool))}
  bind_fn = functools.partial(_bind_options, options=tuple(sorted(options.items())), learned=learned)
  return row._replace(
    fn=bind_fn(row.fn),
    at_test=bind_fn(row.at_test),
    remember=bind_fn(row.remember),
    lookback=bind_fn(row.lookback),
    form=row.form and _map_functions(bind_fn, row.form),
    sizes={name: options.get(name, size) for name, size in row.sizes.items()},
    params={name: param for name, param in row.params.items() if name not in options}
    | {name: row.optional[name] for name in learned},
    optional={},
  )


def _check_positional(fn: Callable, table: Mapping[str, Row], kind: str) -> None:
  """Raises UserError for a function such as jax.nn.softmax, whose second positional argument is the axis, not the mask.

  A default None of that argument is allowed.
  """
  try:
    arguments = _positional(fn)
  except ValueError as error:  # of inspect.signature
    raise UserError(f'{kind}: cannot read the arguments of the function: {error}') from error
  if len(arguments) > 1 and not (arguments[1].default is None or arguments[1].default is inspect.Parameter.empty):
    name = getattr(fn, '__name__', repr(fn))
    expected = ', '.join(argument.name for argument in _positional(next(iter(table.values())).fn))
    declared = ', '.join(str(argument.replace(annotation=argument.empty)) for argument in arguments)
    raise UserError(
      f'{kind}: the positional arguments of a function must be ({expected}), got {name}({declared})'
      f'{suggest(name, table)}'
    )


def _positional(fn: Callable) -> list[inspect.Parameter]:
  parameters = inspect.signature(fn).parameters.values()
  return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _form_of(fn: Callable, table: Mapping[str, Row]) -> Any:
  """The form of the table's row of a function, with the options that are bound to it; None for another function."""
  is_partial = isinstance(fn, functools.partial) and not fn.args
  base, options = (fn.func, fn.keywords) if is_partial else (fn, {})
  forms = (row.form for row in table.values() if isinstance(row, Row) and row.fn is base and row.form)
  form = next(forms, None)
  if not form or not options:
    return form
  return (_bind_form.__wrapped__ if has_tracer(options) else _bind_form)(fn, form)


@functools.lru_cache(256)
def _bind_form(fn: functools.partial, form: Any) -> Any:
  """A form with the options of `fn`; cached, so that the rows of one function are equal."""
  options = tuple(fn.keywords.items())
  return _map_functions(lambda companion: _bind_options.__wrapped__(companion, options), form)


def _map_functions(change: Callable[[Callable], Callable], form: Any) -> Any:
  """A form with `change` applied to its functions."""
  return form._replace(**{name: change(field) for name, field in form._asdict().items() if callable(field)})


def has_tracer(tree: Any) -> bool:
  """Returns whether a tree has an array that jax is tracing, which must not be kept after the trace."""
  return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def init_row_params(
  rng: jax.Array, row: Row, sizes: Mapping[str, int], names: Sequence[str] | None = None
) -> dict[str, jax.Array]:
  """Returns initial parameters of one row, float32.

  Args:
    rng: a PRNG key, consumed.
    row: the row.
    sizes: a value for each name of SIZES that the shapes of its parameters contain; `row.sizes` adds the row's own.
    names: names of the parameters to initialise; None for all of them.

  Raises:
    UserError: for a function whose parameters have no shapes.
    TypeError: as `check_table`.
  """
  if missing := set(parameter_names(row)) - set(row.params):
    raise UserError(f'no shapes for the parameters {sorted(missing)} of {row.fn}; use Row(fn, params=...) instead')
  check_table({getattr(row.fn, '__name__', 'row'): row})
  sizes = {**sizes, **row.sizes}
  params = {}
  for i, (name, (shape, init)) in enumerate(sorted(row.params.items())):
    if names is not None and name not in names:
      continue
    shape = tuple(sum(sizes[part] for part in size.split('+')) for size in shape)
    initializer = INITIALIZERS.get(init, lambda rng, shape, sizes, value=init: jnp.full(shape, value))
    params[name] = initializer(jax.random.fold_in(rng, i), shape, sizes).astype(jnp.float32)
  return params


def _companions(row: Row) -> dict[str, Callable]:
  """Functions of a row whose required keyword-only arguments must be among those of `fn`."""
  companions = {'at_test': row.at_test, 'lookback': row.lookback, 'form': row.form and row.form.fn}
  return {name: fn for name, fn in companions.items() if fn is not None}


def _without_arrays(annotation: Any) -> Any:
  """Removes arrays, which a spec string cannot contain: `float | Float[Array, '']` becomes float."""
  if not isinstance(annotation, types.UnionType):
    return annotation
  literals = [member for member in get_args(annotation) if not _is_array_type(member)]
  return functools.reduce(operator.or_, literals)


def _is_array_type(annotation: Any) -> bool:
  return isinstance(annotation, type) and issubclass(annotation, AbstractArray)


def _keywords(fn: Callable) -> dict[str, inspect.Parameter]:
  parameters = inspect.signature(fn).parameters.values()
  return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _required(fn: Callable) -> list[str]:
  return [name for name, p in _keywords(fn).items() if p.default is p.empty]


@functools.lru_cache(1024)
def _bind_options(
  fn: Callable | None, options: tuple[tuple[str, Any], ...], learned: tuple[str, ...] = ()
) -> Callable | None:
  """`fn` with those of the options that it takes; a companion may take fewer than the variant.

  Its arguments `learned` have no default. Cached, so that equal spec strings have equal rows, for which jax compiles
  once.
  """
  if fn is None:
    return None
  keywords = _keywords(fn)
  accepted_options = {name: value for name, value in options if name in keywords}
  if not accepted_options and not keywords.keys() & set(learned):
    return fn
  bound = functools.partial(fn, **accepted_options)
  parameters = inspect.signature(bound).parameters.values()
  required = [p.replace(default=p.empty) if p.name in learned else p for p in parameters]
  bound.__signature__ = inspect.Signature(required)
  return bound
