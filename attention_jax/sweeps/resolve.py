"""Resolves settings to whole configs, and reports the mistakes of all settings before anything starts."""

import ast
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from attention_jax.errors import UserError, UserErrors, choose
from attention_jax.specs import Option, check_value, format_spec, parse
from attention_jax.sweeps.space import PRESET, Setting, label, short_names
from attention_jax.systems.config import RunConfig, flatten_config, parse_config
from attention_jax.systems.experiment import check_config, measurable_metrics
from attention_jax.systems.initial_run import check_initial_run
from attention_jax.training.partition import MESH_FIELDS

Fields = dict[str, Any]  # a config by dotted path
Load = Callable[[str], Mapping[str, Any]]  # 'configs/dates.py:luong2015_birnn' -> config

SEED_FIELDS = ('seeds', 'training.seed')  # set by the sweep itself
# Fields in which runs of one setting may differ: the seeds, and fields that do not change the updates (those of the
# mesh change their rounding).
IRRELEVANT_FIELDS = frozenset(
  (*SEED_FIELDS, *MESH_FIELDS, 'training.checkpoint_every', 'training.keep', 'training.log_every')
)
# Strings that are no spec strings; a path below them is an unknown field, not an option.
PLAIN_STRINGS = frozenset(
  (
    'system',
    'initial_run',
    'initial_vectors',
    'data.batch_unit',
    'data.folder',
    'data.normalization',
    'evaluation.length_penalty',
    'model.attention.implementation',
    'model.dtype',
    'training.anneal',
    'training.frozen',
    'training.on_nonfinite',
    'training.select',
  )
)
FIXED_FIELDS = {'system': 'is that of the config file'} | dict.fromkeys(SEED_FIELDS, 'is set by --seeds')
BOOLEANS = {'true': True, 'false': False}
ID_DIGITS = 8


class Base(NamedTuple):
  """The config that all settings of a sweep change.

  Attributes:
    path: config file and preset, 'configs/dates.py:luong2015_birnn'.
    overrides: fields that the command line sets, for every setting.
    load: reads a config file.
  """

  path: str
  overrides: Mapping[str, Any]
  load: Load


class Resolved(NamedTuple):
  """A setting with its whole config.

  Attributes:
    setting: the setting as it was written, with values of the types of their fields.
    path: config file and preset.
    overrides: the fields that differ from that preset; the command of a run sets them as flags.
    config: the whole config.
    id: hash of the config, see config_id.
  """

  setting: Setting
  path: str
  overrides: Fields
  config: RunConfig
  id: str


def resolve_settings(base: Base, settings: Sequence[Setting]) -> list[Resolved]:
  """Resolves and checks settings. Of several settings with the same id, returns the first.

  Raises:
    UserErrors: with the mistakes of all settings. Of each setting, these are all mistakes that `resolve` finds or, if
      there are none, the first one that the checks of its config find.
  """
  resolved: dict[str, Resolved] = {}
  mistakes: dict[str, list[str]] = {}  # message -> labels of the settings
  names = short_names(dict.fromkeys(field for setting in settings for field in setting))
  for setting in settings:
    try:
      result = resolve(base, setting)
      check_config(result.config)
      check_initial_run(result.config)
      resolved.setdefault(result.id, result)
    except UserError as error:
      for line in error.lines:
        mistakes.setdefault(line, []).append(label(setting, names))
  if mistakes:
    raise UserErrors([_describe_mistake(*item) for item in mistakes.items()])
  return list(resolved.values())


def _describe_mistake(message: str, labels: Sequence[str]) -> str:
  suffix = f' and {len(labels) - 1} more' if len(labels) > 1 else ''
  return f'{message} (setting {labels[0]}{suffix})'


def check_baseline(resolved: Sequence[Resolved], baseline: Setting | None, has_earlier_settings: bool = False) -> None:
  """Checks that the baseline of the report is one of the settings.

  Args:
    resolved: the settings.
    baseline: some of its fields; None for the first setting.
    has_earlier_settings: whether the sweep may also have earlier settings.

  Raises:
    UserError: unless it matches exactly one setting; with `has_earlier_settings`, none is allowed too.
  """
  matches = [result for result in resolved if _has_values(result, baseline or {})]
  if baseline and len(matches) != 1 and not (has_earlier_settings and not matches):
    names = '; '.join(label(result.setting) for result in resolved)
    raise UserError(f'--baseline: {label(baseline)} matches {len(matches)} settings, expected one of: {names}')


def check_metrics(resolved: Sequence[Resolved], metrics: Sequence[str], has_earlier_settings: bool = False) -> None:
  """Checks that runs of the settings may measure the metrics of the report; some metrics depend on the data.

  Args:
    resolved: the settings.
    metrics: the metrics of the report.
    has_earlier_settings: whether the sweep may also have earlier settings; then nothing is checked, because they may
      measure others.

  Raises:
    UserError: for a metric that no run of the settings can measure, unless `has_earlier_settings`.
  """
  if has_earlier_settings:
    return
  names = set().union(*(measurable_metrics(result.config) for result in resolved))
  for metric in metrics:
    choose(metric, names, 'metric of the report')


