"""Settings of a sweep: which values of which config fields are compared.

A setting maps fields of the config to values, in order: {'model.attention.score': 'dot'}. Two keys are special: a path
that continues below a spec string sets one option of it ('training.schedule.peak'), and 'preset' selects another preset
of the config file. `grid` and `zipped` make lists of settings from values, and `product` combines such lists; they are
called for flags and in `get_sweep()`.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attention_jax.errors import UserError
from attention_jax.specs import split_outside_brackets

Setting = Mapping[str, Any]
PRESET = 'preset'
BASE_LABEL = 'base'  # label of a setting that changes nothing


class Sweep(NamedTuple):
  """The sweep that `get_sweep()` of a config file describes.

  Attributes:
    settings: the settings to compare.
    seeds: number of seeds of each setting.
    baseline: the setting that the others are compared with; None for the first.
    metrics: metrics of the report, the most important first; () for the default of report.ReportOptions.
    question: the question that the sweep answers; the title of its report.
  """

  settings: Sequence[Setting]
  seeds: int = 3
  baseline: Setting | None = None
  metrics: tuple[str, ...] = ()
  question: str = ''


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Setting]:
  """Returns every combination of the values of each field; the last field varies fastest."""
  return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def zipped(axes: Mapping[str, Sequence[Any]]) -> list[Setting]:
  """Returns one setting per position: the first value of every field, then the second, ...

  Raises:
    UserError: if the fields have different numbers of values.
  """
  lengths = {field: len(values) for field, values in axes.items()}
  if len(set(lengths.values())) > 1:
    counts = ', '.join(f'{field}: {length}' for field, length in lengths.items())
    raise UserError(f'paired fields must have the same number of values, got {counts}')
  return [dict(zip(axes, values, strict=True)) for values in zip(*axes.values(), strict=True)]


def product(*groups: Sequence[Setting]) -> list[Setting]:
  """Returns every combination of one setting of each group.

  Raises:
    UserError: if two groups set the same field.
  """
  fields = [{field for setting in group for field in setting} for group in groups]
  for first, second in itertools.combinations(fields, 2):
    if repeated := sorted(first & second):
      raise UserError(f'{repeated[0]} must be varied once, got it in two groups of settings')
  return [
    {field: value for setting in combination for field, value in setting.items()}
    for combination in itertools.product(*groups)
  ]


def parse_grid(text: str) -> list[Setting]:
  """Parses 'field=value,value,...; field=value,...' into every combination.

  Commas and semicolons inside of brackets or quotes belong to a value. Values stay text.

  Raises:
    UserError: for anything else, and for a field or a value of a field that occurs twice.
  """
  axes = _parse_axes(text, '--grid')
  for field, values in axes.items():
    if repeated := [value for value in values if values.count(value) > 1]:
      raise UserError(f'--grid={field}={",".join(values)}: value {repeated[0]!r} must occur once')
  return grid(axes)


def parse_pair(text: str) -> list[Setting]:
  """Parses 'field=value,value; field=value,value', whose values are paired by position. Values stay text.

  Raises:
    UserError: for anything else, for a field that occurs twice, for fields with different numbers of values, and for a
      pair that occurs twice; a value of one field may repeat.
  """
  settings = zipped(_parse_axes(text, '--pair'))
  if repeated := [setting for setting in settings if settings.count(setting) > 1]:
    raise UserError(f'--pair={text}: {label(repeated[0])} must occur once')
  return settings


def parse_setting(text: str, flag: str = '--setting') -> Setting:
  """Parses 'field=value; field=value'. Values stay text; an empty text is an empty setting.

  Args:
    text: the text.
    flag: the flag that it comes from, for error messages.

  Raises:
    UserError: for anything else, and for a field that is set twice.
  """
  setting: dict[str, Any] = {}
  for part in filter(str.strip, split_outside_brackets(text, ';')):
    field, value = _split_assignment(part, flag, 'field=value; field=value')
    if field in setting:
      raise UserError(f'{flag}={text}: {field} must be set once')
    setting[field] = value
  return setting


def _parse_axes(text: str, flag: str) -> dict[str, list[str]]:
  """'a=1,2; b=3,4' -> {'a': ['1', '2'], 'b': ['3', '4']}."""
  axes: dict[str, list[str]] = {}
  for part in filter(str.strip, split_outside_brackets(text, ';')):
    field, values = _split_assignment(part, flag, 'field=value,value,...')
    if field in axes:
      raise UserError(f'{flag}={text}: {field} must be set once')
    axes[field] = [value.strip() for value in split_outside_brackets(values, ',')]
  if not axes:
    raise UserError(f'{flag} is empty; expected field=value,value,...')
  return axes


def _split_assignment(part: str, flag: str, expected: str) -> tuple[str, str]:
  field, equals, value = part.strip().partition('=')
  if not equals or not field.strip():
    raise UserError(f'{flag}={part.strip()}: expected {expected}')
  return field.strip().removeprefix('config.'), value.strip()


def label(setting: Setting, names: Mapping[str, str] | None = None) -> str:
  """Returns 'score=dot, alignment=softmax' for a setting.

  Args:
    setting: the setting.
    names: short names of fields, see `short_names`; by default those of this setting's fields.
  """
  names = short_names(setting) if names is None else names
  return ', '.join(f'{names[field]}={value}' for field, value in setting.items()) or BASE_LABEL


def short_names(fields: Iterable[str]) -> dict[str, str]:
  """Maps each field to the shortest suffix of its path that no other field has: 'model.attention.score' -> 'score'.

  A field is mapped to its whole path if each of its suffixes is also a suffix of another field.
  """
  paths = {field: field.split('.') for field in fields}
  names = {}
  for field, path in paths.items():
    suffixes = ('.'.join(path[start:]) for start in range(len(path) - 1, -1, -1))
    other_paths = [f'.{name}' for name in paths if name != field]
    names[field] = next(
      suffix for suffix in suffixes if suffix == field or not any(name.endswith(f'.{suffix}') for name in other_paths)
    )
  return names
