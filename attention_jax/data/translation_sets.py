"""Translation sets in tfds format (`wmt14_translate/de-en` and the like), read without TensorFlow."""

from typing import Any

from attention_jax.data.text import Corpus, format_count, from_pairs
from attention_jax.data.tfds_sets import open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose


def read(folder: str, name: str, source: str | None, target: str | None) -> dict[str, Corpus]:
  """The splits that the set has.

  Raises: UserError when the set is not prepared under `folder`, is not stored as array_record, has no training split,
    or does not have the languages.
  """
  builder = open_tfds_set(folder, name)
  languages = sorted(builder.info.features)
  source, target = _languages(name, source, target, languages)
  return {
    split: _corpus(builder, part, source, target) for split, part in tfds_split_parts(builder, name, None).items()
  }


def _languages(name: str, source: str | None, target: str | None, languages: list[str]) -> tuple[str, str]:
  if source is None and target is None:
    source, _, target = name.partition(':')[0].rpartition('/')[2].partition('-')
  possible = f'possible: {", ".join(languages)}'
  if source is None or target is None:
    raise UserError(f"tfds set '{name}': source and target are given together, or neither; {possible}")
  for given in (source, target):
    choose(given, languages, f"language of tfds set '{name}':")
  if source == target:
    raise UserError(f"tfds set '{name}': source and target are both '{source}'; {possible}")
  return source, target


def _corpus(builder: Any, split: str, source: str, target: str) -> Corpus:
  name = f'{builder.info.full_name} {split}'
  columns, broken = ([], []), 0
  for example in builder.as_data_source(split=split):
    for column, language in zip(columns, (source, target), strict=True):
      line = example[language].decode('utf-8')
      whole = line.replace('\r', ' ').replace('\n', ' ')  # a corpus has one line each
      broken += whole != line
      column.append(whole)
  corpus = from_pairs(*columns, name=name)
  note = f'{name}: line breaks inside {format_count(broken, "text")} read as spaces'
  return corpus._replace(report=(*corpus.report, note)) if broken else corpus