def _has_values(result: Resolved, values: Setting) -> bool:
  fields = flatten_config(result.config) | dict(result.setting)
  return all(field in fields and is_value(field, value, fields[field]) for field, value in values.items())


def is_value(field: str, value: Any, actual: Any) -> bool:
  """Returns whether a value is that of a setting. Lists, which JSON has instead of tuples, equal tuples.

  Args:
    field: its path.
    value: a value, or its text.
    actual: the value of the setting.

  Raises:
    UserError: as `parse_value`.
  """
  actual = tuple(actual) if isinstance(actual, list) else actual
  return json.dumps(parse_value(field, value, actual)) == json.dumps(actual)


def resolve(base: Base, setting: Setting) -> Resolved:
  """Applies a setting to its preset.

  Raises:
    UserError: for a preset that `base.load` rejects; otherwise with all unknown fields (also those of the command line
      that the preset lacks), FIXED_FIELDS, and values of another type.
  """
  path = base.path
  if PRESET in setting:
    path = f'{base.path.partition(":")[0]}:{setting[PRESET]}'
  preset = flatten_dict(dict(base.load(path)), sep='.')
  fields = preset | base.overrides
  typed: Fields = {}
  mistakes = [f'{path}: {_unknown_field(preset, field)}' for field in base.overrides if field not in preset]
  # A spec string that is set after an option of it would replace the option.
  whole_fields_first = sorted(setting, key=lambda field: field not in fields)
  for field in whole_fields_first:
    try:
      typed[field] = setting[field] if field == PRESET else _apply(fields, field, setting[field])
    except UserError as error:
      mistakes += error.lines
  if mistakes:
    raise UserErrors(mistakes)
  typed = {field: typed[field] for field in setting}
  overrides = {field: value for field, value in fields.items() if value != preset[field]}
  config = parse_config(unflatten_dict(fields, sep='.'), path)
  return Resolved(typed, path, overrides, config, config_id(fields))


def config_id(fields: Mapping[str, Any]) -> str:
  """Returns a hash of the config without IRRELEVANT_FIELDS.

  Args:
    fields: the config by dotted path.
  """
  relevant = {field: value for field, value in fields.items() if field not in IRRELEVANT_FIELDS}
  text = json.dumps(relevant, sort_keys=True)  # tuples and lists are equal here, as in a stored config
  return hashlib.blake2b(text.encode(), digest_size=ID_DIGITS // 2).hexdigest()


def _apply(fields: Fields, field: str, value: Any) -> Any:
  """Sets a field, or an option of the spec string of a field, in place; returns the parsed value."""
  if field in FIXED_FIELDS:
    raise UserError(f'config.{field} {FIXED_FIELDS[field]}; it cannot be varied')
  if field in fields:
    fields[field] = parse_value(field, value, fields[field])
    return fields[field]
  parent, _, option = field.rpartition('.')
  if isinstance(fields.get(parent), str) and fields[parent] and parent not in PLAIN_STRINGS:
    name, options = parse(fields[parent], f'config.{parent}')
    parsed = _literal(value)
    fields[parent] = format_spec(name, options | {option: parsed})
    return parsed
  raise UserError(_unknown_field(fields, field))


def _unknown_field(fields: Mapping[str, Any], field: str) -> str:
  """The message for a path that is no field: suggests one with the same end or a similar name, or names the group."""
  same_end = [name for name in fields if name.endswith(f'.{field}')]
  if same_end:
    return f"unknown field of config: '{field}' (did you mean '{same_end[0]}'?)"
  level = unflatten_dict(dict(fields), sep='.')
  path = 'config'
  for part in field.split('.'):
    if not isinstance(level, dict):
      return f'{path} is {level!r} and has no fields, got {field!r}'
    try:
      choose(part, level, f'field of {path}:')
    except UserError as error:
      return str(error)
    level = level[part]
    path = f'{path}.{part}'
  return f'{path} is a group of fields; expected one of: {", ".join(level)}'


def parse_value(field: str, value: Any, default: Any) -> Any:
  """Returns a value with the type of a field.

  Args:
    field: its path.
    value: a value, or its text; the text of a string may be in quotes, so that it can have commas and semicolons.
    default: a value of the field, which determines the type.

  Raises:
    UserError: for a value of another type.
  """
  if isinstance(value, str):
    value = _unquote(value) if isinstance(default, str) else _literal(value)
  if isinstance(default, tuple) and isinstance(value, list):
    value = tuple(value)
  if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  check_value(f'config.{field}', value, Option(type(default)))
  return value


def _unquote(text: str) -> str:
  """The text within quotes; anything else stays as it is."""
  value = _literal(text) if text[:1] in ('"', "'") else text
  return value if isinstance(value, str) else text


def _literal(value: Any) -> Any:
  """The value of 'true', 'false' or a Python literal; anything else stays as it is."""
  if not isinstance(value, str):
    return value
  if value.lower() in BOOLEANS:
    return BOOLEANS[value.lower()]
  with contextlib.suppress(ValueError, SyntaxError):
    return ast.literal_eval(value)
  return value
