"""The house: imports only point down, files stay short, and importing the package loads nothing heavy."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import attention_jax as aj

ROOT = Path(aj.__file__).parent.parent
# From the bottom up; a file may import from its own folder and from lower floors.
FLOORS = [
  'errors tokens atomic',
  'specs',
  'functional',
  'kernels',
  'modules',
  'models data',
  'decoding analysis',
  'training',
  'losses',
  'inference',
  'systems',
  'experiments',
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
LONGEST = 420
HEAVY = ['flax', 'optax', 'orbax', 'grain', 'tensorflow', 'tensorflow_datasets', 'absl', 'ml_collections', 'matplotlib']
FOLDERS = ('attention_jax', 'experiments', 'configs', 'tests')
FILES = sorted(p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob('*.py'))
LAYERED = [p for p in FILES if p.parts[0] in ('attention_jax', 'experiments')]


def part(module: str) -> str:
  """'attention_jax.data.text' -> 'data'; 'experiments.train' -> 'experiments'."""
  names = module.split('.')
  return names[0] if names[0] != 'attention_jax' else names[1] if len(names) > 1 else 'attention_jax'


def imports(path: Path) -> set[str]:
  """Every module of this project that the file imports, at its top or inside its functions."""
  found = set()
  for node in ast.walk(ast.parse((ROOT / path).read_text('utf-8'))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return {name for name in found if name.split('.')[0] in FOLDERS}


@pytest.mark.parametrize('path', LAYERED, ids=str)
def test_imports_only_point_down(path):
  module = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')
  mine = part(module)
  if mine == 'attention_jax':
    return  # the public names
  for name in imports(path):
    other = part(name)
    if other not in FLOOR:  # a public name of the package: only the programs and what stands above may use them
      assert FLOOR[mine] == len(FLOORS) - 1, f'{path} imports {name}; import it from where it is defined'
    elif other != mine:
      assert FLOOR[other] < FLOOR[mine], f'{path} ({mine}) imports {name}'


@pytest.mark.parametrize('path', FILES, ids=str)
def test_files_are_short_and_say_what_they_are_for(path):
  text = (ROOT / path).read_text('utf-8')
  assert len(text.splitlines()) <= LONGEST
  assert ast.get_docstring(ast.parse(text)), 'no docstring'


def test_every_package_folder_stands_on_a_floor():
  assert {p.parts[1].removesuffix('.py') for p in LAYERED if p.parts[0] == 'attention_jax'} <= {'__init__', *FLOOR}


def test_importing_loads_jax_alone():
  code = """
import sys, jax
before = set(sys.modules)
import attention_jax as aj
import jax.numpy as jnp
aj.attend(jnp.ones((3, 5)), jnp.ones((7, 5)), jnp.ones((7, 2)))
print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))
"""
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=ROOT)
  assert not set(HEAVY) & set(run.stdout.split()), run.stdout


def test_public_names_are_sorted_and_there():
  constants, rest = aj.__all__[:3], aj.__all__[3:]
  assert all(name.isupper() for name in constants) and constants == sorted(constants)
  assert rest == [*itertools.chain(*(sorted(group) for group in _by_case(rest)))]
  assert len(set(aj.__all__)) == len(aj.__all__)
  for name in aj.__all__:
    getattr(aj, name)
  with pytest.raises(AttributeError, match="'attention_jax' has no attribute 'attned'"):
    aj.attned  # noqa: B018


def _by_case(names):
  """Class names, then function and module names, as the linter sorts them."""
  return [n for n in names if n[0].isupper()], [n for n in names if n[0].islower()]
