"""The fields of a config as text for a terminal."""

import textwrap

from attention_jax.systems.config import RunConfig, describe_config, flatten_config

WIDTH = 100


def format_config_help(config: RunConfig) -> str:
  """Lists every field of a config by group, with its type, range, value and meaning.

  Args:
    config: the config.

  Returns:
    Lines of text.
  """
  values = flatten_config(config)
  lines = []
  for group, fields in describe_config(config.system).items():
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
