"""Preparation of data sets: the same files after any interruption, and UserError for what cannot be prepared."""

import hashlib

import pytest

from attention_jax.data import preparing
from attention_jax.data.prepared import MANIFEST
from attention_jax.data.preparing import prepare
from attention_jax.data.tasks import load
from attention_jax.errors import UserError
from tests.data.helpers import error_message
from tests.data.test_prepared import TEXT, folder, make_config  # noqa: F401 - a fixture


class KilledError(Exception):
  """Stands for a signal that ends the process."""


def contents(path):
  return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def quiet(line):
  """Discards a line of progress."""


def kill_in(monkeypatch, name, config, output):
  """Prepares a data set, and is killed when it calls a function of preparing.py."""

  def kill(*arguments):
    raise KilledError

  with monkeypatch.context() as patch, pytest.raises(KilledError):
    patch.setattr(preparing, name, kill)
    prepare(config, output, quiet)


def test_an_interrupted_preparation_continues(folder, monkeypatch):  # noqa: F811
  monkeypatch.setattr(preparing, 'REPORT_SECONDS', 0)
  lines = []
  prepare(make_config(folder, TEXT), folder / 'whole', lines.append)
  assert any('pairs/s' in line and 'min left' in line for line in lines)
  assert lines[-2] == f'{folder}/whole: 49 pairs in 3 files'
  store_summary = preparing._store_summary
  for shard in range(3):

    def store_or_kill(output, table, number, summary, shard=shard):
      if number == shard:
        raise KilledError
      store_summary(output, table, number, summary)

    output = folder / f'interrupted{shard}'
    with monkeypatch.context() as patch, pytest.raises(KilledError):
      patch.setattr(preparing, '_store_summary', store_or_kill)
      prepare(make_config(folder, TEXT), output, quiet)
    assert not (output / MANIFEST).exists()
    with pytest.raises(UserError, match='holds no prepared data set'):
      load(make_config(output, 'prepared'), None)
    lines.clear()
    prepare(make_config(folder, TEXT), output, lines.append)
    assert contents(output) == contents(folder / 'whole')
    assert any('continuing after' in line for line in lines) == (shard > 0)
  prepare(make_config(folder, TEXT), output, lines.append)
  assert lines[-1].endswith('is prepared already')


def test_blank_lines_at_the_end_are_counted_once(folder, monkeypatch):  # noqa: F811
  for side in ('en', 'de'):
    with open(folder / f'train.{side}', 'a') as file:
      file.write('\n\n')
  kill_in(monkeypatch, '_finish', make_config(folder, TEXT), folder / 'prepared')
  prepare(make_config(folder, TEXT), folder / 'prepared', quiet)
  report = load(make_config(folder / 'prepared', 'prepared'), None).report
  assert any('3 pairs with a blank side skipped (lines 11, 51, 52)' in line for line in report)


@pytest.mark.parametrize('content', ['', '[]', '{"shard": 3}'])
def test_damaged_summaries_raise_a_user_error(folder, monkeypatch, content):  # noqa: F811
  output = prepare(make_config(folder, TEXT), folder / 'whole', quiet).with_name('prepared')
  kill_in(monkeypatch, '_finish', make_config(folder, TEXT), output)
  request = (output / preparing.REQUEST).read_text()
  (output / preparing.REQUEST).write_text(content)
  with pytest.raises(UserError, match=f'cannot use {output}|holds another data set'):
    prepare(make_config(folder, TEXT), output, quiet)
  (output / preparing.REQUEST).write_text(request)
  summary = output / 'train-00001.json'
  summary.write_text(content)
  with pytest.raises(UserError, match=f'cannot read {summary}: .*; delete it to prepare its rows again'):
    prepare(make_config(folder, TEXT), output, quiet)
  summary.unlink()  # the remedy of the message
  prepare(make_config(folder, TEXT), output, quiet)
  assert contents(output) == contents(folder / 'whole')


