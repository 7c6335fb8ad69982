"""Data sets in tfds format, and other helpers of the tests of readers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow_datasets as tfds
from hypothesis import strategies as st

from attention_jax.errors import UserError


def write_tfds_set(
  folder: Path, features: Callable[[Any], Any], splits: Mapping[str, Sequence[Mapping]], name: str
) -> Path:
  """Writes the data set 'tiny/NAME'.

  Args:
    folder: the folder of tfds data sets.
    features: maps the module tfds to the features of a row.
    splits: the rows of each split.
    name: the name of the builder config.

  Returns:
    `folder`.
  """
  with tfds.core.registered.skip_registration():  # another test may register the same name

    class Tiny(tfds.core.GeneratorBasedBuilder):
      __module__ = 'tiny'  # not in a package, where tfds would search for more files
      VERSION = tfds.core.Version('1.0.0')
      BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name)]  # noqa: RUF012 required by tfds

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=features(tfds))

      def _split_generators(self, _):
        return {split: self._generate_examples(rows) for split, rows in splits.items()}

      def _generate_examples(self, rows):
        yield from enumerate(rows)

  tfds.disable_progress_bar()
  Tiny(data_dir=folder, config=name, file_format='array_record').download_and_prepare()
  return folder


LINE = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\r\n')).filter(lambda s: s[:1] != '\ufeff')


def error_message(function, *args):
  """The message, one line, of the UserError that a call raises."""
  with pytest.raises(UserError) as caught:
    function(*args)
  assert '\n' not in str(caught.value)
  return str(caught.value)
