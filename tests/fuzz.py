"""Fuzzing of functions that read input from users: hostile files, spec strings, flags and configs.

  python -m tests.fuzz 2000

divides 2000 cases, besides the files of CORPUS, among READERS. Every case must end within TIMEOUT seconds, in a result
or in a UserError of one line; the file that was read is unchanged, and no code in it runs. `tests/test_fuzz.py` runs
CORPUS and a few other cases.
"""

import contextlib
import faulthandler
import gzip
import io
import json
import os
import signal
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow.parquet
from absl import flags
from hypothesis import strategies as st
from ml_collections import config_flags

from attention_jax import specs
from attention_jax.data import tasks, vocab
from attention_jax.data.files import read_arrays, read_lines
from attention_jax.decoding.hypothesis_files import read_candidates
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.pharaoh import parse_pharaoh
from attention_jax.systems import experiment
from attention_jax.systems.captioning import data as pictures
from attention_jax.systems.captioning import images
from attention_jax.systems.captioning.config import CaptioningDataConfig
from attention_jax.systems.classification import data as documents
from attention_jax.systems.classification.config import ClassificationDataConfig
from attention_jax.systems.config import parse_config
from attention_jax.systems.glimpsing import data as digits
from attention_jax.systems.glimpsing.config import GlimpsingDataConfig
from attention_jax.training import digests, folder, writers
from experiments.config_files import check_config_arguments

CONFIG = Path(__file__).parent.parent / 'configs' / 'dates.py'
TIMEOUT = 20  # seconds of computation of a case
HANG = 300  # seconds after which a case that waits for something ends the process
MARKER = 'executed'  # a folder that code in hostile files would create


class _Payload:
  """Creates a folder when it is unpickled."""

  def __init__(self, path: str):
    self._path = path

  def __reduce__(self) -> tuple:
    return os.mkdir, (self._path,)


def _png(width: int, height: int, data: bytes = b'') -> bytes:
  """A PNG file whose header may state another size than that of its data."""

  def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))

  header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(data)) + chunk(b'IEND', b'')


def _picture(kind: str) -> bytes:
  from PIL import Image

  file = io.BytesIO()
  Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, kind)
  return file.getvalue()


def _npz(**arrays: np.ndarray) -> bytes:
  file = io.BytesIO()
  np.savez(file, **arrays)
  return file.getvalue()


def _zip_bomb() -> bytes:
  """An .npz whose header claims an array of 2^60 numbers."""
  header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,), }"
  header += b' ' * (117 - len(header)) + b'\n'
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as archive:
    archive.writestr('images.npy', b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header)
  return file.getvalue()


def _pickled(path: str) -> bytes:
  return _npz(images=np.array([_Payload(path)], dtype=object))


def _digits() -> bytes:
  pixels = np.zeros((4, 28, 28), np.uint8)
  labels = np.arange(4)
  return _npz(x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)


def _sentencepiece() -> bytes:
  return vocab.train('subword(size=20)', ['ab cd ef gh', 'ab ab cd'])._model


def _tables() -> list[bytes]:
  """A table as Arrow and as Parquet."""
  table = pyarrow.table({'de': ['a b', 'c'], 'en': ['A', 'C'], 'id': [1, 2]})
  arrow, parquet = io.BytesIO(), io.BytesIO()
  with pyarrow.ipc.new_stream(arrow, table.schema) as writer:
    writer.write_table(table)
  pyarrow.parquet.write_table(table, parquet)
  return [arrow.getvalue(), parquet.getvalue()]


