"""Sets as tfds writes them, which the readers are tried on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds


def write_tfds_set(
  folder: Path, features: Callable[[Any], Any], splits: Mapping[str, Sequence[Mapping]], name: str
) -> Path:
  """Writes the set 'tiny/NAME' with these rows in each split to `folder`, which it returns.

  Args: features, the module tfds -> what a row holds.
  """
  with tfds.core.registered.skip_registration():  # another set may have the name

    class Tiny(tfds.core.GeneratorBasedBuilder):
      __module__ = 'tiny'  # of no package, in which tfds would look for more files
      VERSION = tfds.core.Version('1.0.0')
      BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name)]  # noqa: RUF012 tfds asks for it

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=features(tfds))

      def _split_generators(self, _):
        return {split: self._generate_examples(rows) for split, rows in splits.items()}

      def _generate_examples(self, rows):
        yield from enumerate(rows)

  tfds.disable_progress_bar()
  Tiny(data_dir=folder, config=name, file_format='array_record').download_and_prepare()
  return folder
