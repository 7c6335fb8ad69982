"""The console script, and the wheels: what they contain, and that programs and configs run without a clone."""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import attention_jax as aj
from attention_jax import cli
from attention_jax.missing import TRAIN_MODULES

ROOT = Path(aj.__file__).parent.parent
SOURCE_FOLDERS = ('attention_jax', 'experiments', 'configs')
DATA_FILES = ('py.typed', '*.css', '*.jinja', '*.js')
MAX_LEAN_BYTES = 300_000
# The two newest minor versions of jax; pyproject.toml requires the older one.
OLDEST_JAX = '0.9'
NEWEST_JAX = '0.10'
WITH_JAX_ALONE = """
from importlib import util
import attention_jax as aj
import jax.numpy as jnp
aj.attend(*3 * [jnp.ones((3, 5))])
assert not any(util.find_spec(name) for name in ('flax', 'jaxtyping', 'optax'))
"""
EXTRAS = {
  '': ['python', '-c', WITH_JAX_ALONE],
  'plots': ['python', '-c', "import attention_jax as aj; aj.analysis.heatmap([[1.0]], ['a'], ['b'], 'a.png')"],
  'interop': ['python', '-c', 'import flatbuffers, safetensors.numpy; from attention_jax.modules import weights'],
  'train': [
    'attention-jax',
    'train',
    '--config=configs/digits.py:mnih2014',
    '--workdir=run',
    '--config.training.steps=2',
  ],
  'bench': ['python', '-c', 'import ctranslate2, torch'],
  'dev': ['python', '-m', 'pytest', '--version'],
}


@pytest.fixture(scope='module')
def wheels(tmp_path_factory):
  """Wheels for an index, built as CONTRIBUTING.md describes: attention_jax and attention_jax_train."""
  folder = tmp_path_factory.mktemp('wheels')
  environment = os.environ | {'ATTENTION_JAX_RELEASE': '1'}
  for source in (ROOT, ROOT / 'train'):
    command = [sys.executable, '-m', 'build', '--wheel', '--outdir', str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
  lean, train = sorted(folder.glob('*.whl'))
  return lean, train


def read_requirements(wheel):
  """The lines Requires-Dist of the metadata of a wheel."""
  archive = zipfile.ZipFile(wheel)
  (path,) = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
  return Parser().parsestr(archive.read(path).decode()).get_all('Requires-Dist')


def run_in(site, arguments, folder):
  """Runs Python in `folder` with the packages of this environment and, before them, those of `site`."""
  environment = os.environ | {'PYTHONPATH': str(site)}
  return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)


def test_programs_are_listed_and_mistakes_are_one_line(capsys):
  cli.main([])
  assert 'programs: ablate, align, compare, ' in capsys.readouterr().out
  with pytest.raises(SystemExit) as exit_status:
    cli.main(['trian'])
  assert exit_status.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("error: unknown program 'trian' (did you mean 'train'?)") and error.count('\n') == 1


def test_the_wheels_have_every_file_once_and_the_lean_one_is_small(wheels):
  assert wheels[0].stat().st_size < MAX_LEAN_BYTES
  lean, train = ({name for name in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in name} for wheel in wheels)
  assert not lean & train
  files = {path.relative_to(ROOT).as_posix() for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob('*.py')}
  modules = {name if name.startswith('attention_jax/') else f'attention_jax/programs/{name}' for name in files}
  package = ROOT / 'attention_jax'
  data_files = {path.relative_to(ROOT).as_posix() for kind in DATA_FILES for path in package.rglob(kind)}
  assert len(data_files) > len(DATA_FILES) and lean | train == modules | data_files
  assert {_train_module(name) for name in train} == {*TRAIN_MODULES, 'attention_jax.programs'}


def _train_module(name):
  """Returns the entry of TRAIN_MODULES that a file or an imported name belongs to, otherwise its subpackage."""
  module = name.removesuffix('.py').replace('/', '.')
  subpackage = '.'.join(module.split('.')[:2])
  return module if module in TRAIN_MODULES else subpackage


def test_the_lean_wheel_imports_no_module_of_the_other(wheels):
  archive = zipfile.ZipFile(wheels[0])
  for path in (name for name in archive.namelist() if name.endswith('.py')):
    for node in ast.walk(ast.parse(archive.read(path))):
      names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      if isinstance(node, ast.ImportFrom):
        names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
      missing = {_train_module(name) for name in names} & TRAIN_MODULES
      assert not missing, f'{path} imports {missing}'


def test_wheels_for_an_index_require_versions_of_each_other(wheels):
  version = wheels[0].name.split('-')[1]
  assert f"attention-jax-train=={version}; extra == 'train'" in read_requirements(wheels[0])
  assert f'attention-jax[interop,plots]=={version}' in read_requirements(wheels[1])
  assert not [line for wheel in wheels for line in read_requirements(wheel) if '@' in line]


