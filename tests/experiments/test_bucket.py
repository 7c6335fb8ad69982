"""A run in a bucket is that on a disk, bit for bit, and programs open it.

The latest process owns it; damaged objects are reported; a bucket that does not answer for a while loses nothing.
"""

import functools
import os
import sys
import threading
import time

import jax
import numpy as np
import pytest
from etils import epath
from etils.epath import backend

from attention_jax.errors import UserError
from attention_jax.systems.runs import open_run
from attention_jax.training.checkpoint import LATEST
from attention_jax.training.folder import own_folder
from attention_jax.training.paths import run_path
from attention_jax.training.writers import read_metrics
from tests import gcs_server
from tests.experiments.helpers import read_tree, run, start_together, tiny_arguments, wait_for_outputs
from tests.experiments.test_bad_input import assert_user_error
from tests.training import helpers
from tests.training.helpers import fit_light, state_bits

fit_small = functools.partial(fit_light, steps=8, checkpoint_every=4, evaluate_every=4)


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
  """The URL of a bucket, and its server."""
  folder = tmp_path_factory.mktemp('bucket')
  with gcs_server.Server(folder) as server, pytest.MonkeyPatch.context() as patch:
    for name, value in gcs_server.environment(server.url).items():
      patch.setenv(name, value)
    yield f'gs://{gcs_server.BUCKET}', server


@pytest.fixture(scope='module')
def on_disk(tmp_path_factory):
  """The result and the folder of a run on a disk."""
  folder = tmp_path_factory.mktemp('disk') / 'run'
  return fit_small(folder), folder


@pytest.fixture(scope='module')
def in_bucket(bucket):
  """The result and the folder of the same run in the bucket."""
  folder = run_path(f'{bucket[0]}/runs/small')
  return fit_small(folder), folder


def damage_checkpoint(folder, step, change):
  """Changes the objects that hold the arrays of a checkpoint."""
  state = folder / LATEST / str(step) / 'state'
  for path in [*state.glob('d/*'), *state.glob('*/d/*')]:
    change(path)


@pytest.mark.parametrize(
  'change',
  [
    pytest.param(lambda path: path.unlink(), marks=pytest.mark.long),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-20]), marks=pytest.mark.long),
    lambda path: path.write_bytes(bytes([*path.read_bytes()[:-9], 1, 2, 3, 4, 5, 6, 7, 8, 9])),
  ],
  ids=['deleted', 'truncated', 'flipped'],
)
def test_a_run_resumes_from_the_checkpoint_before_one_with_a_damaged_object(on_disk, in_bucket, change, capsys):
  result, folder = in_bucket
  assert state_bits(result.state) == state_bits(on_disk[0].state) and result.best == on_disk[0].best
  damage_checkpoint(folder, 8, change)
  result = fit_small(folder)
  assert f'{LATEST}/8 cannot be read' in capsys.readouterr().out
  assert state_bits(result.state) == state_bits(on_disk[0].state)
  assert any(path.name.startswith('damaged-8-') for path in folder.iterdir())
  assert {path.name for path in (folder / LATEST).iterdir()} == {'4', '8'}


def test_the_latest_process_owns_a_run_in_a_bucket(bucket):
  folder = run_path(f'{bucket[0]}/runs/owned')
  lines = []
  with own_folder(folder, lines.append) as check_first:
    check_first()
    with own_folder(folder, lines.append) as check_second:
      check_second()
      message = rf'^process {os.getpid()} on .* has taken over {folder}; this one stops before its next checkpoint$'
      with pytest.raises(UserError, match=message):
        check_first()
      (folder / 'owner.json').unlink()
      with pytest.raises(UserError, match=rf'^cannot read {folder}/owner\.json: '):
        check_second()
  assert lines == []


def test_of_two_processes_that_start_at_once_one_overwrites_the_other(bucket):
  from google.api_core.exceptions import PreconditionFailed
  from google.cloud import storage

  folder = run_path(f'{bucket[0]}/runs/race')
  with own_folder(folder, print):
    blob = storage.Client().bucket(gcs_server.BUCKET).get_blob('runs/race/owner.json')
    with own_folder(folder, print), pytest.raises(PreconditionFailed):
      blob.upload_from_string('{}', if_generation_match=blob.generation)
  unwritable = own_folder(epath.Path('gs://nowhere/run'), print)
  with pytest.raises(UserError, match=r'^gs://nowhere/run/owner\.json: cannot be written'), unwritable:
    pass


