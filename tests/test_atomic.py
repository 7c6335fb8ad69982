"""Atomic writes: whole or not at all, from several processes too."""

import io
import json
import math
import multiprocessing
import time

import pytest

from attention_jax import atomic
from attention_jax.atomic import is_unfinished, to_json, write_folder_atomic, write_text


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
  path = tmp_path / 'file.txt'
  write_text(path, 'before')
  with pytest.raises(RuntimeError, match='interrupted'), atomic.write_atomic(path) as temporary:
    temporary.write_text('half')
    assert is_unfinished(temporary) and path.read_text() == 'before'
    raise RuntimeError('interrupted')
  assert path.read_text() == 'before' and list(tmp_path.iterdir()) == [path]


def test_text_is_utf_8_and_bytes_are_bytes(tmp_path):
  write_text(str(tmp_path / 'a'), 'Grüße')
  atomic.write_bytes(tmp_path / 'b', b'\xff\x00')
  assert (tmp_path / 'a').read_bytes() == 'Grüße'.encode() and (tmp_path / 'b').read_bytes() == b'\xff\x00'


def test_numbers_that_are_not_finite_are_null_in_json():
  value = {'a': math.nan, 'é': [1.5, -math.inf, {'b': math.inf}], 'text': 'NaN'}
  text = to_json(value, ensure_ascii=False)
  assert text == '{"a": null, "é": [1.5, null, {"b": null}], "text": "NaN"}'
  read = json.loads(to_json(value, indent=2), parse_constant=pytest.fail, object_hook=atomic.null_as_nan)
  assert math.isnan(read['a']) and math.isnan(read['é'][2]['b']) and read['text'] == 'NaN'


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'runs' / 'x'
  with pytest.raises(RuntimeError, match='interrupted'), write_folder_atomic(path) as folder:
    (folder / 'half').write_text('')
    assert is_unfinished(folder) and not path.exists()
    raise RuntimeError('interrupted')
  assert not list(path.parent.iterdir())
  with write_folder_atomic(path) as folder:
    (folder / 'whole').write_text('')
  assert list(path.parent.iterdir()) == [path] and list(path.iterdir()) == [path / 'whole']
  with pytest.raises(FileExistsError), write_folder_atomic(path):
    pass
  assert (path / 'whole').exists()


def test_short_writes_are_completed():
  written = []

  class SlowFile(io.RawIOBase):
    def write(self, data):
      written.append(bytes(data[:2]))
      return len(written[-1])

  atomic.write_all(SlowFile(), b'12345')
  assert written == [b'12', b'34', b'5']


def _write_repeatedly(path, letter):
  for _ in range(50):
    write_text(path, letter * 10_000)


@pytest.mark.long
def test_processes_that_write_one_file_never_mix(tmp_path):
  path = tmp_path / 'file.txt'
  context = multiprocessing.get_context('spawn')
  writers = [context.Process(target=_write_repeatedly, args=(path, letter)) for letter in 'ab']
  for writer in writers:
    writer.start()
  while not path.exists():
    assert any(writer.is_alive() for writer in writers)
    time.sleep(0.01)
  while any(writer.is_alive() for writer in writers):
    text = path.read_text()
    assert len(text) == 10_000 and len(set(text)) == 1
  for writer in writers:
    writer.join()
    assert writer.exitcode == 0
  assert list(tmp_path.iterdir()) == [path]