LEAN_PROGRAM = """
import attention_jax as aj
print(aj.Attention.__name__, aj.analysis.alignment_error_rate([(0, 0)], [(0, 0)], []))
for code in ('aj.systems', 'from attention_jax import models', 'from attention_jax.training.train import fit'):
  try:
    exec(code)
  except ModuleNotFoundError as error:
    print(error)
"""


def test_the_lean_wheel_names_the_extra_that_is_missing(wheels, tmp_path):
  zipfile.ZipFile(wheels[0]).extractall(tmp_path / 'site')
  result = run_in(tmp_path / 'site', ['-c', LEAN_PROGRAM], tmp_path)
  assert result.returncode == 0, result.stderr
  hint = "is not installed; run pip install 'attention_jax[train]'"
  missing = [f'attention_jax.{name} {hint}' for name in ('systems', 'models', 'training')]
  assert result.stdout.splitlines() == ['Attention 0.0', *missing]


def test_programs_of_the_wheels_run_without_a_clone(wheels, tmp_path):
  """Runs against this environment's packages; `test_each_extra_installs_and_runs` uses fresh environments."""
  for wheel in wheels:
    zipfile.ZipFile(wheel).extractall(tmp_path / 'site')
  arguments = ['train', '--config=configs/dates.py:bahdanau2015_deep_tanh', '--help_config']
  result = run_in(tmp_path / 'site', ['-m', 'attention_jax.cli', *arguments], tmp_path)
  assert result.returncode == 0, result.stderr
  assert 'config.training.steps' in result.stdout


def find_interpreters():
  """Python 3.11 to 3.13 on PATH, without the version that runs the tests."""
  names = [f'python3.{minor}' for minor in range(11, 14) if minor != sys.version_info.minor]
  paths = [path for path in map(shutil.which, names) if path is not None]
  return [path for path in paths if not subprocess.run([path, '--version'], capture_output=True).returncode]


def create_environment(folder, python=sys.executable):
  """Creates a fresh virtual environment and returns the folder of its programs."""
  subprocess.run([python, '-m', 'venv', str(folder)], check=True)
  return folder / 'bin'


def copy_sources(clone):
  """Copies into the folder `clone` what pip needs of this repository, and returns the files."""
  for name in (*SOURCE_FOLDERS, 'train'):
    shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('pyproject.toml', 'hatch_build.py', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, clone)
  return sorted(clone.rglob('*'))


def run_extra(programs, extra, folder):
  """Runs in `folder` the command of an extra with the programs of an environment."""
  program, *arguments = EXTRAS[extra]
  environment = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'XLA_FLAGS')}
  environment['JAX_PLATFORMS'] = 'cpu'
  result = subprocess.run([programs / program, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
  assert result.returncode == 0, result.stderr


@pytest.mark.packaging
@pytest.mark.parametrize('extra', EXTRAS)
def test_each_extra_installs_and_runs(extra, tmp_path):
  """Installs a clone with one extra into a fresh environment and runs one command of it there."""
  clone = tmp_path / 'a clone'  # the space must be quoted in the URL of train/
  files = copy_sources(clone)
  programs = create_environment(tmp_path / 'venv')
  requirement = f'.[{extra}]' if extra else '.'
  subprocess.run([programs / 'pip', 'install', '--quiet', requirement], check=True, cwd=clone)
  assert sorted(clone.rglob('*')) == files  # a build leaves nothing beside its sources
  run_extra(programs, extra, tmp_path)


def make_version_cases():
  """The newest jax on every other Python that is found, and the oldest supported jax on this Python."""
  return [(python, NEWEST_JAX) for python in find_interpreters()] + [(sys.executable, OLDEST_JAX)]


@pytest.mark.packaging
@pytest.mark.parametrize('python, jax_version', make_version_cases())
def test_supported_versions_of_python_and_jax_install_and_run(python, jax_version, tmp_path):
  copy_sources(tmp_path / 'clone')
  programs = create_environment(tmp_path / 'venv', python)
  for extra, requirement in {'': '.', 'train': '.[train]'}.items():
    command = [programs / 'pip', 'install', '--quiet', requirement, f'jax=={jax_version}.*']
    subprocess.run(command, check=True, cwd=tmp_path / 'clone')
    run_extra(programs, extra, tmp_path)


@pytest.mark.packaging
def test_pip_resolves_the_extra_of_the_wheels_for_an_index(wheels, tmp_path):
  programs = create_environment(tmp_path / 'venv')
  report = tmp_path / 'report.json'
  options = ['--quiet', '--dry-run', f'--find-links={wheels[1].parent}', f'--report={report}']
  subprocess.run([programs / 'pip', 'install', *options, f'{wheels[0]}[train]'], check=True)
  urls = {item['metadata']['name']: item['download_info']['url'] for item in json.loads(report.read_text())['install']}
  assert urls['attention_jax_train'] == wheels[1].as_uri()
