"""Prepared data sets train as the same data in memory does, and configs that cannot be prepared are errors."""

import contextlib
import json

import jax
import numpy as np
import pytest
from PIL import Image

from attention_jax.data import preparing
from attention_jax.data.batching import Share
from attention_jax.data.pipeline import stream
from attention_jax.data.prepared import PreparedTable, read_prepared
from attention_jax.errors import UserError
from attention_jax.systems.config import default_config, parse_config
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run, start_together, tiny_arguments, wait_for_outputs
from tests.experiments.test_bad_input import assert_user_error
from tests.experiments.test_two_processes import SETTINGS


@pytest.fixture
def prepared(task, tmp_path):
  """A prepared folder of the tiny task."""
  arguments = [x for x in tiny_arguments(task, tmp_path) if not x.startswith('--workdir')]
  result = run('prepare', *arguments, f'--output={tmp_path / "prepared"}')
  assert result.code == 0 and '24 pairs in 1 file' in result.err, result.err
  return tmp_path / 'prepared'


def train_prepared(prepared, workdir, *fields):
  """Trains on prepared data."""
  result = run('train', *prepared_arguments(prepared, workdir, *fields))
  assert result.code == 0, result.err


def prepared_arguments(prepared, workdir, *fields):
  return tiny_arguments(prepared, workdir, '--config.data.task=prepared', *fields)


@pytest.mark.long
def test_training_on_prepared_data_equals_training_on_data_in_memory(trained, prepared, tmp_path):
  folder, _ = trained
  train_prepared(prepared, tmp_path / 'disk')
  runs = [open_run(path, 'latest') for path in (tmp_path / 'disk', folder)]
  jax.tree.map(np.testing.assert_array_equal, runs[0].params, runs[1].params)
  for name in ('hypotheses.test.txt', 'vocabulary.source.json'):
    assert (tmp_path / 'disk' / name).read_bytes() == (folder / name).read_bytes()
  result = run('evaluate', f'--workdir={tmp_path / "disk"}', '--split=train')
  assert result.code == 0 and 'loss' in result.out, result.err


@pytest.mark.long
def test_another_number_of_processes_resumes_within_an_epoch(prepared, tmp_path):
  """Four updates of one process and two of two processes equal six of one process; an epoch has three batches."""
  fields = [*SETTINGS, '--config.mesh.fsdp=1', '--config.training.checkpoint_every=4', '--config.training.steps=4']
  changed = [*fields, '--config.training.steps=6']
  train_prepared(prepared, tmp_path / 'uninterrupted', *changed)
  train_prepared(prepared, tmp_path / 'resumed', *fields)
  arguments = prepared_arguments(prepared, tmp_path / 'resumed', *changed)
  first, _ = wait_for_outputs(start_together('experiments.train', '--distributed', *arguments))
  assert 'resuming at step 4 of 6' in first
  runs = [open_run(tmp_path / name, 'latest') for name in ('uninterrupted', 'resumed')]
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *(x.params for x in runs))


def test_configs_that_cannot_be_prepared_are_errors(tmp_path):
  for arguments, part in [
    (['--config=configs/digits.py:mnih2014'], "got a config of system 'glimpsing'"),
    ([], '--config is missing'),
    (['--config=configs/dates.py', '--config.system=translate'], "'translate' (did you mean 'translation'?)"),
  ]:
    assert_user_error(run('prepare', *arguments, f'--output={tmp_path / "prepared"}'), [part])


def write_documents(folder):
  """Writes documents with labels; returns the fields of their config."""
  rng = np.random.default_rng(0)
  for name, rows in (('train', 23), ('dev', 5)):
    texts = [' '.join(rng.choice([*'abcdefg', '.'], rng.integers(2, 12))) + ' a' for _ in range(rows)]
    lines = [json.dumps({'text': text, 'label': f'{i % 3}'}) for i, text in enumerate(texts)]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')
  fields = {'system': 'classification', 'data.task': "jsonl(train='train.jsonl', validation='dev.jsonl')"}
  return fields | {'data.buckets': ((2, 4), (4, 4)), 'data.batch_size': 4}


def write_captions(folder):
  """Writes images with one to three captions each, in any order; returns the fields of their config."""
  (folder / 'images').mkdir()
  for i in range(11):
    Image.new('RGB', (9, 9), (20 * i, 0, 3)).save(folder / 'images' / f'{i:02}.png')
  rows = [f'{i:02}.png,{"red " * (1 + i % 4)}{caption}' for caption in range(3) for i in range(11) if caption <= i % 3]
  (folder / 'captions.csv').write_text('\n'.join(['image,caption', *rows]) + '\n')
  fields = {'system': 'captioning', 'data.task': 'captions(size=8)', 'model.encoder': 'grid'}
  return fields | {'data.buckets': (3, 6), 'data.batch_size': 4}


def write_features(folder):
  """Writes features of the images of `write_captions`; returns the fields of their config."""
  fields = write_captions(folder)
  np.savez(folder / 'grid.npz', **{f'{i:02}.png': np.full((2, 2, 5), i / 3, np.float32) for i in range(11)})
  return fields | {'data.task': "captions(features='grid.npz')", 'model.encoder': 'precomputed'}


