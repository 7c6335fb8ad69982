"""Readers of documents, or pairs of texts, with labels. Every document keeps the number of its line or row."""

import functools
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from attention_jax.data import hugging_face
from attention_jax.data.files import join_path, parse_object
from attention_jax.data.pair_streams import file_fingerprint, iter_lines
from attention_jax.data.prepared import IDS, TEXT, PreparedField, PreparedTable, Schema, open_prepared
from attention_jax.data.splits import SPLITS
from attention_jax.data.text import check_text
from attention_jax.data.tfds_sets import TfdsRows, decode_text, open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose
from attention_jax.specs import bind
from attention_jax.systems.classification import sentences
from attention_jax.systems.classification.config import ClassificationDataConfig

LABELS_FILE = 'labels.json'
TABLE = Schema({'ids': IDS, 'sentence_lengths': IDS, 'sentences': TEXT}, ('sentences', 'words', 'label', 'line'))
Row = tuple[list[str], str]  # the text of a document, or the two texts of a pair, and the label


class Documents(NamedTuple):
  """Labelled documents, such as those of one split.

  Attributes:
    sentences: the sentences of each document, or the two texts of a pair; each is a line of tokens with single spaces
      between them.
    labels: one label per document.
    name: where the documents come from, for messages.
    lines: for each document, the number of its line in the file, or of its row in the data set, for messages.
    pairs: whether each document is a pair of texts.
    prepared: the table of the documents, if they are on disk.
  """

  sentences: Sequence[list[str]]
  labels: list[str]
  name: str
  lines: Sequence[int]
  pairs: bool = False
  prepared: PreparedTable | None = None

  @property
  def texts(self) -> Iterator[str]:
    """The lines of tokens of all documents."""
    return itertools.chain.from_iterable(self.sentences)

  def location(self, row: int) -> str:
    """Returns `name:line` of a row, for messages."""
    return f'{self.name}:{self.lines[row]}'


class DocumentStream(NamedTuple):
  """The documents of one split, which are read one after the other.

  Attributes:
    name: where the documents come from, for messages.
    rows: each call yields (row, share of the data read so far), starting at the first one.
    pairs: whether each document is a pair of texts.
    fingerprint: detects that the data changed between two readings.
    first: the number of the first line or row.
    language, html: see sentences.split; language is None for texts that are lines of tokens.
  """

  name: str
  rows: Callable[[], Iterator[tuple[Row, float]]]
  pairs: bool
  fingerprint: list[Any]
  first: int = 0
  language: str | None = None
  html: bool = False

  def read(self) -> Documents:
    """Returns all documents."""
    return self.split([row for row, _ in self.rows()], self.first)

  def split(self, rows: Sequence[Row], first: int) -> Documents:
    """Returns rows as documents; `first` is the number of the first one."""
    texts = [row[0] for row in rows]
    labels = [row[1] for row in rows]
    lines = range(first, first + len(rows))
    if self.language is None:
      return Documents(texts, labels, self.name, lines, self.pairs)
    return _split_sentences(texts, labels, self.name, lines, self.language, self.html)


def jsonl(
  folder: str,
  *,
  train: str,
  validation: str | None = None,
  test: str | None = None,
  unseen: str | None = None,
  text: str | tuple[str, str] = 'text',
  label: str = 'label',
  language: str = 'en',
  html: bool = False,
) -> dict[str, DocumentStream]:
  """Files with one JSON object per line, plain or .gz.

  Args:
    folder: the folder that relative paths start from.
    train, validation, test, unseen: the file of each split.
    text: the field of the text, or two fields for pairs of texts.
    label: the field of the label.
    language, html: see sentences.split.

  Raises:
    UserError: if `text` is neither one field nor two, if a file cannot be read, or if a line is invalid; the message
      then names the file and the line.
  """
  fields = _field_names('jsonl', text, label)
  splits = {}
  for split, path in zip(SPLITS, (train, validation, test, unseen), strict=True):
    if path is not None:
      path = join_path(folder, path)
      rows = functools.partial(_read_jsonl, path, fields, label)
      fingerprint = [file_fingerprint(path)]
      splits[split] = DocumentStream(path, rows, len(fields) == 2, fingerprint, 1, language, html)
  return splits


def huggingface(
  folder: str,
  *,
  path: str,
  text: str | tuple[str, str] = 'text',
  label: str = 'label',
  language: str = 'en',
  html: bool = False,
) -> dict[str, DocumentStream]:
  """A data set of Hugging Face on a disk: what `save_to_disk` wrote, Parquet files, or JSON lines, plain or .gz.

  A test split without labels, stored as -1, is left out.

  Args:
    folder: the folder that `path` starts from.
    path: a file, or a folder with the files of all splits, see hugging_face.split_files.
    text: the column of the text, or two columns for pairs of texts.
    label: the column of the label.
    language, html: see sentences.split.

  Raises:
    UserError: if `text` is neither one column nor two, as `split_files` and `iter_rows` of hugging_face do, and for
      rows whose texts or labels are invalid; the message then names the file and the row.
  """
  fields = _field_names('huggingface', text, label)
  path = join_path(folder, path)
  splits = {}
  for split, files in hugging_face.split_files(path).items():
    if split == 'test' and all(row.values == (None,) for row in hugging_face.iter_rows(files, [label])):
      continue
    rows = functools.partial(_read_hugging_face, files, fields, label)
    fingerprint = [file_fingerprint(file) for file in files]
    splits[split] = DocumentStream(f'{path} {split}', rows, len(fields) == 2, fingerprint, 1, language, html)
  return splits


