"""Configs: the fields of a system, their defaults and their descriptions."""

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import UserError, choose
from attention_jax.modules.attention import Attention
from attention_jax.specs import Option, Range, check_value, schema_of
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.config import Training
from attention_jax.training.partition import MeshConfig

# Fields of Attention that no config sets, because the module that contains the attention does.
SET_BY_PARENT = ('positions', 'output_scale', 'dtype', 'parent', 'name')
MAX_SEEDS = 1000  # runs side by side: each has a folder with open files


def default_config(system: str = 'translation') -> ConfigDict:
  """Returns the config of a system with every field at its default.

  Args:
    system: a name of registry.SYSTEMS.
  """
  groups = SYSTEMS[choose(system, SYSTEMS, 'system')].config_groups
  config = ConfigDict({'system': system, 'training': _field_defaults(Training), 'mesh': _field_defaults(MeshConfig)})
  for path, cls in groups.items():
    *parents, name = path.split('.')
    parent = config[parents[0]] if parents else config
    parent[name] = ConfigDict(_field_defaults(cls, exclude=SET_BY_PARENT if cls is Attention else ()))
  config.initial_run = ''  # a run whose best parameters and vocabularies this one starts from
  config.initial_state = False  # whether it continues the latest state of that run, with its optimiser and its step
  config.initial_vectors = ''  # files of word vectors that embeddings start from
  config.seeds = 1  # number of runs trained side by side, with training.seed and the seeds that follow it
  return config


def fill_defaults(config: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Adds the defaults of missing fields, so that the config of an earlier version can be used.

  Args:
    config: a config, perhaps without some fields.
    name: how error messages refer to the config, such as 'the config' or the path of its file.

  Raises:
    UserError: for anything but a mapping, for an unknown system, for unknown fields, and for values whose type does not
      suit the default.
  """
  if not isinstance(config, Mapping):
    raise UserError(f'{name} must be an object with the groups of a config, got {config!r}')
  flat = flatten_dict(config, sep='.')
  flat_default = flatten_dict(default_config(config.get('system', 'translation')).to_dict(), sep='.')
  if unknown := sorted(set(flat) - set(flat_default)):
    raise UserError(
      f'unknown fields in {name}: {", ".join(unknown)}; expected the fields of systems.config.default_config()'
    )
  for field, value in flat.items():
    _check_type(f'{name}: config.{field}', value, flat_default[field])
  return unflatten_dict(flat_default | flat, sep='.')


def _check_type(subject: str, value: Any, default: Any) -> None:
  """Raises UserError for a value whose type does not suit the default of its field.

  A field whose default is a string or a tuple may hold either; its value is checked where it is used.
  """
  option = Option(type(default), default)
  if isinstance(default, bool | int | float):
    check_value(subject, value, option)
  elif isinstance(default, str | tuple) and not isinstance(value, str | list | tuple):
    raise UserError(f'{subject} must be a string or a list, got {value!r}')


def _field_defaults(cls: type, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
  return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in exclude}


class FieldDescription(NamedTuple):
  """Description of one field of a config.

  Attributes:
    type: its annotation, without module names.
    default: its default; specs.REQUIRED if it has none.
    range: the allowed range of a number, or None.
    meaning: its entry in TOP_LEVEL_MEANINGS, or in the 'Attributes:' section of the class; '' if it has none.
  """

  type: str
  default: Any
  range: Range | None
  meaning: str


TOP_LEVEL_MEANINGS = {
  'system': 'a key of systems.registry.SYSTEMS',
  'initial_run': 'run folder, its URL, or @NAME of a ready-made model, whose best parameters and vocabularies the run '
  'starts from, see docs/systems.md; empty for random parameters',
  'initial_state': 'whether the run continues the latest state of initial_run: parameters, optimiser and step',
  'initial_vectors': 'file of word vectors that the embeddings start from, see docs/systems.md; for source and target '
  'two, separated by a comma, of which one may be empty',
  'seeds': 'number of runs trained side by side, with training.seed and the seeds that follow it',
}


def describe_config(system: str) -> dict[str, dict[str, FieldDescription]]:
  """Describes the fields of a system's config.

  Args:
    system: a key of SYSTEMS.

  Returns:
    group -> field -> description; the group of the fields outside of all groups is ''.

  Raises:
    UserError: for an unknown system.
  """
  classes = {'training': Training, 'mesh': MeshConfig} | dict(SYSTEMS[choose(system, SYSTEMS, 'system')].config_groups)
  top_level = {
    'system': FieldDescription('str', system, None, TOP_LEVEL_MEANINGS['system']),
    'initial_run': FieldDescription('str', '', None, TOP_LEVEL_MEANINGS['initial_run']),
    'initial_state': FieldDescription('bool', False, None, TOP_LEVEL_MEANINGS['initial_state']),
    'initial_vectors': FieldDescription('str', '', None, TOP_LEVEL_MEANINGS['initial_vectors']),
    'seeds': FieldDescription('int', 1, Range(1, MAX_SEEDS), TOP_LEVEL_MEANINGS['seeds']),
  }
  groups = {
    group: describe_fields(cls, exclude=SET_BY_PARENT if cls is Attention else ()) for group, cls in classes.items()
  }
  return {'': top_level} | groups


def describe_fields(cls: type, exclude: Collection[str] = ()) -> dict[str, FieldDescription]:
  """Describes the fields of a dataclass from their annotations and its docstring.

  Args:
    cls: the dataclass.
    exclude: names of fields to leave out.

  Returns:
    name -> description.
  """
  meanings = {}
  for base in reversed(cls.__mro__):
    meanings |= _attribute_meanings(base)
  descriptions = {}
  for name, option in schema_of(cls, exclude).items():
    annotation = re.sub(r'(?:\w+\.)+(\w+)', r'\1', inspect.formatannotation(option.annotation))
    descriptions[name] = FieldDescription(annotation, option.default, option.range, meanings.get(name, ''))
  return descriptions


def _attribute_meanings(cls: type) -> dict[str, str]:
  """Reads the section 'Attributes:' of a docstring: name -> meaning. An entry 'a, b: ...' describes both names."""
  _, _, section = inspect.cleandoc(cls.__doc__ or '').partition('Attributes:\n')
  meanings = {}
  names = []
  for line in section.splitlines():
    if line and not line.startswith(' '):
      break  # the next section
    if entry := re.fullmatch(r'  (\w+(?:, \w+)*): (.*)', line):
      names = entry[1].split(', ')
      meanings |= dict.fromkeys(names, entry[2])
    elif line.strip():
      meanings |= {name: f'{meanings[name]} {line.strip()}' for name in names}
  return meanings
