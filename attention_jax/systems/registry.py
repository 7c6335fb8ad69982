"""The table of systems; `config.system` is one of its names. A system is imported when it is first used."""

import pkgutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from attention_jax.systems.base import System

CLASSES = {
  'captioning': 'attention_jax.systems.captioning.system:CaptioningSystem',
  'classification': 'attention_jax.systems.classification.system:ClassificationSystem',
  'glimpsing': 'attention_jax.systems.glimpsing.system:GlimpsingSystem',
  'recall': 'attention_jax.systems.recall.system:RecallSystem',
  'translation': 'attention_jax.systems.translation.system:TranslationSystem',
}


class _Systems(Mapping[str, 'type[System]']):
  """Maps the names of `CLASSES` to the classes, which it imports."""

  def __getitem__(self, name: str) -> 'type[System]':
    return pkgutil.resolve_name(CLASSES[name])

  def __iter__(self) -> Iterator[str]:
    return iter(CLASSES)

  def __len__(self) -> int:
    return len(CLASSES)


SYSTEMS = _Systems()
