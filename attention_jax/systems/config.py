"""Default configs: every field of a system, with the default of the dataclass that uses it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import UserError, choose
from attention_jax.modules.attention import Attention
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.loop import Training

SET_BY_PARENT = ('project_values', 'positions', 'joined', 'dtype', 'parent', 'name')  # fields of Attention


def default_config(system: str = 'translation') -> ConfigDict:
  """Returns the config of a system with every field at its default.

  Args:
    system: a name of registry.SYSTEMS.
  """
  groups = SYSTEMS[choose(system, SYSTEMS, 'system')].config_groups
  config = ConfigDict({'system': system, 'training': _field_defaults(Training)})
  for path, cls in groups.items():
    *parents, name = path.split('.')
    parent = config[parents[0]] if parents else config
    parent[name] = ConfigDict(_field_defaults(cls, exclude=SET_BY_PARENT if cls is Attention else ()))
  config.seeds = 1  # runs trained side by side, with training.seed and the seeds that follow it
  return config


def fill_defaults(config: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Adds the defaults of missing fields, so that the config of an earlier version can be used.

  Args:
    config: a config, perhaps without some fields.
    name: what the config is, as an error names it.

  Raises:
    UserError: for unknown fields.
  """
  flat = flatten_dict(config, sep='.')
  flat_default = flatten_dict(default_config(config.get('system', 'translation')).to_dict(), sep='.')
  if unknown := sorted(set(flat) - set(flat_default)):
    raise UserError(
      f'unknown fields in {name}: {", ".join(unknown)}; expected the fields of systems.config.default_config()'
    )
  return unflatten_dict(flat_default | flat, sep='.')


def _field_defaults(cls: type, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
  return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in exclude}
