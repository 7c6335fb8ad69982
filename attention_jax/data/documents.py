"""Documents with a label, or pairs of texts with one: readers, and every row still knows the line it came from."""

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attention_jax.data import sentences
from attention_jax.data.files import read_lines
from attention_jax.data.tfds_sets import open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose
from attention_jax.specs import bind

SURROGATE = re.compile('[\ud800-\udfff]')
SPLITS = ('train', 'validation', 'test', 'unseen')


class Documents(NamedTuple):
  """One split.

  Attributes:
    sentences: of each document, lines of tokens with single spaces between them; of a pair of texts, one line for each.
    labels: one each.
    name: where they come from, for messages.
    lines: the number of the line, or of the row, of each there.
    pairs: whether each is a pair of texts.
  """

  sentences: list[list[str]]
  labels: list[str]
  name: str
  lines: Sequence[int]
  pairs: bool = False

  def location(self, row: int) -> str:
    """A row's place, for messages."""
    return f'{self.name}:{self.lines[row]}'


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
) -> dict[str, Documents]:
  """Files with one JSON object a line, plain or .gz.

  Args:
    text: the field with the text; the names of two for pairs of texts.
    label: the field with the label.
    language, html: see sentences.split.

  Raises: UserError naming the file and the line that is not as it should be.
  """
  fields = (text,) if isinstance(text, str) else tuple(text)
  if len(fields) not in (1, 2) or not all(isinstance(field, str) for field in (*fields, label)):
    raise UserError(f"task 'jsonl': text is the name of a field, or of two, got {text!r} and label={label!r}")
  given = zip(SPLITS, (train, validation, test, unseen), strict=True)
  paths = {split: os.path.join(folder, os.path.expanduser(path)) for split, path in given if path is not None}
  return {split: _read_jsonl(path, fields, label, language, html) for split, path in paths.items()}


def tfds(
  folder: str,
  *,
  name: str,
  text: str = 'text',
  label: str = 'label',
  validation: str | None = None,
  language: str = 'en',
  html: bool = False,
) -> dict[str, Documents]:
  """A tfds set with texts and class labels under `folder`, such as 'imdb_reviews' or 'yelp_polarity_reviews'.

  Args: validation, as for tfds_sets.tfds_split_parts.
  """
  builder = open_tfds_set(folder, name)
  for field in (text, label):
    choose(field, builder.info.features, f"feature of tfds set '{name}':")
  names = getattr(builder.info.features[label], 'names', None)
  found = {}
  for split, part in tfds_split_parts(builder, name, validation).items():
    rows = list(builder.as_data_source(split=part))
    texts = [[row[text].decode('utf-8')] for row in rows]
    labels = [str(names[int(row[label])] if names else row[label]) for row in rows]
    found[split] = _documents(texts, labels, f'{name} {part}', range(len(rows)), language, html)
  return found


def entailment(folder: str, *, seed: int = 0) -> dict[str, Documents]:
  """Pairs of sentences about the same scene: does the second follow from the first? Generated, nothing is stored."""
  from attention_jax.data.builders import entailment as builder

  found = {}
  for split in SPLITS:
    rows = list(builder.generate(split, seed))
    pairs, labels = [[row['premise'], row['hypothesis']] for row in rows], [row['label'] for row in rows]
    found[split] = Documents(pairs, labels, f'entailment {split}', range(len(rows)), pairs=True)
  return found


DOCUMENTS: Mapping[str, Callable[..., dict[str, Documents]]] = {'jsonl': jsonl, 'tfds': tfds, 'entailment': entailment}


def load_documents(config: Mapping[str, Any]) -> dict[str, Documents]:
  """The splits of the task that `config['task']` names, from `config['folder']`; 'train' is always among them.

  Raises: UserError for whatever is wrong, and for labels of other splits that no training document has.
  """
  _, row, options = bind(config['task'], DOCUMENTS, 'task')
  splits = row(os.path.expanduser(config['folder'] or ''), **options)
  labels = set(splits['train'].labels)
  if len(labels) < 2:
    raise UserError(f'{splits["train"].name}: every label is {min(labels)!r}; possible: two labels or more')
  for split in splits.values():
    for row, label in enumerate(split.labels):
      if label not in labels:
        raise UserError(f'{split.location(row)}: label {label!r} is unknown; in training: {", ".join(sorted(labels))}')
  return splits


def parse_documents(
  lines: Sequence[str], name: str, config: Mapping[str, Any], *, pairs: bool, label: str, first: int = 1
) -> Documents:
  """Texts, or pairs of texts with a tab between them, that somebody gives, one a line, read as those of the task.

  Args: name and first, what errors call them and the first line; label, which all are said to have.
  Raises: UserError for an empty text, and for what is not a pair.
  """
  _, _, options = bind(config['task'], DOCUMENTS, 'task')
  texts = [line.split('\t') if pairs else [line] for line in lines]
  for number, several in enumerate(texts, first):
    if len(several) != 1 + pairs:
      raise UserError(f'{name}:{number}: {len(several)} texts; possible: two, with a tab between them')
  how = options.get('language', 'en'), options.get('html', False)
  return _documents(texts, [label] * len(texts), name, range(first, first + len(texts)), *how)


def _read_jsonl(path: str, fields: tuple[str, ...], label: str, language: str, html: bool) -> Documents:
  texts, labels = [], []
  for number, line in enumerate(read_lines(path), 1):
    row = _row(line, f'{path}:{number}')
    for field in (*fields, label):
      if field not in row:
        raise UserError(f"{path}:{number}: no field '{field}'; it has: {', '.join(row)}")
    texts.append([row[field] for field in fields])
    if wrong := [field for field in fields if not isinstance(row[field], str)]:
      raise UserError(f'{path}:{number}: {wrong[0]} is no text but {row[wrong[0]]!r}')
    if any(SURROGATE.search(row[field]) for field in fields):
      raise UserError(f'{path}:{number}: half of a surrogate pair, which is no character; possible: whole pairs')
    if not isinstance(row[label], str | int) or isinstance(row[label], bool) or row[label] == '':
      raise UserError(f'{path}:{number}: {label} is {row[label]!r}; possible: a text or a whole number')
    labels.append(str(row[label]))
  return _documents(texts, labels, path, range(1, len(texts) + 1), language, html)


def _row(line: str, where: str) -> dict[str, Any]:
  if not line.strip():
    raise UserError(f'{where}: a blank line; a JSON object is expected in each')
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where}: no JSON ({error})') from None
  if not isinstance(row, dict):
    raise UserError(f'{where}: a JSON object is expected in each line, got {line[:40]!r}')
  return row


def _documents(
  texts: list[list[str]], labels: list[str], name: str, lines: Sequence[int], language: str, html: bool
) -> Documents:
  """Split into sentences; of several texts, each is one."""
  several = bool(texts) and len(texts[0]) > 1
  split = functools.partial(sentences.split, language=language, whole=several, html=html)
  columns = [split(column) for column in zip(*texts, strict=True)]
  joined = [list(itertools.chain.from_iterable(parts)) for parts in zip(*columns, strict=True)]
  found = Documents(joined, labels, name, lines, several)
  for row, parts in enumerate(zip(*columns, strict=True)):
    if not all(parts):
      raise UserError(f'{found.location(row)}: the text is empty')
  return found
