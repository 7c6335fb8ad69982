"""Sets that tfds has prepared, opened without TensorFlow."""

import re
from typing import Any

from attention_jax.errors import UserError, choose


def open_tfds_set(folder: str, name: str) -> Any:
  """The builder of a set that is prepared under `folder`. Raises: UserError where it is not, or not as array_record."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.registered import DatasetNotFoundError

  prepare = f"'tfds build {name} --file_format=array_record --data_dir={folder or '.'}'"
  try:
    # Only what lies in the folder is looked at: tfds.builder would also ask the network.
    builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=folder or '.')
    formats = {builder.info.file_format.value, *(f.value for f in builder.info.alternative_file_formats)}
    if 'array_record' not in formats:
      raise UserError(
        f"tfds set '{name}' in {builder.data_dir} is stored as {', '.join(sorted(formats))}, which only TensorFlow "
        f"reads; where it is installed, run 'python -m tensorflow_datasets.scripts.convert_format "
        f"--dataset_version_dir={builder.data_dir} --out_file_format=array_record'"
      )
    return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder or '.', file_format='array_record')
  except DatasetNotFoundError:
    raise UserError(f"tfds set '{name}' is not prepared in '{folder or '.'}'; run {prepare}") from None


def tfds_split_parts(builder: Any, name: str, validation: str | None) -> dict[str, str]:
  """{'train': 'train[:90%]', 'validation': 'train[90%:]', 'test': 'test'}: what tfds calls the splits, as far as there
  are any.

  Args: validation, what is validated on, by default the split of this name; it may be a part of the training split,
    such as 'train[90%:]' (then the rest of it is trained on).
  Raises: UserError where there is no training split, nothing is left of it, or no split that `validation` names.
  """
  there = builder.info.splits
  if 'train' not in there:
    raise UserError(f"tfds set '{name}' has no split 'train'; it has: {', '.join(there) or 'none'}")
  if validation:
    choose(validation.partition('[')[0], there, f"split of tfds set '{name}':")
  parts = {'train': _without(validation), 'validation': validation or 'validation', 'test': 'test'}
  return {split: part for split, part in parts.items() if part.partition('[')[0] in there}


def _without(part: str | None) -> str:
  """What is left of the training split beside a part of it: 'train[80%:90%]' -> 'train[:80%]+train[90%:]'."""
  if not part or not part.startswith('train'):
    return 'train'
  found = re.fullmatch(r'train\[(-?\d+%?)?:(-?\d+%?)?\]', part)
  first, end = found.groups() if found else (None, None)
  rest = [rest for rest in (first and f'train[:{first}]', end and f'train[{end}:]') if rest]
  if not rest:
    raise UserError(f"task 'tfds': validation={part!r} leaves nothing to train on; possible: 'train[90%:]', or a split")
  return '+'.join(rest)