def test_a_table_is_prepared_without_the_links_of_its_training_split(folder, tmp_path):  # noqa: F811
  (tmp_path / 'train.tsv').write_text('c\tC\n\na b\tA\t0-0 1-0\n')  # the first row has none
  (tmp_path / 'dev.tsv').write_text('b a\tB\t0-0\n')
  config = make_config(tmp_path, "tsv(train='train.tsv', validation='dev.tsv')", 'char')
  prepare(config, tmp_path / 'prepared', quiet)
  data = load(make_config(tmp_path / 'prepared', 'prepared', 'char'), None)
  assert list(data.corpora['train'].source) == ['c', 'a b'] and data.corpora['train'].line(1) == 3
  assert data.corpora['validation'].links == [((0, 0),)]
  assert 'the links of the training split are not prepared' in data.report[2]
  assert '1 pair with a blank side' in data.report[3]


def test_rows_of_a_filtered_table_keep_their_line_numbers(tmp_path):
  rows = [*('too long ' * 9 for _ in range(5)), *('a' * length for length in range(1, 21))]
  (tmp_path / 'pairs.tsv').write_text(''.join(f'{row}\tb\n' for row in rows))
  config = make_config(tmp_path, "pairs(path='pairs.tsv')")
  prepare(config, tmp_path / 'prepared', quiet)
  loaded = [load(config, None), load(make_config(tmp_path / 'prepared', 'prepared'), None)]
  in_memory, prepared = ([data.corpora['train'].line(row) for row in range(16)] for data in loaded)
  assert prepared == in_memory and prepared[0] > 5


def test_links_of_the_training_files_are_reported_as_not_prepared(folder):  # noqa: F811
  task = TEXT.replace(')', ", links='links')")
  (folder / 'val.links').write_text('0-0\n')
  prepare(make_config(folder, task), folder / 'without', quiet)
  (folder / 'train.links').write_text('\n' * 50)
  prepare(make_config(folder, task), folder / 'with', quiet)
  notes = []
  for name in ('without', 'with'):
    data = load(make_config(folder / name, 'prepared'), None)
    assert data.corpora['validation'].links == [((0, 0),)]
    notes.append([line for line in data.report if 'the links of the training split are not prepared' in line])
  assert notes == [[], [f'{folder}/train.en: the links of the training split are not prepared']]


def test_mistakes_raise_a_user_error(folder, tmp_path):  # noqa: F811
  def error(config, output):
    return error_message(prepare, config, output, quiet)

  config = make_config(folder, TEXT)
  assert 'holds other files' in error(config, folder)
  for train in ((3, 4), None):
    message = f"task 'text': train must be a prefix or a pair of (source, target) paths, got {train}"
    assert error(make_config(folder, f'text(train={train})'), folder / 'new') == message
  prepare(config, folder / 'prepared', quiet)
  validation = (folder / 'val.en').read_text()
  (folder / 'val.en').write_text('changed\n')
  message = 'holds another data set: its split validation has changed; choose another folder'
  assert message in error(config, folder / 'prepared')
  (folder / 'val.en').write_text(validation)
  assert "vocabulary is 'word' there, 'char' now" in error(make_config(folder, TEXT, 'char'), folder / 'prepared')
  assert 'is prepared already' in error(make_config(folder / 'prepared', 'prepared'), folder / 'again')
  (folder / 'train.en').write_text('a\n')
  assert 'files is' in error(config, folder / 'prepared')
  assert 'has 1 line but' in error(config, folder / 'new')
  (folder / 'train.en').write_bytes(b'a\xff\n')
  assert 'train.en:1: not UTF-8' in error(config, folder / 'other')
  (folder / 'train.en').write_text('\n' * 50)
  (folder / 'train.de').write_text('\n' * 50)
  assert 'no pairs' in error(make_config(folder, TEXT, 'char'), folder / 'blank')
  assert 'memory://set is a URL; prepare the data set on a disk' in error(config, 'memory://set')
