"""Runs the programs of experiments/ as their command lines would, on tasks of a few words."""

import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import grain  # noqa: F401 - defines its absl flags before any program runs
import jax
import pytest
from absl import flags, logging

from attention_jax.training.writers import read_metrics
from tests import compiled

ROOT = Path(__file__).parents[2]
WORDS = ['eins', 'zwei', 'drei', 'vier', 'fünf', 'sechs', 'sieben']
DEVICES = 2  # enough for sharding
TIMEOUT = 300  # seconds for a run


class ProgramResult(NamedTuple):
  """Exit code, standard output and standard error of a program."""

  code: int
  out: str
  err: str


def run(program: str, *args: object, stdin: bytes = b'', package: str = 'experiments') -> ProgramResult:
  """Runs `python -m PACKAGE.PROGRAM ARGS` inside of this process, with the first DEVICES devices."""
  initial_flags = set(flags.FLAGS)
  verbosity = logging.get_verbosity()
  out = io.StringIO()
  err = io.StringIO()
  with (
    pytest.MonkeyPatch.context() as patch,
    warnings.catch_warnings(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    tempfile.TemporaryFile() as stdin_file,
  ):
    stdin_file.write(stdin)
    stdin_file.seek(0)
    warnings.filterwarnings('ignore', message=r'the load_module\(\) method is deprecated')  # from ml_collections
    for name in ('devices', 'local_devices'):
      devices = getattr(jax, name)
      patch.setattr(jax, name, lambda *args, devices=devices, **options: devices(*args, **options)[:DEVICES])
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', [program, *map(str, args)])
    patch.setattr(sys, 'stdin', SimpleNamespace(buffer=stdin_file, fileno=stdin_file.fileno))
    try:
      runpy.run_module(f'{package}.{program}', run_name='__main__', alter_sys=True)
      code = 0
    except SystemExit as error:
      code = error.code or 0
    finally:
      logging.set_verbosity(verbosity)
      for name in set(flags.FLAGS) - initial_flags:
        delattr(flags.FLAGS, name)
      flags.FLAGS.unparse_flags()
  return ProgramResult(code, out.getvalue(), err.getvalue())


def start_training(*args: object, **settings: str) -> subprocess.Popen:
  """Starts train.py with environment variables in a new process, which writes errors to its standard output."""
  return _start('train', args, settings, stderr=subprocess.STDOUT)


def start_translate(*args: object) -> subprocess.Popen:
  """Starts translate.py in a new process, which reads from a pipe."""
  return _start('translate', args, {}, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def _start(program: str, args, settings, **pipes) -> subprocess.Popen:
  environment = _environment(DEVICES) | settings
  command = [sys.executable, '-m', f'experiments.{program}', *map(str, args)]
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **pipes)


def _environment(devices: int) -> dict[str, str]:
  xla_flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={devices}'
  variables = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags, 'PYTHONUNBUFFERED': '1'}
  return os.environ | variables | compiled.cache_environment()


def start_together(
  module: str, *args: object, settings: Sequence[Mapping[str, str]] = ({}, {})
) -> list[subprocess.Popen]:
  """Starts a module in several processes of four devices in all, as SLURM does on one machine.

  Args:
    module: name of the module.
    *args: its arguments.
    settings: environment variables of each process; by default none, for two processes.
  """
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  environment = _environment(4 // len(settings)) | {
    'SLURM_JOB_ID': '1',
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_NTASKS': str(len(settings)),
    'JAX_COORDINATOR_ADDRESS': address,
  }
  command = [sys.executable, '-m', module, *map(str, args)]
  start = partial(subprocess.Popen, command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  return [
    start(env=environment | {'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)} | variables)
    for i, variables in enumerate(settings)
  ]


def wait_for_outputs(processes: list[subprocess.Popen], runs: int = 1, expected: int = 0) -> list[str]:
  """Returns what the processes printed, after all have ended with the expected exit code.

  Kills all of them if one fails, because the others would block, or after TIMEOUT seconds for each of `runs`.
  """
  deadline = time.monotonic() + runs * TIMEOUT
  while (
    None in (codes := [p.poll() for p in processes])
    and not set(codes) - {None, expected}
    and time.monotonic() < deadline
  ):
    time.sleep(0.1)
  for process in processes:
    process.kill()
  outputs = [process.communicate()[0] for process in processes]
  assert codes == [expected] * len(processes), f'exit codes {codes} (None: still running)\n' + '\n----\n'.join(outputs)
  return outputs


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen]) -> None:
  """Waits until a run has logged update number `step`; fails if a process ends before, or after TIMEOUT seconds."""
  deadline = time.monotonic() + TIMEOUT
  while not any(record['step'] >= step for record in read_metrics(folder)):
    assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
    time.sleep(0.1)


def read_tree(folder: Path) -> dict[str, bytes]:
  """Returns the contents of every file under a folder, by relative path."""
  return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def write_task(folder: Path, rows: int = 24) -> Path:
  """Writes a task of tables: the target is the reversed source, and every word is linked to itself."""
  folder.mkdir(parents=True, exist_ok=True)
  for split, offset in (('train', 0), ('dev', 1), ('test', 2)):
    lines = []
    for row in range(rows if split == 'train' else 5):
      length = 1 + (offset + row) % 4
      words = [WORDS[(offset + row * (k + 1)) % len(WORDS)] for k in range(length)]
      links = ' '.join(f'{k}-{len(words) - 1 - k}' for k in range(len(words)))
      lines.append(f'{" ".join(words)}\t{" ".join(reversed(words))}\t{links}\n')
    (folder / f'{split}.tsv').write_text(''.join(lines), 'utf-8')
  return folder


def tiny_arguments(folder: Path, workdir: Path, *more: str) -> tuple[str, ...]:
  """Returns the arguments of train.py for a tiny model on the task of `write_task`."""
  return (
    '--config=configs/nettalk.py:bahdanau2015_deep_tanh',
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
