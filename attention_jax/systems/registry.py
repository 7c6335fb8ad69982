"""The table of systems: a config says which one it is of."""

from collections.abc import Mapping

from attention_jax.systems.base import System
from attention_jax.systems.captioning import Captioning
from attention_jax.systems.classification import Classification
from attention_jax.systems.glimpsing import Glimpsing
from attention_jax.systems.recall import Recall
from attention_jax.systems.translation import Translation

SYSTEMS: Mapping[str, type[System]] = {
  'captioning': Captioning,
  'classification': Classification,
  'glimpsing': Glimpsing,
  'recall': Recall,
  'translation': Translation,
}
