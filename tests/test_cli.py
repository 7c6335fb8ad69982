"""The console script, and the wheel: what it contains, and that its programs and configs run without a clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attention_jax as aj
from attention_jax import cli

ROOT = Path(aj.__file__).parent.parent
MAX_WHEEL_BYTES = 600_000  # fonts alone would be more than 2 MB
EXTRAS = {
  '': ['python', '-c', 'import attention_jax as aj, jax.numpy as jnp; aj.attend(*3 * [jnp.ones((3, 5))])'],
  'plots': ['python', '-c', "import attention_jax as aj; aj.analysis.heatmap([[1.0]], ['a'], ['b'], 'a.png')"],
  'train': [
    'attention-jax',
    'train',
    '--config=configs/digits.py:mnih2014',
    '--workdir=run',
    '--config.training.steps=2',
  ],
  'bench': ['attention-jax', 'benchmark', '--suites=limits', '--repeats=2', '--out=bench'],
  'dev': ['python', '-m', 'pytest', '--version'],
}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel of this checkout, built from a copy, because a build leaves folders beside its sources."""
  source = tmp_path_factory.mktemp('source')
  for name in ('attention_jax', 'experiments', 'configs'):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  folder = tmp_path_factory.mktemp('wheel')
  command = [sys.executable, '-m', 'build', '--wheel', '--outdir', str(folder), str(source)]
  subprocess.run(command, check=True, capture_output=True, cwd=folder)
  (path,) = folder.glob('*.whl')
  return path


def test_programs_are_listed_and_mistakes_are_one_line(capsys):
  cli.main([])
  assert 'programs: ablate, benchmark, ' in capsys.readouterr().out
  with pytest.raises(SystemExit) as exit_status:
    cli.main(['trian'])
  assert exit_status.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("error: unknown program 'trian' (did you mean 'train'?)") and error.count('\n') == 1


def test_the_wheel_has_programs_and_configs_and_no_fonts(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  assert wheel.stat().st_size < MAX_WHEEL_BYTES
  assert not [name for name in names if name.endswith(('.ttf', '.otf', '.png'))]
  assert {f'attention_jax/sweeps/report.{kind}.jinja' for kind in ('html', 'md')} <= set(names)
  for folder in ('attention_jax', 'experiments', 'configs'):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob('*.py')}
    below = '' if folder == 'attention_jax' else 'attention_jax/programs/'
    assert {f'{below}{name}' for name in expected} <= set(names)


def test_programs_of_the_wheel_run_without_a_clone(wheel, tmp_path):
  """Runs against this environment's packages; `test_extras` uses fresh environments."""
  zipfile.ZipFile(wheel).extractall(tmp_path / 'site')
  command = [
    sys.executable,
    '-m',
    'attention_jax.cli',
    'train',
    '--config=configs/dates.py:bahdanau2015',
    '--help_config',
  ]
  environment = os.environ | {'PYTHONPATH': str(tmp_path / 'site')}
  result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
  assert result.returncode == 0, result.stderr
  assert 'config.training.steps' in result.stdout


@pytest.mark.packaging
@pytest.mark.parametrize('extra', EXTRAS)
def test_extras(extra, wheel, tmp_path):
  """Installs the wheel with one extra into a fresh environment and runs one command of it there."""
  subprocess.run([sys.executable, '-m', 'venv', str(tmp_path / 'venv')], check=True)
  programs = tmp_path / 'venv' / 'bin'
  requirement = f'{wheel}[{extra}]' if extra else str(wheel)
  subprocess.run([programs / 'pip', 'install', '--quiet', requirement], check=True)
  program, *arguments = EXTRAS[extra]
  environment = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'XLA_FLAGS')}
  environment['JAX_PLATFORMS'] = 'cpu'
  result = subprocess.run(
    [programs / program, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
  )
  assert result.returncode == 0, result.stderr
