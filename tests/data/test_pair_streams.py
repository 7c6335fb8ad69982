"""Training pairs that are read one after the other equal the lines of the files; errors are one line."""

import gzip

import fsspec
import pytest

from attention_jax.data.files import iter_raw_lines, read_lines
from attention_jax.data.pair_streams import iter_lines, open_pairs
from attention_jax.data.tasks import TranslationDataConfig
from attention_jax.errors import UserError

TEXT = "text(train='train', source='de', target='en')"
TABLE = "tsv(train='train.tsv')"


@pytest.fixture(params=['disk', 'url'])
def folder(request, tmp_path):
  """An empty folder, on the disk or behind a URL."""
  if request.param == 'disk':
    yield str(tmp_path)
    return
  yield 'memory://streams'
  system = fsspec.filesystem('memory')
  if system.exists('/streams'):
    system.rm('/streams', recursive=True)


def write(path, data):
  with fsspec.open(path, 'wb') as file:
    file.write(data)


def read(folder, task):
  stream, _ = open_pairs(TranslationDataConfig(task, folder))
  return stream, list(stream.pairs())


def test_pairs_of_text_and_tsv_tasks_are_read_in_order(folder):
  write(f'{folder}/train.de', b'eins\n\nzwei')
  write(f'{folder}/train.en', b'one\n\ntwo\n')
  write(f'{folder}/train.tsv', b'eins\tone\n\nzwei\ttwo')
  for task, files in ((TEXT, 2), (TABLE, 1)):
    stream, pairs = read(folder, task)
    assert [pair for pair, _ in pairs] == [('eins', 'one'), ('', ''), ('zwei', 'two')]
    assert pairs[-1][1] == 1  # the share of the file that has been read
    assert len(stream.fingerprint) == files


def test_what_a_task_leaves_out_is_noted(tmp_path):
  write(f'{tmp_path}/pairs.txt', b'Go.\tVa !\n\nRun!\tCours !\nHelp!\tA l aide !\n')
  stream, _ = open_pairs(TranslationDataConfig("pairs(path='pairs.txt')", str(tmp_path)))
  assert len(stream.notes) == 1 and '1 blank' in stream.notes[0]


@pytest.mark.parametrize('name', ['a', 'a.gz'])
@pytest.mark.parametrize(
  'content', ['', '\ufeff', '\n', 'a', 'a\r\r\nb', '\ufeffa\r\n\r\nb\u2028\x85c\r', '\ufeff\n\ufeff']
)
def test_the_lines_are_those_of_read_lines(folder, name, content):
  path = f'{folder}/{name}'
  write(path, gzip.compress(content.encode()) if name.endswith('.gz') else content.encode())

  def lines_or_error(read):
    try:
      return list(read(path))
    except UserError as error:
      return str(error)

  expected = lines_or_error(read_lines)
  assert lines_or_error(lambda path: [line for line, _ in iter_lines(path)]) == expected
  assert lines_or_error(lambda path: [line.decode() for line in iter_raw_lines(path)]) == expected


@pytest.mark.parametrize(('task', 'name'), [(TEXT, 'train.de'), (TABLE, 'train.tsv')])
def test_a_missing_file_is_reported_before_pairs_are_read(folder, task, name):
  with pytest.raises(UserError, match=rf'^{folder}/{name}: no such file'):
    open_pairs(TranslationDataConfig(task, folder))


def test_an_error_of_the_file_system_is_reported_in_one_line(monkeypatch):
  def fail(*args):
    raise RuntimeError('Unable to locate credentials')

  monkeypatch.setattr(fsspec, 'open', fail)
  for task in (TEXT, TABLE):
    with pytest.raises(UserError, match=r'^s3://bucket/train.*: cannot be read \(Unable to locate credentials\)$'):
      open_pairs(TranslationDataConfig(task, 's3://bucket'))
