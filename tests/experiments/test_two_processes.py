"""Two processes train together as one process does; process 0 alone writes the files other than checkpoints."""

import json
import os
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from attention_jax.systems.runs import open_run
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import run, start_together, tiny_arguments, wait_for_outputs, wait_for_step, write_task
from tests.experiments.train_every_system import CONFIGS, Write, shrink_tasks

# Without dropout, which depends on the place of a row in the batch, and with SGD, whose updates are as exact as the
# gradients.
SETTINGS = (
  '--config.model.dropout=0.0',
  '--config.training.optimizer=sgd',
  '--config.training.schedule=constant(rate=0.5)',
  '--config.training.steps=3',
  '--config.training.evaluate_every=0',
  '--config.training.checkpoint_every=0',
  '--config.evaluation.beams=1',
  '--config.evaluation.batch_size=2',  # the five rows of a split are three batches, which processes share
)
INTERRUPTED = 75  # exit code of train.py

# Files of every run, and those of each system: each is written once, under a temporary name, and then renamed.
COMMON_FILES = {'commits.txt', 'config.json', 'data.json', 'results.json'}
SYSTEM_FILES = {
  'translation': {'vocabulary.source.json', 'vocabulary.target.json', 'hypotheses.test.txt'},
  'classification': {'vocabulary.source.json', 'labels.json', 'hypotheses.test.txt', 'hypotheses.unseen.txt'},
  'captioning': {'vocabulary.target.json', 'pictures.json', 'hypotheses.test.txt', 'hypotheses.unseen.txt'},
  'glimpsing': {'hypotheses.test.txt'},
  'recall': {'hypotheses.test.txt', 'hypotheses.unseen.txt'},
}
UPDATED_FILES = {'digests.json', 'goodput.json'}  # written again after each file or checkpoint
APPENDED_FILES = {'metrics', 'tensorboard', '.lock'}  # written in place, or replaced by a longer part
CHECKPOINT_FOLDERS = {'checkpoints', 'best'}  # orbax coordinates its processes itself


@pytest.mark.long
def test_two_processes_train_as_one_does(task, tmp_path):
  arguments = tiny_arguments(task, tmp_path / 'distributed', *SETTINGS, '--config.mesh.fsdp=4')  # over both processes
  first, second = wait_for_outputs(start_together('experiments.train', '--distributed', *arguments))
  assert '4 x cpu' in first and '(4, 5, 5)' in first and 'all 3 steps are done' in first  # 4 of 8 rows
  local, total = map(float, re.search(r'sharded over fsdp=4: ([\d.]+) KiB of ([\d.]+) KiB on each', first).groups())
  assert total / 4 <= local < total
  assert not any(word in second for word in ('vocabulary', 'step', 'loss')), second  # process 0 alone logs
  assert run('train', *tiny_arguments(task, tmp_path / 'single', *SETTINGS)).code == 0
  folders = [tmp_path / 'distributed', tmp_path / 'single']
  lines = [line for path in (folders[0] / 'metrics').iterdir() for line in path.read_text().splitlines()]
  assert len(lines) == 4  # three updates and one evaluation, by one writer
  for name in ('train/loss', 'train/grad_norm', 'validation/loss', 'validation/entropy'):
    values, expected = (values_of(folder, name) for folder in folders)
    assert values and values == pytest.approx(expected, rel=1e-5)
  losses = values_of(folders[0], 'train/loss')
  assert losses[2] < losses[0] - 0.01
  for checkpoint in ('latest', 'best'):
    distributed, single = (open_run(folder, checkpoint) for folder in folders)
    assert distributed.step == single.step == 3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), distributed.params, single.params)
  results = [json.loads((folder / 'results.json').read_text())['results']['test'] for folder in folders]
  values, expected = ({name: result['value'] for name, result in metrics.items()} for metrics in results)
  assert values == pytest.approx(expected, rel=1e-5)
  hypotheses = [(folder / 'hypotheses.test.txt').read_text() for folder in folders]
  assert hypotheses[0] == hypotheses[1] and hypotheses[0].count('\n') == 5


