"""The table of systems; `config.system` is one of its names."""

from collections.abc import Mapping

from attention_jax.systems.base import System
from attention_jax.systems.captioning import CaptioningSystem
from attention_jax.systems.classification import ClassificationSystem
from attention_jax.systems.glimpsing import GlimpsingSystem
from attention_jax.systems.recall import RecallSystem
from attention_jax.systems.translation import TranslationSystem

SYSTEMS: Mapping[str, type[System]] = {
  'captioning': CaptioningSystem,
  'classification': ClassificationSystem,
  'glimpsing': GlimpsingSystem,
  'recall': RecallSystem,
  'translation': TranslationSystem,
}
