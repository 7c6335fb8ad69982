"""The config of a run: its fields, their defaults and their descriptions."""

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple

from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import UserError, choose
from attention_jax.modules.attention import Attention
from attention_jax.specs import Option, Range, check_fields, check_value, schema_of
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.config import Training
from attention_jax.training.folder import CONFIG, read_config
from attention_jax.training.partition import MeshConfig

# Fields of Attention that no config sets, because the module that contains the attention does.
SET_BY_PARENT = ('positions', 'output_scale', 'dtype', 'parent', 'name')
MAX_SEEDS = 1000  # runs side by side: each has a folder with open files


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """The config of a run. The classes of the groups `data`, `model` and `evaluation` are those of the system.

  Attributes:
    system: a key of systems.registry.SYSTEMS.
    seeds: number of runs trained side by side, with training.seed and the seeds that follow it.
    initial_run: run folder, its URL, or @NAME of a ready-made model, whose best parameters and vocabularies the run
      starts from, see docs/systems.md; empty for random parameters.
    initial_state: whether the run continues the latest state of initial_run: parameters, optimiser and step.
    initial_vectors: file of word vectors that the embeddings start from, see docs/systems.md; for source and target
      two, separated by a comma, of which one may be empty.
    data, model, evaluation: see `System.config_groups`.
    training: options of training.
    mesh: how training is spread over devices.
  """

  system: str
  seeds: Annotated[int, Range(1, MAX_SEEDS)] = 1
  initial_run: str = ''
  initial_state: bool = False
  initial_vectors: str = ''
  data: Any
  model: Any
  training: Training = dataclasses.field(default_factory=Training)
  evaluation: Any
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

  def __post_init__(self):
    check_fields(self, 'config')
    if self.initial_run and self.initial_vectors:
      raise UserError('config.initial_run and config.initial_vectors are both set; expected one of them at most')
    if self.initial_state and (not self.initial_run or self.seeds > 1):
      raise UserError('config.initial_state requires config.initial_run, and config.seeds to be 1')

  @property
  def run_seeds(self) -> list[int]:
    """The seed of each of the runs that are trained side by side."""
    return [self.training.seed + i for i in range(self.seeds)]


def default_run_config(system: str) -> RunConfig:
  """Returns the config of a system with every field at its default. Raises UserError for an unknown system."""
  groups = SYSTEMS[choose(system, SYSTEMS, 'system')].config_groups
  return RunConfig(system=system, **{name: cls() for name, cls in groups.items()})


def default_config(system: str = 'translation') -> ConfigDict:
  """Returns the config of a system with every field at its default, for config files and flags to change.

  Args:
    system: a name of registry.SYSTEMS.
  """
  return ConfigDict(to_dict(default_run_config(system)))


def parse_config(config: ConfigDict | Mapping[str, Any], name: str = 'the config') -> RunConfig:
  """Checks the fields of a config one by one, and returns it with the defaults of those that are missing.

  Args:
    config: a config, perhaps without some fields, such as that of an earlier version.
    name: how error messages refer to the config, such as 'the config' or the path of its file.

  Raises:
    UserError: for anything but a mapping, for an unknown system, for unknown fields, and for values whose type or size
      does not suit the field.
  """
  if isinstance(config, ConfigDict):
    config = config.to_dict()
  if not isinstance(config, Mapping):
    raise UserError(f'{name} must be an object with the groups of a config, got {config!r}')
  default = default_run_config(config.get('system', 'translation'))
  flat = flatten_dict(config, sep='.')
  flat_default = flatten_config(default)
  if unknown := sorted(set(flat) - set(flat_default)):
    raise UserError(
      f'unknown fields in {name}: {", ".join(unknown)}; expected the fields of systems.config.default_config()'
    )
  for field, value in flat.items():
    _check_type(f'{name}: config.{field}', value, flat_default[field])
  return _replace(default, unflatten_dict(flat, sep='.'))


def read_run_config(folder: epath.PathLike) -> RunConfig:
  """Returns the config that a run folder holds.

  Raises:
    UserError: as `training.folder.read_config` and `parse_config`.
  """
  return parse_config(read_config(folder), f'{folder}/{CONFIG}')


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a config or one of its groups as a dictionary: name of a field -> its value, or that of its group."""
  values = {name: getattr(config, name) for name in _field_names(type(config))}
  return {name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}


def flatten_config(config: RunConfig) -> dict[str, Any]:
  """Returns dotted name of a field -> its value: {'training.steps': 10000, ...}."""
  return flatten_dict(to_dict(config), sep='.')


def _replace(default: Any, values: Mapping[str, Any]) -> Any:
  """Returns a dataclass with other values of some fields, and of some fields of the dataclasses in it."""
  changes = {}
  for name, value in values.items():
    before = getattr(default, name)
    changes[name] = _replace(before, value) if dataclasses.is_dataclass(before) else _as_tuple(value)
  return dataclasses.replace(default, **changes)


def _as_tuple(value: Any) -> Any:
  """Returns lists, which JSON has in place of tuples, as tuples."""
  return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _check_type(subject: str, value: Any, default: Any) -> None:
  """Raises UserError for a value whose type does not suit the default of its field.

  A field whose default is a string or a tuple may hold either; its value is checked where it is used.
  """
  option = Option(type(default), default)
  if isinstance(default, bool | int | float):
    check_value(subject, value, option)
  elif isinstance(default, str | tuple) and not isinstance(value, str | list | tuple):
    raise UserError(f'{subject} must be a string or a list, got {value!r}')


def _field_names(cls: type) -> list[str]:
  excluded = SET_BY_PARENT if cls is Attention else ()
  return [field.name for field in dataclasses.fields(cls) if field.name not in excluded]


class FieldDescription(NamedTuple):
  """Description of one field of a config.

  Attributes:
    type: its annotation, without module names.
    default: its default; specs.REQUIRED if it has none.
    range: the allowed range of a number, or None.
    meaning: its entry in the 'Attributes:' section of the class; '' if it has none.
  """

  type: str
  default: Any
  range: Range | None
  meaning: str


def describe_config(system: str) -> dict[str, dict[str, FieldDescription]]:
  """Describes the fields of a system's config.

  Args:
    system: a key of SYSTEMS.

  Returns:
    dotted name of a group -> field -> description; the group of the fields outside of all groups is ''.

  Raises:
    UserError: for an unknown system.
  """
  groups = _describe_group(default_run_config(system), '')
  groups['']['system'] = groups['']['system']._replace(default=system)
  return groups


def _describe_group(group: Any, path: str) -> dict[str, dict[str, FieldDescription]]:
  """Describes the fields of a group, and of the groups in it."""
  names = _field_names(type(group))
  inner = {name: getattr(group, name) for name in names if dataclasses.is_dataclass(getattr(group, name))}
  excluded = {field.name for field in dataclasses.fields(group)} - set(names) | inner.keys()
  descriptions = {path: describe_fields(type(group), excluded)}
  for name, value in inner.items():
    descriptions |= _describe_group(value, f'{path}.{name}' if path else name)
  return descriptions


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