def values_of(folder, name):
  """Returns the logged values of a metric."""
  return [record[name] for record in read_metrics(folder) if name in record]


@pytest.mark.long
@pytest.mark.parametrize('seeds', [2, 3], ids=['each process has a seed', 'each process has a share of all'])
def test_two_processes_train_several_seeds_and_resume(seeds, task, tmp_path):
  fields = (*SETTINGS, f'--config.seeds={seeds}', '--config.training.checkpoint_every=1')
  arguments = tiny_arguments(task, tmp_path / 'distributed', *fields)
  wait_for_outputs(start_together('experiments.train', '--distributed', *arguments, '--config.training.steps=2'))
  first, second = wait_for_outputs(start_together('experiments.train', '--distributed', *arguments))
  assert 'resuming at step 2 of 3' in first and f'the means over {seeds} seeds' in first and 'step' not in second
  assert run('train', *tiny_arguments(task, tmp_path / 'single', *fields)).code == 0
  results = json.loads((tmp_path / 'distributed' / 'results.json').read_text('utf-8'))['results']
  assert len(results['test']['loss']['values']) == seeds
  for seed in range(seeds):
    losses, expected = (values_of(tmp_path / x / f'seed_{seed}', 'train/loss') for x in ('distributed', 'single'))
    assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  ('count', 'signalled'),
  [(2, (1,)), (2, (0, 1)), (4, (2,))],
  ids=['one of two processes', 'both processes', 'one of four processes'],
)
def test_a_signal_to_any_process_stops_all_after_the_same_update(count, signalled, task, tmp_path):
  """The first three updates equal those of one process: a quick form of test_two_processes_train_as_one_does."""
  folder = tmp_path / 'run'
  # Nothing is evaluated, and the encoder compiles quickly.
  settings = (*SETTINGS, "--config.data.task=tsv(train='train.tsv')", '--config.model.encoder=embedded')
  arguments = tiny_arguments(task, folder, *settings, '--config.mesh.fsdp=4', '--config.training.steps=1000000')
  processes = start_together('experiments.train', '--distributed', *arguments, settings=[{}] * count)
  wait_for_step(folder, 3, processes)
  for index in signalled:
    processes[index].send_signal(signal.SIGTERM)
  first, *others = wait_for_outputs(processes, expected=INTERRUPTED)
  step = Checkpoints(folder, read_only=True).latest()
  assert f'run the same command again to resume from step {step}' in first and 'step' not in ''.join(others)
  assert read_metrics(folder)[-1]['step'] == step >= 3
  assert run('train', *tiny_arguments(task, tmp_path / 'single', *settings)).code == 0
  for name in ('train/loss', 'train/grad_norm'):
    assert values_of(folder, name)[:3] == pytest.approx(values_of(tmp_path / 'single', name), rel=1e-5)


@pytest.mark.long
def test_a_signal_to_process_1_stops_the_validation_and_the_final_evaluation_of_both(tmp_path):
  task = write_task(tmp_path / 'task')
  for path in (task / 'dev.tsv', task / 'test.tsv'):
    path.write_text(path.read_text('utf-8') * 1000, 'utf-8')
  folder = tmp_path / 'run'
  command = ('experiments.train', '--distributed', *tiny_arguments(task, folder, *SETTINGS))
  processes = start_together(*command)
  wait_for_step(folder, 3, processes)  # the validation begins
  processes[1].send_signal(signal.SIGTERM)
  first, second = wait_for_outputs(processes, expected=INTERRUPTED)
  assert 'run the same command again to resume from step 3' in first and 'step' not in second
  assert not values_of(folder, 'validation/loss')
  processes = start_together(*command)
  for line in processes[0].stdout:
    if 'evaluating test' in line:
      break
  processes[1].send_signal(signal.SIGTERM)
  first, second = wait_for_outputs(processes, expected=INTERRUPTED)
  assert 'stopped by SIGTERM while evaluating; run the same command again to repeat the evaluation\n' in first
  assert 'stopped' not in second and not (folder / 'results.json').exists()
  assert 'validation/loss' in read_metrics(folder)[-1]
  wait_for_outputs(start_together(*command))
  assert (folder / 'hypotheses.test.txt').read_text('utf-8').count('\n') == 5000