@pytest.mark.long
def test_programs_train_and_open_a_run_in_a_bucket(bucket, trained, task):
  folder = run_path(f'{bucket[0]}/runs/program')
  result = run('train', *tiny_arguments(task, folder))
  assert result.code == 0, result.err
  for name in ('results.json', 'hypotheses.test.txt', 'vocabulary.source.json', 'data.json', 'config.json'):
    assert (folder / name).read_text() == (trained[0] / name).read_text(), name
  losses = [[record.get('train/loss') for record in read_metrics(path)] for path in (folder, trained[0])]
  assert losses[0] == losses[1]
  assert run('train', *tiny_arguments(task, folder)).out.count('all 4 steps are done') == 1
  outputs = [run('translate', f'--workdir={path}', stdin=b'eins zwei').out for path in (folder, trained[0])]
  assert outputs[0] == outputs[1] != ''
  assert run('evaluate', f'--workdir={folder}', '--split=test').code == 0
  result = run('inspect_attention', f'--workdir={folder}')
  assert result.code == 0 and (folder / 'attention.png').read_bytes().startswith(b'\x89PNG'), result.err


NO_ACCESS = 'the caller has no storage access'
# --workdir -> part of the message
BAD_FOLDERS = {  # tests/training/test_paths.py has those that no bucket can have
  'gs://bucket': "'gs://bucket' names no folder of a bucket",
  'gs://nowhere/run': "cannot use gs://nowhere/run: there is no bucket 'nowhere', or it may not be read",
  'gs://forbidden/run': f'cannot use gs://forbidden/run: Forbidden: b/forbidden/o {NO_ACCESS}',
  'gs://private/run': f'cannot use gs://private/run: {NO_ACCESS}, 401',
  'gs://read-only/run': 'gs://read-only/run/owner.json: cannot be written (403 POST ',
  'gs://bucket/bad/notes.txt': 'cannot use gs://bucket/bad/notes.txt: it is an object of the bucket; expected a folder',
  'gs://bucket/bad': 'gs://bucket/bad holds files (notes.txt, run) but no config.json; choose an empty or new folder',
  'gs://bucket/bad/run': 'gs://bucket/bad/run holds another config: training.optimizer is "adam" in its config.json, ',
}


@pytest.mark.parametrize('url', BAD_FOLDERS)
def test_a_bad_folder_of_a_bucket_is_one_line_and_nothing_is_lost(url, bucket, trained, task, capfd):
  folder = run_path('gs://bucket/bad')
  (folder / 'notes.txt').write_text('notes')
  (folder / 'run' / 'config.json').write_text((trained[0] / 'config.json').read_text())
  before = read_tree(bucket[1].folder)
  result = run('train', *tiny_arguments(task, url, '--config.training.optimizer=sgd'))
  assert_user_error(result, [BAD_FOLDERS[url]])
  assert capfd.readouterr().err == ''  # logs of libraries
  assert read_tree(bucket[1].folder) == before


def test_a_bucket_without_gcsfs_is_one_line(task, monkeypatch):
  backend.fsspec_backend._get_filesystem.cache_clear()
  for name in ('gs', 'gcs'):
    monkeypatch.delitem(sys.modules['fsspec.registry']._registry, name, raising=False)
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  result = run('train', *tiny_arguments(task, 'gs://bucket/run'))
  assert_user_error(result, ['gs://bucket/run needs the package gcsfs: pip install "attention_jax[gcs]"'])


@pytest.mark.long
def test_a_bucket_that_does_not_answer_during_a_save_loses_nothing(bucket, tmp_path):
  """The server is stopped for half a minute while the first checkpoint is written."""
  fields = {'steps': 40, 'stream': functools.partial(helpers.stream, pause=0.2, lengths=helpers.BUCKETS[:1])}
  expected = fit_light(tmp_path / 'run', steps=40)
  folder = run_path(f'{bucket[0]}/runs/outage')

  def interrupt():
    while not (folder / LATEST).exists():
      time.sleep(0.01)
    bucket[1].stop()
    time.sleep(30)
    bucket[1].start()

  thread = threading.Thread(target=interrupt)
  thread.start()
  result = fit_light(folder, checkpoint_every=10, **fields)
  thread.join()
  assert result.reason == 'all 40 steps are done' and state_bits(result.state) == state_bits(expected.state)
  assert {path.name for path in (folder / LATEST).iterdir()} == {'30', '40'}
  steps = [[record['step'] for record in read_metrics(path)] for path in (folder, tmp_path / 'run')]
  assert steps[0] == steps[1]


@pytest.mark.long
def test_two_processes_write_their_shards_to_a_bucket(bucket, task, tmp_path):
  """Interrupted after two updates and resumed, the run has the parameters of one on a disk, bit for bit."""
  folders = [run_path(f'{bucket[0]}/runs/two'), tmp_path / 'run']
  for folder in folders:
    for steps in (2, 4):
      fields = ['--config.mesh.fsdp=4', f'--config.training.steps={steps}', '--config.training.optimizer=sgd']
      arguments = tiny_arguments(task, folder, *fields)
      wait_for_outputs(start_together('experiments.train', '--distributed', *arguments))
  params = [jax.device_get(open_run(folder, 'latest').params) for folder in folders]
  jax.tree.map(np.testing.assert_array_equal, *params)
  assert (folders[0] / 'results.json').read_text() == (folders[1] / 'results.json').read_text()
