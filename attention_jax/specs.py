"""Spec strings: `'name(option=literal)'` selects a row of a table and sets its options.

One parser and one checker serve every table of the package. The schema of a row lists its options, and is read from the
keyword-only arguments of a function, the fields of a dataclass, or a mapping of defaults. The annotation of a number
may contain its allowed range: `features: Annotated[int, Range(1)]`. Aliases such as `Size` are common ranges.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from attention_jax.errors import UserError, choose, suggest

Row = TypeVar('Row')
REQUIRED = inspect.Parameter.empty  # the default of an option that has none
MAX_INTEGER = 2**31 - 1  # sizes, steps and seeds are 32-bit integers on the device
_TYPE_NAMES = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a string', tuple: 'a tuple'}


@dataclasses.dataclass(frozen=True)
class Range:
  """Allowed values of a number, from `low` to `high`. NaN and infinity are in no range, even without a bound.

  Attributes:
    low, high: the bounds; by default there is none.
    include_low, include_high: whether a bound itself is allowed.
  """

  low: float = -math.inf
  high: float = math.inf
  include_low: bool = True
  include_high: bool = True

  def __contains__(self, value: float) -> bool:
    above = value >= self.low if self.include_low else value > self.low
    below = value <= self.high if self.include_high else value < self.high
    is_finite = -math.inf < value < math.inf  # not math.isfinite, which cannot convert a large int to a float
    return is_finite and above and below

  def __str__(self) -> str:
    low = f'{"at least" if self.include_low else "greater than"} {self.low}'
    high = f'{"at most" if self.include_high else "less than"} {self.high}'
    bounds = [bound for bound, value in ((low, self.low), (high, self.high)) if math.isfinite(value)]
    return ' and '.join(bounds) or 'finite'


class Option(NamedTuple):
  """One entry of a schema: the annotation of the value, its default (REQUIRED if it has none), its range or None."""

  annotation: Any
  default: Any = REQUIRED
  range: Range | None = None


Schema = Mapping[str, Option]


def parse(spec: str, kind: str = 'spec', names: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
  """Parses `'name(option=literal)'`.

  Args:
    spec: the string.
    kind: what the string selects, for error messages: 'decoder'.
    names: names of which the error suggests the nearest one.

  Returns:
    `('name', {'option': literal})`.

  Raises:
    UserError: for anything else.
  """
  calls = [_call(node) for node in _terms(spec)]
  if len(calls) == 1 and calls[0]:
    return calls[0]
  hint = suggest(spec.partition('(')[0], names) if isinstance(spec, str) else ''
  raise UserError(f"cannot parse {kind} {spec!r}{hint}; expected 'name' or 'name(option=literal, ...)'")


def format_spec(name: str, options: Mapping[str, Any]) -> str:
  """Returns the spec string of a name and its options; the inverse of `parse`."""
  if not options:
    return name
  return f'{name}({", ".join(f"{option}={value!r}" for option, value in options.items())})'


def parse_sum(specs: str, kind: str = 'specs') -> dict[str, dict[str, Any]]:
  """Parses `'a(option=literal) + b'`.

  Args:
    specs: the string.
    kind: what the string selects, for error messages: 'auxiliary losses'.

  Returns:
    `{'a': {'option': literal}, 'b': {}}`; an empty dictionary for `''`.

  Raises:
    UserError: for anything else, and for a name that occurs twice.
  """
  calls = [_call(node) for node in _terms(specs)] if specs.strip() else []
  if all(calls) and len(dict(calls)) == len(calls):
    return dict(calls)
  raise UserError(f"cannot parse {kind} {specs!r}; expected 'name(option=literal, ...) + name + ...', each name once")


def schema_of(source: Callable | type | Mapping[str, Any], exclude: Collection[str] = ()) -> dict[str, Option]:
  """Returns the options that `source` accepts.

  Args:
    source: a function (its keyword-only arguments), a dataclass (its fields), or a mapping from names to defaults.
    exclude: names that the caller supplies itself, which are therefore no options.
  """
  if isinstance(source, Mapping):
    options = {name: _option(Any, default) for name, default in source.items()}
  elif dataclasses.is_dataclass(source):
    options = {field.name: _option(field.type, _field_default(field)) for field in dataclasses.fields(source)}
  else:
    parameters = inspect.signature(source).parameters.values()
    options = {p.name: _option(p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
  return {name: option for name, option in options.items() if name not in exclude}


def check_options(subject: str, options: Mapping[str, Any], schema: Schema) -> None:
  """Checks options against a schema.

  Args:
    subject: what the options belong to, for error messages: "decoder 'luong'".
    options: the options to check.
    schema: the options that are allowed.

  Raises:
    UserError: for an unknown or missing option, a value of another type, or one outside of its range.
  """
  for name, value in options.items():
    if not schema:
      raise UserError(f"{subject} has no options, got '{name}'")
    check_value(f'{subject}: option {name}', value, schema[choose(name, schema, f'option of {subject}:')])
  if missing := [name for name, option in schema.items() if option.default is REQUIRED and name not in options]:
    raise UserError(f'{subject} needs {" and ".join(missing)}; its options: {", ".join(schema)}')


def check_value(subject: str, value: Any, option: Option) -> None:
  """Raises UserError, which names `subject`, unless `value` has the type of `option` and lies in its range.

  Args:
    subject: what the value belongs to, for the error: 'config.training.steps'.
    value: the value to check.
    option: the annotation and the range to check against; its default is not used.

  Raises:
    UserError: also for a whole number whose absolute value exceeds MAX_INTEGER.
  """
  if not _has_type(value, option.annotation):
    kind = _TYPE_NAMES.get(option.annotation) or inspect.formatannotation(option.annotation)
    raise UserError(f'{subject} must be {kind}, got {value!r}')
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  limits = option.range or Range()  # of finite numbers
  if is_number and value not in limits:
    expected = 'finite' if value in (math.inf, -math.inf) else limits
    raise UserError(f'{subject} must be {expected}, got {value}')
  if isinstance(value, int) and abs(value) > MAX_INTEGER:
    bound = f'at most {MAX_INTEGER}' if value > 0 else f'at least {-MAX_INTEGER}'
    raise UserError(f'{subject} must be {bound}, got {value}')


def check_fields(config: Any, group: str) -> None:
  """Checks the numbers, booleans and strings of a dataclass instance; fields of other types are not checked.

  Args:
    config: the instance.
    group: what its fields belong to, for error messages: 'config.training'.

  Raises:
    UserError: for a value of another type than annotated, and for a number outside of its range, see `check_value`.
  """
  for name, option in schema_of(type(config)).items():
    if option.annotation in _TYPE_NAMES and option.annotation is not tuple:
      check_value(f'{group}.{name}', getattr(config, name), option)


def bind(
  spec: str,
  table: Mapping[str, Row],
  kind: str,
  schema: Callable[[Row], Schema] = schema_of,
) -> tuple[str, Row, dict[str, Any]]:
  """Finds the row of a table that a spec string selects, and checks the options it sets.

  Args:
    spec: `'name'` or `'name(option=literal, ...)'`.
    table: rows by name.
    kind: the kind of entry, for error messages: 'decoder'.
    schema: maps a row to the options it accepts; by default they are read from the row itself.

  Returns:
    The name, the row, and the options that are set.

  Raises:
    UserError: for a spec that cannot be parsed, an unknown name, and options as in `check_options`.
  """
  name, options = parse(spec, kind, table)
  row = table[choose(name, table, kind)]
  check_options(f'{kind} {name!r}', options, schema(row))
  return name, row, options


def _terms(specs: str) -> list[ast.expr | None]:
  """The terms of a sum from left to right; [None] if `specs` is not an expression."""
  try:
    node = ast.parse(specs.strip(), mode='eval').body
  # RecursionError and MemoryError for text that is nested too deeply.
  except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
    return [None]
  terms = []
  while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    terms.append(node.right)
    node = node.left
  return [node, *reversed(terms)]


def _call(node: ast.expr | None) -> tuple[str, dict[str, Any]] | None:
  """`name` or `name(option=literal)`; None for anything else. Raises UserError for an option that is set twice."""
  if isinstance(node, ast.Name):
    return node.id, {}
  if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
    return None
  names = [keyword.arg for keyword in node.keywords]
  if None in names:  # **options
    return None
  if repeated := [name for name in names if names.count(name) > 1]:
    raise UserError(f'{node.func.id}: option {repeated[0]} must be set once, got it {names.count(repeated[0])} times')
  with contextlib.suppress(ValueError, TypeError, RecursionError):
    return node.func.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
  return None


def _field_default(field: dataclasses.Field) -> Any:
  if field.default is not dataclasses.MISSING:
    return field.default
  return REQUIRED if field.default_factory is dataclasses.MISSING else field.default_factory()


def _option(annotation: Any, default: Any) -> Option:
  """Returns an option; its range is that of an Annotated type.

  A missing type, or Any, is replaced by the type of the default, unless the default is missing or None.
  """
  limits = None
  if typing.get_origin(annotation) is Annotated:
    annotation, *metadata = typing.get_args(annotation)
    limits = next((entry for entry in metadata if isinstance(entry, Range)), None)
  if annotation in (inspect.Parameter.empty, Any) and default is not REQUIRED and default is not None:
    annotation = type(default)
  return Option(Any if annotation is inspect.Parameter.empty else annotation, default, limits)


def _has_type(value: Any, annotation: Any) -> bool:
  """Whether `value` has the annotated type. An int is also a float; a bool is neither. Any accepts every value."""
  if annotation is Any:
    return True
  if annotation in (int, float):
    return isinstance(value, (int, float) if annotation is float else int) and not isinstance(value, bool)
  if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
    return isinstance(value, annotation)
  if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] == (...,):
    item = typing.get_args(annotation)[0]  # of such a tuple, beartype checks one entry, which it draws at random
    return isinstance(value, tuple) and all(_has_type(entry, item) for entry in value)
  return _is_bearable()(value, annotation) and (not isinstance(value, bool) or bool in typing.get_args(annotation))


@functools.cache
def _is_bearable() -> Callable[[Any, Any], bool]:
  """Returns the type check of beartype, imported on first use: few options have types such as `str | None`."""
  from beartype import BeartypeConf
  from beartype.door import is_bearable

  return functools.partial(is_bearable, conf=BeartypeConf(is_pep484_tower=True))


Size = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
MAX_REPEATS = 10_000
Repeats = Annotated[int, Range(1, MAX_REPEATS)]  # number of beams, samples or glimpses of an example
OutputLength = Annotated[int, Range(0, 100_000)]  # every step has an entry in the arrays of a search
Positive = Annotated[float, Range(0, include_low=False)]
NonNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, include_high=False)]


def split_outside_brackets(text: str, separator: str) -> list[str]:
  """Splits text at a character outside of brackets and quotes; within quotes, a backslash escapes a quote."""
  parts = ['']
  depth = 0
  quote = ''
  is_escaped = False
  for char in text:
    if quote:
      quote = '' if char == quote and not is_escaped else quote
      is_escaped = char == '\\' and not is_escaped
    elif char in '\'"':
      quote = char
    else:
      depth += (char in '([{') - (char in ')]}')
    if char == separator and not quote and depth == 0:
      parts.append('')
    else:
      parts[-1] += char
  return parts