# `make test` trains translation in two processes, in the tests above, and `make test-all` every system.
SYSTEMS = [pytest.param(system, marks=pytest.mark.long) for system in CONFIGS]


@pytest.fixture(scope='module')
def trained_together(task, tmp_path_factory, request):
  """The folder with a run of every system that the selected tests use, each trained by two processes."""
  folder = tmp_path_factory.mktemp('together')
  selected = {
    test.callspec.params.get('run_and_records') for test in request.session.items if hasattr(test, 'callspec')
  }
  systems = [system for system in CONFIGS if system in selected]
  wait_for_outputs(start_together('tests.experiments.train_every_system', folder, task, *systems), len(systems))
  return folder


@pytest.fixture(params=SYSTEMS)
def run_and_records(request, trained_together):
  """The folder of the run of a system, and the record of each process."""
  records = [json.loads((trained_together / f'{request.param}.{i}.json').read_text()) for i in range(2)]
  return trained_together / request.param, *records


def run_writes(record: dict, folder: Path) -> list[Write]:
  """Returns the writes of a process by paths inside the run folder, without checkpoints."""
  writes = [Write(*(os.path.relpath(path, folder) if path else '' for path in write)) for write in record['writes']]
  return [write for write in writes if write.path.split('/')[0] not in CHECKPOINT_FOLDERS]


def test_every_system_trains_in_two_processes_which_return_the_stored_results(run_and_records):
  folder, first, second = run_and_records
  assert [first['process'], second['process']] == [0, 1]
  assert any('4 x cpu' in line for line in first['lines'])
  assert any(line.startswith('all 2 steps are done') for line in first['lines'])
  losses = values_of(folder, 'train/loss')
  assert len(losses) == 2 and np.all(np.isfinite(losses))
  assert first['results'] == second['results'] == json.loads((folder / 'results.json').read_text('utf-8'))['results']
  assert 'test' in first['results'] and all(first['results'].values())


def test_process_0_alone_writes_each_file_once_except_updated_and_appended_ones(run_and_records):
  folder, first, second = run_and_records
  assert second['lines'] == [] and run_writes(second, folder) == []  # but for checkpoints
  names = {path.name for path in folder.iterdir()}  # no unfinished file remains
  assert names - APPENDED_FILES - CHECKPOINT_FOLDERS == COMMON_FILES | UPDATED_FILES | SYSTEM_FILES[folder.name]
  writes = run_writes(first, folder)
  replaced = [write.path for write in writes if write.source]
  assert set(replaced) >= UPDATED_FILES
  written_once = sorted(path for path in replaced if path.split('/')[0] not in UPDATED_FILES | APPENDED_FILES)
  assert written_once == sorted(COMMON_FILES | SYSTEM_FILES[folder.name])
  temporary = {write.source for write in writes}
  in_place = {write.path for write in writes if not write.source and write.path not in temporary}
  assert {path.split('/')[0] for path in in_place} <= APPENDED_FILES


def test_one_process_opens_a_run_of_two(run_and_records, monkeypatch):
  folder, first, _ = run_and_records
  shrink_tasks(monkeypatch)
  run = open_run(folder)
  assert run.step == 2
  metrics, _ = run.system.evaluate(run.params, 'test')
  assert metrics['loss'].value == pytest.approx(first['results']['test']['loss']['value'], rel=1e-4)