def _field_names(task: str, text: str | tuple[str, str], label: str) -> tuple[str, ...]:
  fields = (text,) if isinstance(text, str) else tuple(text)
  if len(fields) not in (1, 2) or not all(isinstance(field, str) for field in (*fields, label)):
    raise UserError(
      f'task {task!r}: expected one or two field names in text and one field name in label, '
      f'got text={text!r} and label={label!r}'
    )
  return fields


def tfds(
  folder: str,
  *,
  name: str,
  text: str = 'text',
  label: str = 'label',
  validation: str | None = None,
  language: str = 'en',
  html: bool = False,
) -> dict[str, DocumentStream]:
  """A tfds set with texts and labels, such as 'imdb_reviews' or 'yelp_polarity_reviews'.

  A test split without labels, such as that of 'glue/sst2', is left out; tfds stores missing labels as -1.

  Args:
    folder: the folder of tfds data sets.
    name: the name of the data set.
    text: the feature of the text.
    label: the feature of the label.
    validation: see tfds_sets.tfds_split_parts.
    language, html: see sentences.split.

  Raises:
    UserError: for a data set that is not prepared or lacks one of the features; and for a row whose text is empty, not
      a string or not UTF-8, or whose label is missing, if the label has class names. The message then names the row.
  """
  builder = open_tfds_set(folder, name)
  for field in (text, label):
    choose(field, builder.info.features, f"feature of tfds set '{name}':")
  label_names = getattr(builder.info.features[label], 'names', None)
  splits = {}
  for split, part in tfds_split_parts(builder, name, validation).items():
    rows = TfdsRows(builder, part)
    if split == 'test' and label_names and all(row[label] < 0 for row in rows):
      continue
    where = f'{name} {part}'
    read = functools.partial(_read_tfds, rows, where, text, label, label_names)
    splits[split] = DocumentStream(where, read, False, [where, len(rows)], language=language, html=html)
  return splits


def _read_tfds(
  rows: TfdsRows, name: str, text: str, label: str, label_names: Sequence[str] | None
) -> Iterator[tuple[Row, float]]:
  for number, row in enumerate(rows):
    where = f'{name}:{number}'
    texts = [decode_text(row[text], text, where)]
    yield (texts, _tfds_label(row[label], label_names, label, where)), (number + 1) / len(rows)


def _tfds_label(value: Any, names: Sequence[str] | None, feature: str, where: str) -> str:
  """The label of a row of tfds, or the name of its class. Raises UserError for a missing class or invalid UTF-8."""
  if isinstance(value, bytes):
    return decode_text(value, feature, where)
  if names and value < 0:
    raise UserError(f'{where}: {feature} is missing (class {value})')
  return names[value] if names else str(value)


def entailment(folder: str, *, seed: int = 0) -> dict[str, DocumentStream]:
  """Generated pairs of sentences about a scene; labels: entailment, neutral, contradiction."""
  from attention_jax.systems.classification import entailment as builder

  def generate(split: str) -> Iterator[tuple[Row, float]]:
    for row in builder.generate(split, seed):
      yield ([row['premise'], row['hypothesis']], row['label']), 1.0

  return {
    split: DocumentStream(f'entailment {split}', functools.partial(generate, split), True, [split]) for split in SPLITS
  }


def prepared(folder: str, *, copy: bool = True) -> dict[str, Documents]:
  """A data set that `experiments.prepare` wrote to `folder`: its training split stays on disk.

  Args:
    folder: the data set, on a disk or behind a URL.
    copy: see prepared.open_prepared.
  """
  with open_prepared(folder, copy, 'classification') as (path, manifest):
    table = PreparedTable(path, manifest, 'train', TABLE)
    names = read_labels(path)
    labels = [names[label] for label in table.column('label')]
    sentences = PreparedField(table, 'sentences', lambda text: text.split('\n'))
    train = Documents(sentences, labels, manifest['name'], table.column('line'), manifest['pairs'], table)
    return {'train': train} | {name: _read_split(path / f'{name}.json') for name in manifest['splits']}


def documents_as_json(documents: Documents) -> str:
  """Returns documents in memory as JSON."""
  return json.dumps(documents._replace(lines=list(documents.lines))._asdict(), ensure_ascii=False)


def _read_split(path: epath.PathLike) -> Documents:
  """Reads a file with the JSON of `documents_as_json`."""
  try:
    return Documents(**json.loads(epath.Path(path).read_text()))
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f'{path}: not a split of a prepared data set ({" ".join(str(error).split())})') from error


def read_labels(folder: epath.PathLike) -> list[str]:
  """Reads the labels of a run or of a prepared data set."""
  path = epath.Path(folder) / LABELS_FILE
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: cannot be read ({error}); expected the folder of a training run') from error


