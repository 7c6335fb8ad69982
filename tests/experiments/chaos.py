"""Kills training at random moments and checks that it ends as if nothing had happened.

  python -m tests.experiments.chaos 200

divides 200 kills among the five systems. A run is started, killed by SIGKILL or SIGTERM at a random moment (while it
starts, compiles, trains, evaluates or saves), and started again, until the kills are used up. A third of the runs are
in a bucket. Every run that ends must have the parameters, results and records of an uninterrupted one, bit for bit.
CHAOS_SEED selects other moments.
"""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from attention_jax.systems import experiment
from attention_jax.systems.runs import open_run
from attention_jax.training.writers import read_metrics
from tests import compiled, gcs_server
from tests.experiments.helpers import ROOT, write_task
from tests.experiments.train_every_system import CONFIGS, configs, shrink_tasks

# Files that are compared otherwise, or not at all: there may be a commit while the runs are made.
MACHINE_FILES = {'metrics', 'goodput.json', 'digests.json', '.lock', 'commits.txt'}
MACHINE_DEPENDENT = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}
# Longer than the runs of CONFIGS, so that kills hit updates, evaluations and checkpoints.
LONGER_TRAINING = {
  'training.steps': 30,
  'training.evaluate_every': 6,
  'training.checkpoint_every': 4,
  'training.keep': 2,
}
INTERRUPTED = 75  # exit status of a run that saved its state in the grace period
TRAIN = 'train'  # the first argument of a process that trains one run
READY = 'ready'  # the line of a process that has imported everything
COLD_SHARE = 0.15  # share of starts without the compilation cache, so that kills hit compilations
STARTING_SHARE = 0.1  # share of starts whose time to the kill begins before the process is ready
TIMEOUT = 1800  # seconds for a run, on a machine that is shared with others
SECOND_KILL_SHARE = 0.3  # share of SIGTERMs that SIGKILL follows within a second, in the grace period


@dataclasses.dataclass
class Chaos:
  """The kills of one system.

  Attributes:
    system: a key of train_every_system.CONFIGS.
    folder: the folder of its runs, of which `whole` is the uninterrupted one.
    task: the folder of a task of pairs.
    kills: number of starts; each is killed unless the run ends before.
    seed: seed of the moments.
    bucket: the URL of a bucket that holds every third run; '' for none.
  """

  system: str
  folder: Path
  task: Path
  kills: int
  seed: int
  bucket: str = ''

  def __post_init__(self):
    self.random = random.Random(f'{self.system} {self.seed}')
    self.counts: Counter[str] = Counter()
    self.duration = 0.0

  def run(self) -> Counter[str]:
    """Makes the kills and checks every run that ends; returns how often each kind of end was seen."""
    self._finish('whole')  # stores the compiled programs
    start = time.monotonic()
    self._finish('again')
    self.duration = time.monotonic() - start
    self._check('again')
    number = 0
    for _ in range(self.kills):
      if self._kill(f'run{number}'):
        self._check(f'run{number}')
        number += 1
    self._finish(f'run{number}')
    self._check(f'run{number}')
    return self.counts

  def _kill(self, name: str) -> bool:
    """Starts or resumes a run and kills it unless it ends before; returns whether the run is finished."""
    is_cold = self.random.random() < COLD_SHARE
    process = self._start(name, is_cold)
    if self.random.random() > STARTING_SHARE:
      wait_for_line(process, READY)
    try:
      process.wait(self.random.uniform(0, self.duration))
    except subprocess.TimeoutExpired:
      sent = self.random.choice([signal.SIGKILL, signal.SIGTERM])
      process.send_signal(sent)
      self._end(process, sent)
    output, _ = process.communicate(timeout=TIMEOUT)
    self.counts[f'exit {process.returncode}{", compiling" if is_cold else ""}'] += 1
    allowed = {0, INTERRUPTED, -signal.SIGKILL, -signal.SIGTERM}
    assert process.returncode in allowed, f'{self.system} {name}: exit {process.returncode}\n{output}'
    return process.returncode == 0

  def _end(self, process: subprocess.Popen, sent: signal.Signals) -> None:
    """Kills a process in its grace period too, with the probability SECOND_KILL_SHARE."""
    if sent == signal.SIGTERM and self.random.random() < SECOND_KILL_SHARE:
      time.sleep(self.random.uniform(0, 1))
      process.kill()

  def _finish(self, name: str) -> None:
    """Trains a run to its end."""
    process = self._start(name)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, f'{self.system} {name}: exit {process.returncode}\n{output}'

  def _start(self, name: str, is_cold: bool = False) -> subprocess.Popen:
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': '1'} | compiled.cache_environment()
    environment |= {'JAX_ENABLE_COMPILATION_CACHE': 'false'} if is_cold else {}
    arguments = [TRAIN, str(self._folder_of(name)), str(self.task), self.system]
    command = [sys.executable, '-m', 'tests.experiments.chaos', *arguments]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

  def _folder_of(self, name: str) -> epath.Path:
    """Returns the folder of a run, 'run2', 'run5', ... in the bucket."""
    is_in_bucket = self.bucket and name[-1].isdigit() and int(name[-1]) % 3 == 2
    return epath.Path(f'{self.bucket}/{self.system}/{name}') if is_in_bucket else epath.Path(self.folder / name)

  def _check(self, name: str) -> None:
    """Compares a finished run with the uninterrupted one."""
    whole, run = (self._folder_of(folder) / self.system for folder in ('whole', name))
    check_same_params(whole, run)
    names = {path.name for path in whole.iterdir() if not path.is_dir()} - MACHINE_FILES
    for file in sorted(names):
      assert comparable_text(whole / file) == comparable_text(run / file), f'{run / file} differs'
    assert comparable_records(whole) == comparable_records(run)


