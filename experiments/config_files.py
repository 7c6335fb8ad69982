"""Config files and the flags that override their fields, checked before ml_collections parses them."""

import difflib
import inspect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import tuple_parser

from attention_jax.errors import UserError, choose, run_user_file
from attention_jax.sweeps.space import Sweep

PROJECT = Path(__file__).parent.parent  # holds configs/, in a clone and in an installed package
CONFIG_FLAGS = ('-config', '--config')
# type of a field -> its name in errors, and the parser of its flag
FIELD_PARSERS = {
  int: ('a whole number', flags.IntegerParser()),
  float: ('a number', flags.FloatParser()),
  bool: ('true or false', flags.BooleanParser()),
  tuple: ('a tuple', tuple_parser.TupleParser()),
}


def load_config(path: str) -> ConfigDict:
  """Loads a config file.

  Args:
    path: 'FILE:PRESET', for `get_config(preset)` of that file, or 'FILE', for `get_config()`.

  Returns:
    The config.

  Raises:
    UserError: for a file or preset that does not exist, and for a mistake in the file.
  """
  path, *preset = find_config(path).split(':', 1)
  if not os.path.isfile(path):
    raise UserError(_missing_file_message(path))
  config = run_user_file(
    path,
    use=lambda names: names['get_config'](*preset),
    purpose='a config file defines get_config(preset)',
  )
  if not isinstance(config, ConfigDict):
    raise UserError(f'{path}: get_config must return a modified systems.config.default_config(), got {config!r}')
  return config


def load_sweep(path: str) -> Sweep | None:
  """Returns the sweep that a config file defines, or None if it defines none.

  Args:
    path: 'FILE' or 'FILE:PRESET'; the preset is passed to a get_sweep that has a parameter.

  Raises:
    UserError: for a file that does not exist, and for a mistake in it.
  """
  path, *preset = find_config(path).split(':', 1)

  def call(names: dict[str, Any]) -> Any:
    if 'get_sweep' not in names:
      return None
    get_sweep = names['get_sweep']
    return get_sweep(*preset) if inspect.signature(get_sweep).parameters else get_sweep()

  sweep = run_user_file(path, use=call, purpose='get_sweep() returns a sweeps.space.Sweep')
  if sweep is not None and not isinstance(sweep, Sweep):
    raise UserError(f'{path}: get_sweep must return a sweeps.space.Sweep, got {sweep!r}')
  return sweep


def find_config(path: str) -> str:
  """Returns the path of a config file; one that does not exist is looked up in the project, wherever it is installed.

  Args:
    path: 'FILE' or 'FILE:PRESET'; '~' stands for the home folder.

  Returns:
    The path in the same form, with '~' expanded; that of the project's file if the file exists only there.
  """
  path = os.path.expanduser(path)
  file, colon, preset = path.partition(':')
  if not file or os.path.isfile(file) or not (PROJECT / file).is_file():
    return path
  return f'{PROJECT / file}{colon}{preset}'


def resolve_config_arguments(arguments: Sequence[str]) -> list[str]:
  """Applies `find_config` to the value of --config in a command line without the name of the program."""
  resolved = []
  previous = ''
  for argument in arguments:
    flag, equals, path = argument.partition('=')
    if previous in CONFIG_FLAGS:
      argument = find_config(argument)
    elif equals and flag in CONFIG_FLAGS:
      argument = f'{flag}={find_config(path)}'
    previous = argument
    resolved.append(argument)
  return resolved


def check_config_arguments(arguments: Sequence[str]) -> None:
  """Checks --config and the flags that set its fields.

  ml_collections reports some of these mistakes in several lines, and some not at all.

  Args:
    arguments: the command line without the name of the program.

  Raises:
    UserError: for a file or preset that does not exist, an unknown field or a group of fields, a value of another type,
      a field before --config, and a tuple that is set twice.
  """
  config = None
  names = set()
  for argument, next_argument in itertools.pairwise([*arguments, '']):
    if not argument.startswith('-'):
      continue
    name, equals, value = argument.lstrip('-').partition('=')
    if not equals:
      value = next_argument
    if name == 'config':
      config = load_config(value)
    elif name.startswith(('config.', 'noconfig.')):
      if config is None:
        raise UserError(f'{argument}: write --config=FILE:PRESET before it')
      field_type = _check_field(config, name.removeprefix('no'), value, has_value=bool(equals))
      if field_type is tuple and name in names:
        raise UserError(f'--{name} must be set once, got it twice; the tuples would be concatenated')
      names.add(name)


def _check_field(config: ConfigDict, name: str, value: str, has_value: bool) -> type:
  """Returns the type of a field, after checking that it exists and, for the types of FIELD_PARSERS, its value.

  Args:
    config: the config.
    name: the path of the field, 'config.training.steps'.
    value: its new value.
    has_value: whether the flag has the form --name=value; a switch may omit the value.

  Raises:
    UserError: for an unknown field, a group of fields, and a value of another type.
  """
  field: Any = config
  path, *parts = name.split('.')
  for part in parts:
    if not isinstance(field, ConfigDict):
      raise UserError(f'--{name}: {path} is {field!r} and has no fields')
    choose(part, field, f'field of {path}:')
    field = field[part]
    path = f'{path}.{part}'
  field_type = type(field)
  if isinstance(field, ConfigDict):
    raise UserError(f'--{name} is a group of fields; use --{name}.FIELD, FIELD one of: {", ".join(field)}')
  if field_type in FIELD_PARSERS and (has_value or field_type is not bool):
    expected, parser = FIELD_PARSERS[field_type]
    try:
      parser.parse(value)
    except (ValueError, TypeError):
      example = '' if field_type is bool else f' such as {field!r}'
      raise UserError(f"{name} must be {expected}{example}, got '{value}'") from None
  return field_type


def _missing_file_message(path: str) -> str:
  folder = path if os.path.isdir(path) else os.path.dirname(path) or '.'
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  config_files = [name for name in names if name.endswith('.py') and not name.startswith('_')]
  nearest = difflib.get_close_matches(os.path.basename(path), config_files, n=1)
  hint = f" (did you mean '{os.path.join(folder, nearest[0])}'?)" if nearest else ''
  return f"no config file '{path}'{hint}; config files in {folder}: {', '.join(config_files) or 'none'}"
