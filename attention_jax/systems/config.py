"""The fields of a config, with their defaults taken from where each is used."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import UserError, choose
from attention_jax.modules.attention import Attention
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.loop import Training

# Fields of modules that others say: a decoder for its attention.
SET_BY_PARENT = ('project_values', 'positions', 'joined', 'dtype', 'parent', 'name')


def default_config(system: str = 'translation') -> ConfigDict:
  """Every field that a system of systems.SYSTEMS has, at its default."""
  fields = SYSTEMS[choose(system, SYSTEMS, 'system')].config_groups
  config = ConfigDict({'system': system, 'training': _fields(Training)})
  for group, cls in fields.items():
    *path, name = group.split('.')
    within = config[path[0]] if path else config
    within[name] = ConfigDict(_fields(cls, without=SET_BY_PARENT if cls is Attention else ()))
  config.seeds = 1  # runs trained side by side, with training.seed and the seeds that follow it
  return config


def fill_defaults(config: Mapping[str, Any], where: str) -> dict[str, Any]:
  """`config` with the defaults of the fields it lacks, as one of an earlier version may.

  Raises: UserError for fields that there are not.
  """
  default = default_config(config.get('system', 'translation'))
  given, known = (flatten_dict(c, sep='.') for c in (config, default.to_dict()))
  if unknown := sorted(set(given) - set(known)):
    raise UserError(f'{where} has {", ".join(unknown)}; possible: the fields of systems.config.default_config()')
  return unflatten_dict(known | given, sep='.')


def _fields(cls: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
  return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in without}
