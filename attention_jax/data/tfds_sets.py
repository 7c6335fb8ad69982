"""Prepared tfds data sets, opened without TensorFlow."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from attention_jax.data.url_folders import local_copy
from attention_jax.errors import UserError, choose


def open_tfds_set(folder: str, name: str) -> Any:
  """Returns the builder of a data set that is prepared under `folder`.

  Args:
    folder: a folder of tfds, or its URL, from which the data set is copied to the cache.
    name: name of the data set, with its config and version if it has several: 'wmt14_translate/de-en:1.0.0'.

  Raises:
    UserError: for a name that tfds cannot parse or that is a path, and for a data set that is not prepared there, is
      damaged, or is not stored as array_record.
  """
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.registered import DatasetNotFoundError

  folder = folder or '.'
  with report_damage(f"tfds set '{name}' in '{folder}'"):
    try:
      if '..' in name.split('/') or name.startswith(('/', '~')):
        raise UserError(f"tfds set '{name}' must be a name such as 'wmt14_translate/de-en', got a path")
      _check_name(name)
      folder = local_copy(folder, name.partition(':')[0])
      # Reads the folder only: tfds.builder would also use the network.
      builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=folder)
      formats = {builder.info.file_format.value, *(f.value for f in builder.info.alternative_file_formats)}
      if 'array_record' not in formats:
        raise UserError(
          f"tfds set '{name}' in {builder.data_dir} is stored as {', '.join(sorted(formats))}, which only TensorFlow "
          f"reads; where it is installed, run 'python -m tensorflow_datasets.scripts.convert_format "
          f"--dataset_version_dir={builder.data_dir} --out_file_format=array_record'"
        )
      return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder, file_format='array_record')
    except DatasetNotFoundError:
      command = f"'tfds build {name} --file_format=array_record --data_dir={folder}'"
      raise UserError(f"tfds set '{name}' is not prepared in '{folder}'; run {command}") from None


class TfdsRows:
  """The rows of a split, or of a part of one, which are read when they are used.

  Raises UserError for files that are missing or damaged.
  """

  def __init__(self, builder: Any, part: str):
    """Opens the files; for the arguments see open_tfds_set and tfds_split_parts."""
    self._name = f"tfds set '{builder.info.full_name}' in '{builder.data_dir}', split '{part}'"
    with report_damage(self._name):
      self._rows = builder.as_data_source(split=part)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> dict[str, Any]:
    with report_damage(self._name):
      return self._rows[row]

  def __iter__(self) -> Iterator[dict[str, Any]]:
    return (self[row] for row in range(len(self)))


@contextlib.contextmanager
def report_damage(name: str, remedy: str = '') -> Iterator[None]:
  """Raises UserError in place of every Exception of its block, other than UserError and MemoryError.

  The exceptions that libraries raise for missing and damaged files are of many types.

  Args:
    name: what is read, for the message.
    remedy: the end of the message.
  """
  try:
    yield
  except (UserError, MemoryError):
    raise
  except Exception as error:
    raise UserError(f'{name} cannot be read ({" ".join(str(error).split())}){remedy}') from error


def tfds_split_parts(builder: Any, name: str, validation: str | None) -> dict[str, str]:
  """Returns the tfds name of each split with examples: {'train': 'train[:90%]', 'validation': 'train[90%:]', ...}.

  Args:
    builder: the builder of the data set.
    name: the name of the data set, for errors.
    validation: the tfds name of the validation split, by default 'validation'. It may be one part of the training
      split, such as 'train[90%:]'; the training split is then the remainder.

  Raises:
    UserError: if there is no training split, if it has no examples outside of `validation`, or if `validation` names
      no split, a part without examples, or several parts of 'train'.
  """
  existing = builder.info.splits
  if 'train' not in existing:
    raise UserError(f"tfds set '{name}' has no split 'train'; it has: {', '.join(existing) or 'none'}")
  if validation:
    choose(validation.partition('[')[0], existing, f"split of tfds set '{name}':")
  train = _train_without(validation)
  if validation and min(_count_examples(existing, train), _count_examples(existing, validation)) < 1:
    raise UserError(
      f"tfds set '{name}': validation must have examples, and be a split other than 'train' or one part of 'train' "
      f"that leaves training examples, such as 'train[90%:]'; got {validation!r}; split 'train' has "
      f'{_count_examples(existing, "train")} examples'
    )
  if not _count_examples(existing, train):
    raise UserError(f"tfds set '{name}': split 'train' has no examples")
  parts = {'train': train, 'validation': validation or 'validation', 'test': 'test'}
  return {
    split: part
    for split, part in parts.items()
    if part.partition('[')[0] in existing and _count_examples(existing, part)
  }


def decode_text(value: Any, feature: str, where: str) -> str:
  """Returns the text of a feature, which tfds stores as bytes.

  Args:
    value: the value of the feature.
    feature: its name, for the error.
    where: the row, for the error.

  Raises:
    UserError: for anything but bytes in UTF-8.
  """
  try:
    return value.decode('utf-8')
  except (AttributeError, UnicodeDecodeError):
    raise UserError(f'{where}: {feature} must be a text in UTF-8, got {value!r}') from None


def _check_name(name: str) -> None:
  """Raises UserError for a name that tfds cannot parse."""
  import tensorflow_datasets as tfds

  try:
    tfds.core.naming.parse_builder_name_kwargs(name)
  except ValueError:
    raise UserError(f"tfds set '{name}' must be a name such as 'wmt14_translate/de-en'") from None


def _train_without(part: str | None) -> str:
  """Returns the training split without a part: 'train[80%:90%]' -> 'train[:80%]+train[90%:]'.

  Returns '' if the part is all of 'train', or not a single range of it.
  """
  if not part or part.partition('[')[0] != 'train':
    return 'train'
  remainder = []
  match = re.fullmatch(r'train\[(-?\d+%?)?:(-?\d+%?)?\]', part)
  if match and match[1]:
    remainder.append(f'train[:{match[1]}]')
  if match and match[2]:
    remainder.append(f'train[{match[2]}:]')
  return '+'.join(remainder)


def _count_examples(splits: Any, part: str) -> int:
  """Returns the number of examples of a split, or of parts of one; 0 for parts that tfds cannot read."""
  try:
    return splits[part].num_examples if part else 0
  except ValueError:
    return 0