def load_system(fields, **changed):
  config = default_config(fields['system'])
  config.update_from_flattened_dict(fields | changed)
  config = parse_config(config)
  return SYSTEMS[config.system].load(config, None)


@pytest.fixture
def small_shards(monkeypatch):
  monkeypatch.setattr(preparing, 'SHARD_ROWS', 10)
  monkeypatch.setattr(preparing, 'CHUNK_ROWS', 3)


@pytest.fixture(params=[write_documents, write_captions, write_features], ids=['documents', 'images', 'features'])
def in_memory(request, tmp_path, small_shards):
  """A system with its data in memory, and the fields of its config."""
  fields = request.param(tmp_path) | {'data.folder': str(tmp_path)}
  return load_system(fields), fields


def prepare_quietly(system, folder):
  return preparing.write_prepared(system.preparation(system.config), folder, lambda line: None)


def assert_same_batches(actual, expected):
  assert type(actual) is type(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_batches_of_prepared_documents_and_captions_are_those_from_memory(in_memory, tmp_path, monkeypatch):
  system, fields = in_memory
  folder = prepare_quietly(system, tmp_path / 'prepared')
  assert prepare_quietly(system, folder) == folder  # prepared already
  changed = {'data.task': 'prepared', 'data.folder': str(folder)}
  prepared = load_system(fields, **changed)
  assert prepared.report[1:] == system.report[1:] and prepared.splits == system.splits
  whole, on_disk = (data.batches(1, Share()) for data in (system, prepared))
  assert len(whole) > 3 and on_disk.shapes == whole.shapes
  for step, batch in enumerate(stream(on_disk, 2, 2 * len(whole)), 2):  # from the middle of an epoch
    assert_same_batches(batch, whole[step])
  read = []
  read_rows = PreparedTable.read_records
  monkeypatch.setattr(PreparedTable, 'read_records', lambda table, x: read.append(len(x)) or read_rows(table, x))
  for step in range(len(whole)):
    parts = [prepared.batches(1, Share(index, 4))[step] for index in range(4)]
    assert_same_batches(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), whole[step])
  assert max(read) == 1  # each of four processes reads its one row, and its picture
  with pytest.raises(UserError, match=r"config\.data\.vocabulary is 'char', but .* was prepared with 'word'"):
    load_system(fields, **changed, **{'data.vocabulary': 'char'}).report  # noqa: B018
  with pytest.raises(UserError, match='is prepared already; expected a task other than'):
    prepare_quietly(prepared, tmp_path / 'again')
  with pytest.raises(UserError, match=r"was prepared for system .*, not for 'translation'"):
    read_prepared(str(folder))


@pytest.mark.long
def test_an_interrupted_preparation_of_any_system_continues(in_memory, tmp_path, monkeypatch):
  system, _ = in_memory

  def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

  whole = contents(prepare_quietly(system, tmp_path / 'whole'))
  store_summary = preparing._store_summary
  for calls in (1, 2, 3):
    remaining = iter(range(calls))

    def store_or_kill(*arguments, remaining=remaining):
      store_summary(*arguments)
      if next(remaining, None) is None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
      patch.setattr(preparing, '_store_summary', store_or_kill)
      prepare_quietly(system, tmp_path / f'interrupted{calls}')
    assert contents(prepare_quietly(system, tmp_path / f'interrupted{calls}')) == whole


def test_texts_and_labels_of_prepared_splits_are_those_from_memory(tmp_path):
  fields = write_documents(tmp_path) | {'data.folder': str(tmp_path)}
  documents = load_system(fields)
  changed = {'data.task': 'prepared', 'data.folder': str(prepare_quietly(documents, tmp_path / 'prepared'))}
  prepared = load_system(fields, **changed)
  for split in ('train', 'validation'):
    one, other = documents.documents[split], prepared.documents[split]
    assert (list(other.sentences), other.labels, list(other.lines)) == (one.sentences, one.labels, list(one.lines))
  rows = (tmp_path / 'train.jsonl').read_text().splitlines()[:1]
  (tmp_path / 'train.jsonl').write_text('\n'.join(rows) + '\n')
  with pytest.raises(UserError, match="expected at least two labels, but every label is '0'"):
    prepare_quietly(documents, tmp_path / 'one_label')
  with pytest.raises(UserError, match=r'the largest of config.data.buckets is \[2, 4\], but .* with \[4, 4\]'):
    load_system(fields, **changed, **{'data.buckets': ((2, 4),)}).report  # noqa: B018


@pytest.mark.long
def test_gold_boxes_are_prepared(tmp_path):
  fields = {'system': 'captioning', 'data.task': 'shapes', 'model.encoder': 'grid'}
  shapes = load_system(fields)
  folder = prepare_quietly(shapes, tmp_path / 'prepared')
  prepared = load_system(fields, **{'data.task': 'prepared', 'data.folder': str(folder)})
  one, other = (system.pictures['validation'] for system in (shapes, prepared))
  assert list(other.boxes) == one.boxes and list(other.captions) == one.captions
  assert other.corpus.source == one.corpus.source
  for rows in (slice(20), [3, 1, 3], 3):
    np.testing.assert_array_equal(other.pictures[rows], one.pictures[rows])