DOCUMENTS: Mapping[str, Callable[..., Mapping[str, DocumentStream | Documents]]] = {
  'jsonl': jsonl,
  'tfds': tfds,
  'huggingface': huggingface,
  'entailment': entailment,
  'prepared': prepared,
}


def open_documents(config: ClassificationDataConfig) -> Mapping[str, DocumentStream | Documents]:
  """Returns the splits of the task `config.task` from `config.folder`; those of a prepared data set are Documents.

  Raises:
    UserError: for a mistake in the config or the files.
  """
  _, read, options = bind(config.task, DOCUMENTS, 'task')
  return read(os.path.expanduser(config.folder or ''), **options)


def load_documents(config: ClassificationDataConfig) -> dict[str, Documents]:
  """Returns the splits of the task `config.task` from `config.folder`; 'train' is always among them.

  Raises:
    UserError: for a mistake in the config or the files, for training documents that all have the same label, and for
      labels that no training document has.
  """
  streams = open_documents(config)
  splits = {name: split if isinstance(split, Documents) else split.read() for name, split in streams.items()}
  labels = set(splits['train'].labels)
  check_labels(labels, splits['train'].name)
  for split in splits.values():
    for row, label in enumerate(split.labels):
      if label not in labels:
        expected = f'expected one of the training labels: {", ".join(sorted(labels))}'
        raise UserError(f'{split.location(row)}: unknown label {label!r}; {expected}')
  return splits


def check_labels(labels: Collection[str], name: str) -> None:
  """Raises UserError if the training documents `name` have only one label."""
  if len(labels) < 2:
    raise UserError(f'{name}: expected at least two labels, but every label is {min(labels)!r}')


def parse_documents(
  lines: Sequence[str], name: str, config: ClassificationDataConfig, *, label: str, first: int = 1
) -> Documents:
  """Returns lines of text as documents, with the options of the task.

  Args:
    lines: one text each, or, if the task has pairs of texts, two with a tab between them.
    name: the name of the input in errors.
    config: the config of the data, of which `task` is read.
    label: the label of every document.
    first: the number of the first line in errors.

  Raises:
    UserError: for an empty text, and for a line that is not a pair.
  """
  _, read, options = bind(config.task, DOCUMENTS, 'task')
  if read is prepared:  # new texts are split like those that it was prepared from
    with open_prepared(os.path.expanduser(config.folder or ''), True, 'classification') as (_, manifest):
      _, read, options = bind(manifest['task'], DOCUMENTS, 'task')
  pairs = read is entailment or not isinstance(options.get('text', ''), str)
  texts = [line.split('\t') if pairs else [line] for line in lines]
  for number, line_texts in enumerate(texts, first):
    if len(line_texts) != 1 + pairs:
      raise UserError(f'{name}:{number}: expected two texts with a tab between them, got {len(line_texts)}')
  numbers = range(first, first + len(texts))
  language = options.get('language', 'en')
  return _split_sentences(texts, [label] * len(texts), name, numbers, language, options.get('html', False))


def _read_jsonl(path: str, fields: tuple[str, ...], label: str) -> Iterator[tuple[Row, float]]:
  for number, (line, share) in enumerate(iter_lines(path), 1):
    where = f'{path}:{number}'
    row = parse_object(line, where)
    for field in (*fields, label):
      if field not in row:
        raise UserError(f"{where}: no field '{field}'; it has: {', '.join(row) or 'none'}")
    yield _check_row([row[field] for field in fields], row[label], fields, label, where), share


def _read_hugging_face(files: Sequence[str], fields: tuple[str, ...], label: str) -> Iterator[tuple[Row, float]]:
  for (*texts, value), where, share in hugging_face.iter_rows(files, (*fields, label)):
    yield _check_row(texts, value, fields, label, where), share


def _check_row(texts: list[Any], value: Any, fields: tuple[str, ...], label: str, where: str) -> Row:
  """A row of texts and the value of its label. Raises UserError, which names a field, for anything else."""
  for field, text in zip(fields, texts, strict=True):
    check_text(text, field, where)
  if not isinstance(value, str | int) or isinstance(value, bool) or value == '':
    raise UserError(f'{where}: {label} must be a non-empty string or a whole number, got {value!r}')
  check_text(str(value), label, where)
  return texts, str(value)


def _split_sentences(
  texts: list[list[str]], labels: list[str], name: str, lines: Sequence[int], language: str, html: bool
) -> Documents:
  """Documents of one text, split into sentences, or of several texts, each kept as one sentence."""
  pairs = bool(texts) and len(texts[0]) > 1
  split = functools.partial(sentences.split, language=language, whole=pairs, html=html)
  columns = [split(column) for column in zip(*texts, strict=True)]
  rows = list(zip(*columns, strict=True))
  documents = Documents([list(itertools.chain.from_iterable(row)) for row in rows], labels, name, lines, pairs)
  for i, row in enumerate(rows):
    if not all(row):
      raise UserError(f'{documents.location(i)}: the text is empty')
  return documents