# Hostile files and valid ones, from which hypothesis makes others by replacing, cutting and joining bytes.
CORPUS: Mapping[str, list[bytes]] = {
  'text': [
    b'a b\tA B\t0-0 1-1\nc\tC\n',
    b'',
    b'\n\n',
    b'\xef\xbb\xbfa\tb\r\n',
    b'\xff\xfe',
    b'\x00\t\x00\n',
    b'a\tb\t0-99999999999999999999\n',
    b'a\tb\t\xd9\xa1-0\n',
    b'a' * 100_000 + b'\tb\n',
    b'a\tb\n' * 5_000,
    '\u202e\u2028\x85\t\U0010ffff\n'.encode(),
    gzip.compress(b'a\tb\n'),
  ],
  'json': [
    b'{"text": "a b", "label": "x"}\n{"text": "c", "label": 1}\n',
    b'[' * 50_000,
    b'{"text": ' + b'[' * 20_000 + b'}',
    b'{"text": "\\ud800", "label": "x"}\n',
    b'{"text": NaN, "label": Infinity}\n',
    b'{"text": "a", "label": ' + b'9' * 6_000 + b'}\n',
    b'{"hypotheses": [{"text": "a", "log_prob": -1.5}]}\n',
    b'{"hypotheses": [{"text": "\\ud800", "log_prob": -' + b'9' * 400 + b'}], "sampled": 1}\n',
    b'null\n',
    b'{"step": 1e999}\n',
    b'{"step": 1}\n{"step": {}}\n',
    json.dumps({'kind': 'word', 'tokens': ['a', 'b']}).encode(),
    json.dumps({'kind': 'char', 'tokens': {'a': 1}}).encode(),
    json.dumps({'kind': 'word', 'tokens': [1, None, []]}).encode(),
    json.dumps({'../../etc/passwd': 'x', 'config.json': 3}).encode(),
  ],
  'image': [
    _picture('PNG'),
    _picture('JPEG'),
    _picture('GIF'),
    _picture('TIFF'),
    _png(60_000, 60_000),
    _png(2**31 - 1, 2**31 - 1),
    _png(8, 8, b'\x00' * 10_000_000),
    _png(0, 0),
    b'GIF89a',
    b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n',
    b'<svg xmlns="http://www.w3.org/2000/svg"/>',
  ],
  'arrays': [
    _digits(),
    _npz(a=np.zeros((2, 2, 3), np.float16)),
    _zip_bomb(),
    _pickled(MARKER),
    b'PK\x05\x06' + bytes(18),
    b'\x93NUMPY\x01\x00',
    _npz(x_train=np.full((2, 28, 28), np.nan), y_train=np.array([0, 2**40])),
  ],
  'vocabulary': [_sentencepiece(), b'', b'\n\x05\n\x01a', b'\xff' * 100],
  'tables': _tables(),
  'flags': [
    b'model.dropout=0.5\ntraining.steps=10\nmodel.attention.score=dot\n',
    *b'training.seed=-1 model.dropout=nan training.clip=1e999 evaluation.beams=1e9 seeds=999999999999'.split(),
    *b'mesh.fsdp=-7 training.steps.x=3 model = data.task=\xff\x00'.split(),
    b'training.steps=' + b'9' * 5_000,
    b'data.buckets=((1, 1), (2, 2))',
    b'data.buckets=' + b'(' * 3_000,
    b"data.buckets=__import__('os').mkdir('executed')",
    b'model.attention.score=additive(' + b'(' * 3_000,
    b'training.anneal=' + b'a: b;' * 3_000,
  ],
  'spec': [
    *b'softmax(temperature=0.5) general softmax(temperature=1e999) softmax(*[1]) softmax(**{}) \xff\x00 a;b'.split(),
    b'a(' * 3_000,
    b'(' * 3_000 + b')' * 3_000,
    b'softmax(temperature=' + b'9' * 5_000 + b')',
    b"softmax(temperature=__import__('os').mkdir('executed'))",
    b'local_p(width=-' + b'-' * 3_000 + b'1)',
    b'dates(seed=1' + b'+1' * 5_000 + b')',
  ],
}


@contextlib.contextmanager
def _user_error_of_one_line() -> Iterator[None]:
  """Suppresses a UserError after checking that it has one line of less than 5,000 characters."""
  try:
    yield
  except UserError as error:
    assert str(error).strip() and len(error.lines) == 1 and len(error.lines[0]) < 5_000


def _read_table(path: Path) -> None:
  task = f"tsv(train='{path.name}', validation='{path.name}')"
  tasks.load(tasks.TranslationDataConfig(task, str(path.parent), 'word', buckets=((4, 4), (64, 64))), None)


def _read_hugging_face(path: Path) -> None:
  task = f"huggingface(path='{path.name}', source='de', target='en')"
  tasks.load_corpora(tasks.TranslationDataConfig(task, str(path.parent)))


def _read_spec(path: Path) -> None:
  text = path.read_text('utf-8', errors='surrogateescape')
  for table, kind in ((SCORES, 'score'), (ALIGNMENTS, 'alignment')):
    with _user_error_of_one_line():
      specs.bind(text, {name: row.fn for name, row in table.items()}, kind)
  for parse in (specs.parse, vocab.parse_kind):
    with _user_error_of_one_line():
      parse(text)
  tasks.check(tasks.TranslationDataConfig(task=text, vocabulary=text, batch_unit=text, normalization=text))


def _read_flags(path: Path) -> None:
  """Reads each line as a flag --config.LINE, as programs do before they read any data."""
  lines = path.read_text('utf-8', errors='surrogateescape').splitlines()
  arguments = [f'--config={CONFIG}', *(f'--config.{line}' for line in lines)]
  check_config_arguments(arguments)
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  try:
    values(['train', *arguments])
  except flags.Error as error:
    raise UserError(str(error)) from error
  experiment.check_config(parse_config(values.config))


def _read_captions(path: Path) -> None:
  (path.parent / 'images').mkdir(exist_ok=True)
  pictures.load_pictures(CaptioningDataConfig('captions', str(path.parent)))


def _read_metrics(path: Path) -> None:
  writers.read_metrics(path.parent.parent)


def _read_links(path: Path) -> None:
  for line in read_lines(str(path)):
    parse_pharaoh(line, str(path), (4, 4), 'word')


def _stored(kind: str) -> Callable[[Path], Any]:
  return lambda path: vocab.load_stored(kind, str(path.parent), 'source')