def wait_for_line(process: subprocess.Popen, text: str) -> None:
  """Reads the output of a process up to a line that contains a text, or to its end."""
  for line in process.stdout:
    if text in line:
      return


def check_same_params(first: epath.PathLike, second: epath.PathLike) -> None:
  """Checks that the latest and the best parameters of two runs are the same, bit for bit."""
  for kind in ('latest', 'best'):
    runs = open_run(first, kind), open_run(second, kind)
    assert runs[0].step == runs[1].step
    params = [flatten_dict(run.params, sep='/') for run in runs]
    for name, value in params[0].items():
      assert np.array_equal(value, params[1][name]), f'{second}: {kind} {name} differs'


def comparable_text(path: epath.Path) -> str:
  """Returns the content of a file without the commit of the code, which may change while the runs are made."""
  return re.sub(r'"commit": .*', '', path.read_text())


def comparable_records(folder: epath.PathLike) -> list[str]:
  """Returns the logged records without rates and compilations."""
  return [
    json.dumps({name: value for name, value in record.items() if name not in MACHINE_DEPENDENT})
    for record in read_metrics(folder)
  ]


def main(kills: int) -> None:
  seed = int(os.environ.get('CHAOS_SEED', '0'))
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as name, gcs_server.Server(Path(name) / 'bucket') as server:
    folder = Path(name)
    os.environ |= gcs_server.environment(server.url)
    task = write_task(folder / 'task')
    jax.config.update('jax_compilation_cache_dir', str(folder / 'compiled'))  # read by cache_environment
    for i, system in enumerate(CONFIGS):
      share = kills // len(CONFIGS) + (i < kills % len(CONFIGS))
      if not share:
        continue
      counts = Chaos(system, folder / system, task, share, seed, f'gs://{gcs_server.BUCKET}').run()
      ends = ', '.join(f'{count} x {end}' for end, count in sorted(counts.items()))
      print(f'{system}: {share} kills survived ({ends}); {time.monotonic() - start:.0f} s', flush=True)


def train(output: epath.Path, pairs: Path, system: str) -> None:
  """Trains, or resumes, a tiny run of one system; exits with the status of train.py."""
  shrink_tasks(pytest.MonkeyPatch())
  config = flatten_dict(dict(configs(pairs, [system]))[system], sep='.') | LONGER_TRAINING
  print(READY, flush=True)
  results = experiment.train(unflatten_dict(config, sep='.'), output / system)
  sys.exit(INTERRUPTED if results is None else 0)


if __name__ == '__main__':
  if sys.argv[1:2] == [TRAIN]:
    train(epath.Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
  main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
