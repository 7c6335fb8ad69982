"""The console script, and the wheel: what it contains, and that programs and configs run without a clone."""

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

ROOT = Path(aj.__file__).parent.parent
SOURCE_FOLDERS = ('attention_jax', 'experiments', 'configs')
DATA_FILES = ('py.typed', '*.bib', '*.css', '*.jinja', '*.js')
MAX_BYTES = 900_000
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
TRAIN = ['attention-jax', 'train', '--config=configs/digits.py:mnih2014', '--workdir=run', '--config.training.steps=2']
EXTRAS = {
  '': ['python', '-c', WITH_JAX_ALONE],
  'plots': ['python', '-c', "import attention_jax as aj; aj.analysis.heatmap([[1.0]], ['a'], ['b'], 'a.png')"],
  'interop': ['python', '-c', 'import flatbuffers, safetensors.numpy; from attention_jax.modules import weights'],
  'train': TRAIN,
  'dev': ['python', '-m', 'pytest', '--version'],
}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel that an index has."""
  folder = tmp_path_factory.mktemp('wheel')
  command = [sys.executable, '-m', 'build', '--wheel', '--outdir', str(folder), str(ROOT)]
  subprocess.run(command, check=True, capture_output=True, cwd=folder)
  (path,) = folder.glob('*.whl')
  return path


@pytest.mark.packaging
def test_the_distributions_pass_the_check_of_the_index(tmp_path):
  build = [sys.executable, '-m', 'build', '--outdir', str(tmp_path), str(ROOT)]
  subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
  distributions = sorted(map(str, tmp_path.iterdir()))
  check = [sys.executable, '-m', 'twine', 'check', '--strict', *distributions]
  result = subprocess.run(check, capture_output=True, text=True, check=False)
  assert len(distributions) == 2 and result.returncode == 0, result.stdout


def error_of(program, capsys):
  """Returns what the script prints before it ends with status 2."""
  with pytest.raises(SystemExit) as exit_status:
    cli.main([program])
  assert exit_status.value.code == 2
  return capsys.readouterr().err


def test_programs_are_listed_and_mistakes_are_one_line(capsys):
  cli.main([])
  assert 'programs: ablate, align, compare, ' in capsys.readouterr().out
  error = error_of('trian', capsys)
  assert error.startswith("error: unknown program 'trian' (did you mean 'train'?)") and error.count('\n') == 1


def test_a_program_whose_packages_are_missing_names_the_extra(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['attention-jax'])
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setitem(sys.modules, 'absl', None)
  assert error_of('train', capsys) == "error: train needs the package absl; pip install 'attention_jax[train]'\n"


@pytest.mark.parametrize(('name', 'module'), [('Attention', 'modules.attention'), ('models', 'models')])
def test_a_name_whose_packages_are_missing_names_the_extra(name, module, monkeypatch):
  monkeypatch.setitem(sys.modules, f'attention_jax.{module}', None)
  monkeypatch.delitem(vars(aj), name, raising=False)  # that of an earlier import
  with pytest.raises(ModuleNotFoundError) as error:
    getattr(aj, name)
  assert error.value.__notes__ == [f"attention_jax.{name} needs pip install 'attention_jax[train]'"]


@pytest.mark.long
def test_the_wheel_has_the_package_the_programs_and_the_configs(wheel):
  assert wheel.stat().st_size < MAX_BYTES
  names = {name for name in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in name}
  files = {path.relative_to(ROOT).as_posix() for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob('*.py')}
  modules = {name if name.startswith('attention_jax/') else f'attention_jax/programs/{name}' for name in files}
  package = ROOT / 'attention_jax'
  data_files = {path.relative_to(ROOT).as_posix() for kind in DATA_FILES for path in package.rglob(kind)}
  assert len(data_files) > len(DATA_FILES) and names == modules | data_files


def test_the_wheel_requires_jax_alone(wheel):
  archive = zipfile.ZipFile(wheel)
  (path,) = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
  requirements = Parser().parsestr(archive.read(path).decode()).get_all('Requires-Dist')
  assert [line for line in requirements if 'extra ==' not in line] == ['jax>=0.9']


@pytest.mark.long
def test_programs_of_the_wheel_run_without_a_clone(wheel, tmp_path):
  """Runs against this environment's packages; `test_each_extra_installs_and_runs` uses fresh environments."""
  zipfile.ZipFile(wheel).extractall(tmp_path / 'site')
  command = [sys.executable, '-m', 'attention_jax.cli', 'train', '--config=configs/dates.py:bahdanau2015_deep_tanh']
  environment = os.environ | {'PYTHONPATH': str(tmp_path / 'site')}
  result = subprocess.run(
    [*command, '--help_config'], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
  )
  assert result.returncode == 0, result.stderr
  assert 'config.training.steps' in result.stdout


def find_interpreters():
  """Python 3.11 to 3.13 on PATH, without the version that runs the tests."""
  names = [f'python3.{minor}' for minor in range(11, 14) if minor != sys.version_info.minor]
  paths = [path for path in map(shutil.which, names) if path is not None]
  return [path for path in paths if not subprocess.run([path, '--version'], capture_output=True).returncode]


def run_extra(extra, folder, python=sys.executable, *requirements):
  """Installs a clone with one extra into a fresh environment and runs one command of it in `folder`."""
  clone = folder / 'a clone'
  for name in SOURCE_FOLDERS:
    shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, clone)
  files = sorted(clone.rglob('*'))
  subprocess.run([python, '-m', 'venv', folder / 'venv'], check=True)
  programs = folder / 'venv' / 'bin'
  install = [programs / 'pip', 'install', '--quiet', f'.[{extra}]' if extra else '.', *requirements]
  subprocess.run(install, check=True, cwd=clone)
  assert sorted(clone.rglob('*')) == files  # a build leaves nothing beside its sources
  program, *arguments = EXTRAS[extra]
  environment = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'XLA_FLAGS')}
  environment['JAX_PLATFORMS'] = 'cpu'
  result = subprocess.run([programs / program, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
  assert result.returncode == 0, result.stderr


@pytest.mark.packaging
@pytest.mark.parametrize('extra', EXTRAS)
def test_each_extra_installs_and_runs(extra, tmp_path):
  run_extra(extra, tmp_path)


# The newest jax on every other Python that is found, and the oldest supported jax on this Python.
VERSIONS = [(python, NEWEST_JAX) for python in find_interpreters()] + [(sys.executable, OLDEST_JAX)]


@pytest.mark.packaging
@pytest.mark.parametrize(('python', 'jax_version'), VERSIONS)
@pytest.mark.parametrize('extra', ['', 'train'])
def test_supported_versions_of_python_and_jax_install_and_run(extra, python, jax_version, tmp_path):
  run_extra(extra, tmp_path, python, f'jax=={jax_version}.*')
