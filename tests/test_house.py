"""The structure of the project: layers, docstrings, light imports, tests that mirror the package."""

import ast
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import attention_jax as aj

ROOT = Path(aj.__file__).parent.parent
# From the bottom up; a file may import from its own folder and from lower layers.
LAYERS = [
  'errors tokens atomic annotations',
  'specs cli pharaoh',
  'functional',
  'kernels',
  'testing',
  'modules',
  'models data',
  'analysis',
  'training',
  'decoding',
  'losses',
  'systems',
  'sweeps',
  'configs',
  'experiments',
  'lab',
]
LAYER_NUMBERS = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
NOT_IN_TRAINING = {'models', 'data', 'analysis'}
HEAVY = 'flax optax orbax grain tensorflow tensorflow_datasets absl ml_collections matplotlib pandas scipy submitit'
FOLDERS = ('attention_jax', 'experiments', 'configs', 'lab', 'tests')
FILES = sorted(p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob('*.py'))
LAYERED_FILES = [p for p in FILES if p.parts[0] != 'tests']
TEST_FILES = [p for p in FILES if p.parts[0] == 'tests' and p.name.startswith('test_')]
# Ports of the modules to other libraries, whose classes have the same names.
PORTS = {'attention_equinox.py', 'attention_nnx.py', 'torch_model.py'}
# Tests of several modules, by folder; every other test_MODULE.py tests MODULE.py in or below the folder of its name.
CROSS_MODULE_TESTS = {
  '': 'documents fuzz house lesson',
  'data': 'links',
  'decoding': 'search_costs translate_lines',
  'experiments': (
    'bad_input bucket captioning classifying configs decoding glimpsing help_config long_run objectives one_device '
    'programs recalling resume translate_stream two_processes'
  ),
  'functional': 'annotations contract latent_paths properties rows transforms variants',
  'kernels': 'eager implementations pallas',
  'models': 'copying_models dropout latent_models transformer',
  'modules': 'blocks feed_forward',
  'systems': 'losses meshes',
  'training': 'checkpoint_retention fit_own_model',
}


def layer_of(module: str) -> str:
  """Returns the name of a module in LAYERS: 'data' for 'attention_jax.data.text', 'lab' for 'lab.pods'."""
  names = module.split('.')
  if names[0] != 'attention_jax' or len(names) == 1:
    return names[0]
  return names[1]


@functools.cache
def tree_of(path: Path) -> ast.Module:
  return ast.parse((ROOT / path).read_text('utf-8'))


@functools.cache
def project_imports(path: Path) -> set[str]:
  """Returns every name of this project that a file imports, at its top or inside of functions."""
  names = set()
  for node in ast.walk(tree_of(path)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return {name for name in names if name.split('.')[0] in FOLDERS}


@pytest.mark.long
def test_imports_point_down():
  for path in LAYERED_FILES:
    layer = layer_of('.'.join(path.with_suffix('').parts).removesuffix('.__init__'))
    names = project_imports(path) if layer != 'attention_jax' else ()  # the public names
    for name in names:
      imported_layer = layer_of(name)
      if imported_layer not in LAYER_NUMBERS:  # a public name of the package
        assert imported_layer != 'tests', f'{path} imports {name}'
        assert layer in ('experiments', 'lab'), f'{path} imports {name}; import it from the module that defines it'
      elif imported_layer != layer:
        assert LAYER_NUMBERS[imported_layer] < LAYER_NUMBERS[layer], f'{path} ({layer}) imports {name}'


def test_training_imports_no_model_data_set_or_loss():
  for path in LAYERED_FILES:
    if path.parts[1] == 'training':
      assert not NOT_IN_TRAINING & {layer_of(name) for name in project_imports(path)}, path


def test_a_file_imports_from_the_folder_of_its_own_system_alone():
  systems = {p.name for p in (ROOT / 'attention_jax' / 'systems').iterdir() if (p / 'system.py').exists()}
  for path in LAYERED_FILES:
    if path.parts[0] == 'attention_jax':
      own = path.parts[2] if path.parts[1] == 'systems' else ''
      imported = {name.split('.')[2] for name in project_imports(path) if name.startswith('attention_jax.systems.')}
      assert imported & systems <= {own}, path


@pytest.mark.long
def test_files_have_a_docstring_and_do_not_disable_the_formatter():
  for path in FILES:
    assert ast.get_docstring(tree_of(path)), f'{path}: no docstring'
    text = (ROOT / path).read_text('utf-8')
    assert 'fmt: ' + 'skip' not in text and 'fmt: ' + 'off' not in text, path


def test_tests_mirror_the_package():
  for path in TEST_FILES:
    module = path.stem.removeprefix('test_')
    name = '/'.join(path.parts[1:-1])
    folder = ROOT / name if name in ('experiments', 'lab') else ROOT / 'attention_jax' / name
    modules = {p.stem for p in (folder.glob('*.py') if name == '' else folder.rglob('*.py'))}
    is_listed = module in CROSS_MODULE_TESTS.get(name, '').split()
    assert is_listed or module in modules, f'{path} tests no module of {folder.relative_to(ROOT)}'


def test_public_functions_document_their_arguments():
  """Those with a docstring and more than two arguments; those of functional/ have an equation instead."""
  undocumented = []
  for path in LAYERED_FILES:
    if path.parts[1] == 'functional':
      continue
    body = tree_of(path).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith('_')]
    for node in itertools.chain(body, *(cls.body for cls in classes)):
      if isinstance(node, ast.FunctionDef) and not node.name.startswith('_'):
        arguments = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {'self', 'cls'}
        text = ast.get_docstring(node) or ''
        if len(arguments) > 2 and text and 'Args:' not in text and 'rguments' not in text:
          undocumented.append(f'{path}: {node.name}')
  assert not undocumented


def test_cross_module_tests_exist():
  listed = {(folder, module) for folder, modules in CROSS_MODULE_TESTS.items() for module in modules.split()}
  assert listed <= {('.'.join(p.parts[1:-1]), p.stem.removeprefix('test_')) for p in TEST_FILES}


@pytest.mark.long
def test_no_two_classes_have_one_name():
  names = [
    node.name
    for path in LAYERED_FILES
    for node in ast.walk(tree_of(path))
    if isinstance(node, ast.ClassDef) and path.name not in PORTS
  ]
  assert not {name for name in names if names.count(name) > 1}


def test_every_folder_of_the_package_has_a_layer():
  folders = {p.parts[1].removesuffix('.py') for p in LAYERED_FILES if p.parts[0] == 'attention_jax'}
  assert folders <= {'__init__', *LAYER_NUMBERS}


@pytest.mark.long
def test_importing_the_package_loads_no_heavy_dependency():
  code = """
import sys, jax
before = set(sys.modules)
import attention_jax as aj
import jax.numpy as jnp
aj.attend(jnp.ones((3, 5)), jnp.ones((7, 5)), jnp.ones((7, 2)))
print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))
"""
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=ROOT)
  assert not set(HEAVY.split()) & set(result.stdout.split()), result.stdout


def test_public_names_are_sorted_and_exist():
  kinds = [(not name.isupper(), name[0].islower()) for name in aj.__all__]  # constants, classes, the rest
  assert aj.__all__ == [name for _, name in sorted(zip(kinds, aj.__all__, strict=True))]
  assert len(set(aj.__all__)) == len(aj.__all__)
  for name in (*aj.__all__, *aj._SUBPACKAGES):
    getattr(aj, name)
  with pytest.raises(AttributeError, match="'attention_jax' has no attribute 'attned'"):
    aj.attned  # noqa: B018