def _trained(kind: str) -> Callable[[Path], Any]:
  return lambda path: vocab.train(f'{kind}(path={str(path)!r})', [])


def _read_documents(path: Path) -> None:
  documents.load_documents(ClassificationDataConfig(f"jsonl(train='{path.name}')", str(path.parent)))


def _read_digits(path: Path) -> None:
  digits.load_digit_splits(GlimpsingDataConfig(f"npz(path='{path.name}')", str(path.parent)))


# name -> the kinds of its files in CORPUS, the name of the file, and the function that reads it.
READERS: Mapping[str, tuple[tuple[str, ...], str, Callable[[Path], Any]]] = {
  'lines': (('text', 'arrays'), 'a.txt', lambda path: read_lines(str(path))),
  'gzip': (('text',), 'a.txt.gz', lambda path: read_lines(str(path))),
  'tsv': (('text',), 'a.tsv', _read_table),
  'links': (('text',), 'a.txt', _read_links),
  'jsonl': (('json', 'text'), 'a.jsonl', _read_documents),
  'hypotheses': (('json', 'text'), 'a.jsonl', lambda path: read_candidates(str(path))),
  'image': (('image',), 'a.png', lambda path: images.read_image(str(path), 4)),
  'captions': (('text', 'json'), 'captions.csv', _read_captions),
  'npz': (('arrays',), 'a.npz', lambda path: read_arrays(str(path))),
  'digits': (('arrays',), 'mnist.npz', _read_digits),
  'word vocabulary': (('json', 'text'), 'vocabulary.source.json', _stored('word')),
  'subword vocabulary': (('vocabulary',), 'vocabulary.source.model', _stored('subword')),
  'sentencepiece vocabulary': (('vocabulary', 'json'), 'a.model', _trained('sentencepiece')),
  'tokenizer vocabulary': (('json', 'text'), 'tokenizer.json', _trained('tokenizer')),
  'stored vocabulary': (('json', 'text'), 'vocabulary.source.sentencepiece.json', _stored("sentencepiece(path='')")),
  'parquet': (('tables', 'text'), 'a.parquet', _read_hugging_face),
  'arrow': (('tables', 'text'), 'a.arrow', _read_hugging_face),
  'config': (('json',), folder.CONFIG, lambda path: folder.read_config(path.parent)),
  'digests': (('json',), digests.FILE_DIGESTS, lambda path: digests.check_file_digests(path.parent)),
  'metrics': (('json',), 'metrics/0000000000.jsonl', _read_metrics),
  'flags': (('flags',), 'flags', _read_flags),
  'spec': (('spec',), 'spec', _read_spec),
}


def hostile(kinds: tuple[str, ...]) -> st.SearchStrategy[bytes]:
  """Returns a strategy of files of some kinds: those of CORPUS, damaged ones, and random bytes."""
  whole = st.sampled_from([data for kind in kinds for data in CORPUS[kind]])

  def damage(data: bytes, start: float, length: int, inserted: bytes) -> bytes:
    position = int(start * len(data))
    return data[:position] + inserted + data[position + length :]

  damaged = st.builds(damage, whole, st.floats(0, 1), st.integers(0, 9), st.binary(max_size=9))
  cut = st.builds(lambda data, share: data[: int(share * len(data))], whole, st.floats(0, 1))
  return st.one_of(whole, damaged, damaged, cut, st.binary(max_size=200), st.builds(bytes.__add__, damaged, whole))


@contextlib.contextmanager
def _time_limit(name: str) -> Iterator[None]:
  def fail(*_: Any) -> None:
    raise TimeoutError(f'{name}: did not end within {TIMEOUT} s')

  previous = signal.signal(signal.SIGPROF, fail)
  faulthandler.dump_traceback_later(HANG, exit=True)
  signal.setitimer(signal.ITIMER_PROF, TIMEOUT)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGPROF, previous)


def check_case(name: str, data: bytes) -> None:
  """Reads one hostile file with a row of READERS."""
  _, file_name, read = READERS[name]
  with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary), _time_limit(name):
    path = Path(temporary) / file_name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with _user_error_of_one_line():
      read(path)
    assert path.read_bytes() == data, f'{name}: the file has changed'
    assert not Path(MARKER).exists(), f'{name}: code in the file ran'


def fuzz(name: str, cases: int, seed: int = 0) -> None:
  """Checks the files of CORPUS that one reader reads, and then a number of cases made from them."""
  kinds = READERS[name][0]
  settings = hypothesis.settings(
    max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
  )
  test = hypothesis.given(hostile(kinds))(lambda data: check_case(name, data))
  for kind in kinds:
    for data in CORPUS[kind]:
      check_case(name, data)
  hypothesis.seed(seed)(settings(test))()


def main(cases: int) -> None:
  share = -(-cases // len(READERS))
  for name in READERS:
    fuzz(name, share)
    print(f'{name}: {share} cases', flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
