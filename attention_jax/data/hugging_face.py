"""Data sets of Hugging Face on a disk: Arrow files of `save_to_disk`, Parquet files, JSON lines; read with pyarrow."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from attention_jax.data.files import check_regular_file, open_file, parse_object, read_lines, report_read_errors
from attention_jax.data.splits import SPLITS
from attention_jax.data.text import Corpus, check_text, from_texts
from attention_jax.errors import UserError

_NESTED = 'translation'  # the column that holds the languages of data sets of translations
# What names of files and folders call the splits.
_SPLIT_WORDS = {
  'train': 'train',
  'training': 'train',
  'validation': 'validation',
  'valid': 'validation',
  'val': 'validation',
  'dev': 'validation',
  'test': 'test',
  'testing': 'test',
  'unseen': 'unseen',
}


class DataRow(NamedTuple):
  """A row of a data set on a disk.

  Attributes:
    values: the values of the columns that were asked for.
    where: `file:row`, for errors.
    share: the share of the files read so far.
  """

  values: tuple[Any, ...]
  where: str
  share: float


def split_files(path: str) -> dict[str, list[str]]:
  """Returns the files of each split, in the order of their names.

  The split of a file is the first of 'train', 'validation' ('valid', 'val', 'dev'), 'test' and 'unseen' that is a word
  of its name, or of the name of its folder: `train-00000-of-00002.parquet`, `train/data-00000-of-00001.arrow`. If no
  file has a split, all are 'train'; otherwise those without one are left out.

  Args:
    path: a file, or a folder whose folders are read as well.

  Raises:
    UserError: if there is no such file or folder, no file to read, or no file of the split 'train'.
  """
  path = os.path.expanduser(path)
  if os.path.isdir(path):
    names = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    # datasets stores results of `map` and the like beside the data.
    files = sorted(name for name in names if _suffix(name) and not os.path.basename(name).startswith('cache-'))
  else:
    with report_read_errors(path):
      check_regular_file(path)
    files = [path] if _suffix(path) else []
  if not files:
    raise UserError(f'{path}: no data; expected files with the suffix {", ".join(_READERS)}')
  split_of = {file: _split_of(os.path.relpath(file, path)) for file in files}
  if not any(split_of.values()):
    return {'train': files}
  splits = {split: [file for file in files if split_of[file] == split] for split in SPLITS}
  if not splits['train']:
    found = ', '.join(sorted({split for split in split_of.values() if split}))
    raise UserError(f'{path}: no file of the split train, only of {found}')
  return {split: files for split, files in splits.items() if files}


def iter_rows(files: Sequence[str], columns: Collection[str]) -> Iterator[DataRow]:
  """Yields the rows of files.

  The class of a ClassLabel is its name, None if it is missing.

  Args:
    files: the files of a split.
    columns: names of columns, or of fields of the column 'translation'.

  Raises:
    UserError: for a file that cannot be read, is damaged or lacks one of the columns.
  """
  for number, file in enumerate(files):
    for row, (fields, share) in enumerate(_READERS[_suffix(file)](file, columns), 1):
      where = f'{file}:{row}'
      nested = fields.get(_NESTED)
      fields = {**(nested if isinstance(nested, dict) else {}), **fields}
      if missing := [column for column in columns if column not in fields]:
        raise UserError(f"{where}: no column '{missing[0]}'; it has: {', '.join(fields) or 'none'}")
      yield DataRow(tuple(fields[column] for column in columns), where, (number + share) / len(files))


def iter_text_pairs(files: Sequence[str], source: str, target: str) -> Iterator[tuple[tuple[str, str], float]]:
  """Yields the texts of two columns, and the share of the files read so far.

  Args:
    files: the files of a split.
    source, target: the columns.

  Raises:
    UserError: as `iter_rows` does, and for a value that is no text.
  """
  for values, where, share in iter_rows(files, (source, target)):
    yield (check_text(values[0], source, where), check_text(values[1], target, where)), share


def read(path: str, splits: Mapping[str, Sequence[str]], source: str, target: str) -> dict[str, Corpus]:
  """Returns the pairs of two columns by split.

  Args:
    path: the data set, for messages.
    splits: the files of each split.
    source, target: the columns.

  Raises:
    UserError: as `iter_text_pairs` and `from_texts` do.
  """
  return {
    split: from_texts((pair for pair, _ in iter_text_pairs(files, source, target)), f'{path} {split}')
    for split, files in splits.items()
  }


def _suffix(path: str) -> str:
  return next((suffix for suffix in _READERS if path.endswith(suffix)), '')


def _split_of(path: str) -> str:
  """The split that a relative path names; '' if it names none."""
  for part in reversed(path.split(os.sep)):
    for word in re.split('[^a-z]+', part.lower()):
      if word in _SPLIT_WORDS:
        return _SPLIT_WORDS[word]
  return ''


def _read_jsonl(path: str, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], float]]:
  lines = read_lines(path)
  for number, line in enumerate(lines, 1):
    yield parse_object(line, f'{path}:{number}'), number / len(lines)


def _read_table(open_table: Callable[[Any], Any]) -> Callable[..., Iterator[tuple[dict[str, Any], float]]]:
  """Returns a reader of a file that `open_table` opens as a table of pyarrow."""

  def read(path: str, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], float]]:
    import pyarrow

    with report_read_errors(path), open_file(path) as file:
      try:
        table = open_table(file)
        table.validate(full=True)  # texts are UTF-8, and no offset leads out of the file
        info = json.loads((table.schema.metadata or {}).get(b'huggingface', b'{}')).get('info', {})
      except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f'{path}: damaged, or not {_suffix(path)} ({" ".join(str(error).split())})') from None
    names = [name for name in table.column_names if name in (*columns, _NESTED)] or table.column_names
    features = info.get('features', {})
    classes = {name: features[name]['names'] for name in names if features.get(name, {}).get('_type') == 'ClassLabel'}
    number = 0
    for batch in table.select(names).to_batches():
      for row in batch.to_pylist():
        for name, labels in classes.items():
          row[name] = labels[row[name]] if row[name] in range(len(labels)) else None
        number += 1
        yield row, number / table.num_rows

  return read


def _open_arrow(file: Any) -> Any:
  import pyarrow

  return pyarrow.ipc.open_stream(file).read_all()


def _open_parquet(file: Any) -> Any:
  import pyarrow.parquet

  return pyarrow.parquet.read_table(file)


_READERS: Mapping[str, Callable[[str, Collection[str]], Iterator[tuple[dict[str, Any], float]]]] = {
  '.arrow': _read_table(_open_arrow),
  '.parquet': _read_table(_open_parquet),
  '.jsonl': _read_jsonl,
  '.jsonl.gz': _read_jsonl,
}
