"""Runs the programs of experiments/ as their command lines would, on tasks of a few words."""

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grain  # noqa: F401 - so that its flags are there before those of any program
import jax
import pytest
from absl import flags, logging

from tests import compiled

ROOT = Path(__file__).parents[2]


def _first_two(devices, *args, **options):
  return devices(*args, **options)[:2]


class ProgramResult(NamedTuple):
  code: int
  out: str
  err: str


class Stdin:
  """What a program reads from sys.stdin."""

  def __init__(self, data: bytes):
    self.buffer = io.BytesIO(data)


def run(program: str, *args: object, stdin: bytes = b'') -> ProgramResult:
  """`python -m experiments.PROGRAM ARGS` from the repository's root, as far as one process can do it.

  It sees two of the devices: as many as there are cores, and enough to be sharded.
  """
  before, verbosity = set(flags.FLAGS), logging.get_verbosity()
  out, err = io.StringIO(), io.StringIO()
  with (
    pytest.MonkeyPatch.context() as patch,
    warnings.catch_warnings(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    warnings.filterwarnings('ignore', message=r'the load_module\(\) method is deprecated')  # of ml_collections
    for name in ('devices', 'local_devices'):
      patch.setattr(jax, name, partial(_first_two, getattr(jax, name)))
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', [program, *map(str, args)])
    patch.setattr(sys, 'stdin', Stdin(stdin))
    try:
      runpy.run_module(f'experiments.{program}', run_name='__main__', alter_sys=True)
      code = 0
    except SystemExit as error:
      code = error.code or 0
    finally:
      logging.set_verbosity(verbosity)
      for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
      flags.FLAGS.unparse_flags()
  return ProgramResult(code, out.getvalue(), err.getvalue())


def start_training(*args: object, **settings: str) -> subprocess.Popen:
  """train.py with these arguments in a process of its own with these environment variables, its output and errors
  together."""
  return _start('train', args, settings, stderr=subprocess.STDOUT)


def start_translate(*args: object) -> subprocess.Popen:
  """translate.py with these arguments in a process of its own, reading a pipe."""
  return _start('translate', args, {}, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def _start(program: str, args, settings, **pipes) -> subprocess.Popen:
  devices = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=2'
  fixed = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': devices, 'PYTHONUNBUFFERED': '1'}
  environment = os.environ | fixed | compiled.cache_environment() | settings
  command = [sys.executable, '-m', f'experiments.{program}', *map(str, args)]
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **pipes)


def copy_interrupted_run(folder: Path, copy: Path) -> Path:
  """A copy of a finished run as it would be if it had been killed after its last checkpoint but one."""
  shutil.copytree(folder, copy)
  *_, last = sorted((copy / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  shutil.rmtree(last)
  for path in (copy / 'results.json', *copy.glob('hypotheses.*')):
    path.unlink()
  return copy


def read_tree(folder: Path) -> dict[str, bytes]:
  """Every file under a folder."""
  return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


WORDS = ['eins', 'zwei', 'drei', 'vier', 'fünf', 'sechs', 'sieben']


def write_task(folder: Path, rows: int = 24) -> Path:
  """A task of tables: the target is the source backwards, and every word is linked to itself."""
  folder.mkdir(parents=True, exist_ok=True)
  for split, first in (('train', 0), ('dev', 1), ('test', 2)):
    lines = []
    for row in range(rows if split == 'train' else 5):
      words = [WORDS[(first + row * (k + 1)) % len(WORDS)] for k in range(1 + (first + row) % 4)]
      links = ' '.join(f'{k}-{len(words) - 1 - k}' for k in range(len(words)))
      lines.append(f'{" ".join(words)}\t{" ".join(reversed(words))}\t{links}\n')
    (folder / f'{split}.tsv').write_text(''.join(lines), 'utf-8')
  return folder


def tiny_arguments(folder: Path, workdir: Path, *more: str) -> tuple[str, ...]:
  """The arguments of train.py for a model of a few numbers on the task of `write_task`."""
  return (
    '--config=configs/nettalk.py:bahdanau2015',
    f'--workdir={workdir}',
    f'--config.data.folder={folder}',
    "--config.data.task=tsv(train='train.tsv', validation='dev.tsv', test='test.tsv')",
    '--config.data.buckets=((5, 5),)',
    '--config.data.batch_size=8',
    '--config.model.encoder=birnn(features=4)',
    '--config.model.decoder=bahdanau(features=4, readout=4)',
    '--config.model.embedding=4',
    '--config.model.attention.features=4',
    '--config.training.steps=4',
    '--config.training.log_every=1',
    '--config.training.evaluate_every=2',
    '--config.training.checkpoint_every=2',
    '--config.evaluation.beams=2',
    '--config.evaluation.batch_size=8',
    *more,
  )
