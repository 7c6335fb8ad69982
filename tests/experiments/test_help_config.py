"""Descriptions of config fields, read from the dataclasses of the systems, and `train --help_config`."""

import dataclasses

import pytest
from flax.traverse_util import flatten_dict

from attention_jax.specs import REQUIRED, Range, Size
from attention_jax.systems.config import FieldDescription, default_config, describe_config, describe_fields
from attention_jax.systems.registry import SYSTEMS
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error


@dataclasses.dataclass
class Parent:
  """A parent.

  Attributes:
    parent_field: documented by the parent.
  """

  parent_field: str


@dataclasses.dataclass
class Example(Parent):
  """An example.

  Attributes:
    first, second: two fields with one meaning,
      which continues on the next line: here.
    third: another: with a colon.

  Another section: is not read.
  """

  parent_field: str
  first: Size = 3
  second: float = 0.5
  third: tuple[int, ...] = ()
  undocumented: bool = False


def test_fields_have_type_default_range_and_meaning():
  meaning = 'two fields with one meaning, which continues on the next line: here.'
  assert describe_fields(Example) == {
    'parent_field': FieldDescription('str', REQUIRED, None, 'documented by the parent.'),
    'first': FieldDescription('int', 3, Range(1), meaning),
    'second': FieldDescription('float', 0.5, None, meaning),
    'third': FieldDescription('tuple[int, ...]', (), None, 'another: with a colon.'),
    'undocumented': FieldDescription('bool', False, None, ''),
  }
  assert set(describe_fields(Example, exclude=('first', 'third'))) == {'parent_field', 'second', 'undocumented'}


@pytest.mark.parametrize('system', SYSTEMS)
def test_every_field_of_the_default_config_has_its_default_and_a_meaning(system):
  described = {
    f'{group}.{name}'.lstrip('.'): field
    for group, fields in describe_config(system).items()
    for name, field in fields.items()
  }
  assert all(field.meaning for field in described.values())
  defaults = flatten_dict(default_config(system).to_dict(), sep='.')
  assert {name: field.default for name, field in described.items()} == defaults


def test_help_config_prints_the_fields_of_the_chosen_config_and_does_not_train(tmp_path):
  folder = tmp_path / 'run'
  config = ('--config=configs/dates.py:bahdanau2015_deep_tanh', '--config.training.steps=17')
  result = run('train', *config, f'--workdir={folder}', '--help_config')
  assert (result.code, result.err) == (0, '') and not folder.exists()
  lines = result.out.splitlines()
  assert '  --config.training.steps = 17  (int, at least 1)' in lines
  printed = {line.split()[0] for line in lines if line.startswith('  --')}
  assert printed == {f'--config.{field}' for field in flatten_dict(default_config().to_dict(), sep='.')}
  meanings = ' '.join(result.out.split())
  for descriptions in describe_config('translation').values():
    assert all(' '.join(description.meaning.split()) in meanings for description in descriptions.values())
  assert_user_error(run('train', '--help_config'), ['--config is missing'])
