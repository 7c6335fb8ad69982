"""The fields of a config as text for a terminal."""

import textwrap
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from attention_jax.systems.config import describe_config

WIDTH = 100


def format_config_help(config: Mapping[str, Any]) -> str:
  """Lists every field of a config by group, with its type, range, value and meaning.

  Args:
    config: the config as a dictionary, as `systems.config.default_config` lays it out.

  Returns:
    Lines of text.
  """
  values = flatten_dict(config, sep='.')
  lines = []
  for group, fields in describe_config(config['system']).items():
    prefix = f'config.{group}' if group else 'config'
    lines.append(f'{prefix}:')
    for name, field in fields.items():
      allowed = f', {field.range}' if field.range else ''
      value = values[f'{group}.{name}' if group else name]
      lines.append(f'  --{prefix}.{name} = {value!r}  ({field.type}{allowed})')
      indent = ' ' * 6
      lines += textwrap.wrap(
        field.meaning, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
      )
    lines.append('')
  return '\n'.join(lines).rstrip()
