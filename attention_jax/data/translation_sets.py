"""Translation data sets in tfds format (`wmt14_translate/de-en` and the like), read without TensorFlow."""

from collections.abc import Mapping
from typing import Any

from attention_jax.data.text import Corpus, from_texts
from attention_jax.data.tfds_sets import TfdsRows, decode_text, open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose


def read(
  folder: str, name: str, source: str | None, target: str | None, without_train: bool = False
) -> dict[str, Corpus]:
  """Reads the splits of a data set.

  Args:
    folder: the folder of tfds data sets.
    name: the name of the data set.
    source, target: the languages; None for both reads them from the name.
    without_train: whether the training split is left out.

  Returns:
    A corpus for each of 'train', 'validation' and 'test' that has examples.

  Raises:
    UserError: as `open_tfds_set` and `from_texts` do, for a data set without training examples, unless `source` and
      `target` are two of its languages, and for a text that is not UTF-8 or a feature that is no text.
  """
  builder = open_tfds_set(folder, name)
  source, target = _choose_languages(name, source, target, sorted(builder.info.features))
  parts = tfds_split_parts(builder, name, None)
  if without_train:
    del parts['train']
  return {split: _read_split(builder, part, source, target) for split, part in parts.items()}


class TrainingPairs:
  """The training split of a data set, read when its pairs are used: texts, which may have line breaks.

  Raises UserError as `read` does.
  """

  def __init__(self, folder: str, name: str, source: str | None, target: str | None):
    builder = open_tfds_set(folder, name)
    self._languages = _choose_languages(name, source, target, sorted(builder.info.features))
    self._rows = TfdsRows(builder, tfds_split_parts(builder, name, None)['train'])
    self.name = f'{builder.info.full_name} train'

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> tuple[str, str]:
    return _texts(self._rows[row], self._languages, f'{self.name}:{row}')


def _choose_languages(name: str, source: str | None, target: str | None, languages: list[str]) -> tuple[str, str]:
  """The languages, read from the name of the data set by default. Raises UserError for those that it does not have."""
  if source is None and target is None:
    source, _, target = name.partition(':')[0].rpartition('/')[2].partition('-')
  expected = f'expected two of: {", ".join(languages)}'
  if source is None or target is None:
    raise UserError(f"tfds set '{name}': source and target must be set together, or neither; {expected}")
  for language in (source, target):
    choose(language, languages, f"language of tfds set '{name}':")
  if source == target:
    raise UserError(f"tfds set '{name}': source and target are both '{source}'; {expected}")
  return source, target


def _read_split(builder: Any, split: str, source: str, target: str) -> Corpus:
  name = f'{builder.info.full_name} {split}'
  rows = enumerate(TfdsRows(builder, split))
  return from_texts((_texts(example, (source, target), f'{name}:{row}') for row, example in rows), name)


def _texts(example: Mapping[str, Any], languages: tuple[str, str], where: str) -> tuple[str, str]:
  source, target = (decode_text(example[language], language, where) for language in languages)
  return source, target
