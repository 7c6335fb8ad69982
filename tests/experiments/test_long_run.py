"""Memory, open files and threads of a process that trains stay as they are over thousands of updates."""

import time
from pathlib import Path

import pytest

from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import start_training, tiny_arguments

UPDATES = 5000
SLACK = 64 * 2**20  # bytes by which the largest resident memory may grow from the second fifth to the last
FEW = 4  # files or threads by which the largest number may grow over the same six evaluations


def measure(pid: int) -> tuple[int, int, int]:
  """Returns the resident memory of a process in bytes, and its numbers of open files and of threads."""
  folder = Path('/proc') / str(pid)
  fields = dict(line.split(':', 1) for line in (folder / 'status').read_text().splitlines())
  return int(fields['VmRSS'].split()[0]) * 1024, len(list((folder / 'fd').iterdir())), int(fields['Threads'])


@pytest.mark.long
def test_memory_files_and_threads_are_flat_over_5000_updates(task, tmp_path):
  folder = tmp_path / 'run'
  intervals = ('log_every=50', 'evaluate_every=500', 'checkpoint_every=500')
  fields = [f'--config.training.{field}' for field in (f'steps={UPDATES}', *intervals)]
  process = start_training(*tiny_arguments(task, folder, *fields))
  samples = []  # (step, memory, files, threads)
  while process.poll() is None:
    records = read_metrics(folder)
    try:
      samples.append((records[-1]['step'] if records else 0, *measure(process.pid)))
    except (FileNotFoundError, ProcessLookupError, KeyError):  # the process has just ended
      break
    time.sleep(0.2)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  early = [sample for sample in samples if UPDATES / 5 <= sample[0] < 2 * UPDATES / 5]
  late = [sample for sample in samples if 4 * UPDATES / 5 <= sample[0] < UPDATES]
  rates = [record['train/steps_per_second'] for record in read_metrics(folder) if 'train/steps_per_second' in record]
  print(f'early {early[0]} to {early[-1]}, late {late[0]} to {late[-1]}; updates per second {rates[20]}, {rates[-2]}')
  for index, slack in ((1, SLACK), (2, FEW), (3, FEW)):
    assert max(sample[index] for sample in late) <= max(sample[index] for sample in early) + slack
