"""On one CPU device, programs run in several threads: results equal those of a process with a single core."""

import os

import pytest

from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import read_tree, start_training, tiny_arguments, wait_for_outputs, write_task

SEEDS = 3
FLAGS = (
  f'--config.seeds={SEEDS}',
  '--config.evaluation.batch_size=2',  # three batches for the five rows of a split
  '--config.training.steps=2',
  '--config.model.encoder=embedded',
)
# The number of threads of a program is that of the cores unless NPROC is set.
SETTINGS = {'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=1', 'NPROC': '2'}
CORES = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else ()


def start_on_cores(cores, *args):
  """Starts train.py in a process that may use some cores only."""
  os.sched_setaffinity(0, cores)
  try:
    return start_training(*args, **SETTINGS)
  finally:
    os.sched_setaffinity(0, CORES)


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason='needs two cores')
def test_seeds_and_batches_in_threads_have_the_results_of_one_core(tmp_path):
  task = write_task(tmp_path)
  cores = {'threads': CORES, 'one_core': {min(CORES)}}
  wait_for_outputs([start_on_cores(cores[name], *tiny_arguments(task, tmp_path / name, *FLAGS)) for name in cores])
  for seed in range(SEEDS):
    folders = [tmp_path / name / f'seed_{seed}' for name in cores]
    files = [{path: data for path, data in read_tree(folder).items() if 'hypotheses' in path} for folder in folders]
    assert files[0] == files[1] and files[0]
    metrics = [metrics_of(folder) for folder in folders]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 2


def metrics_of(folder):
  """The metrics of every step that do not depend on time."""
  return [
    {name: value for name, value in record.items() if name.startswith(('validation/', 'train/loss', 'train/grad_norm'))}
    for record in read_metrics(folder)
  ]
