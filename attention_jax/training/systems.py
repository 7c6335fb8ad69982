"""The table of systems: a config says which one it is of."""

from collections.abc import Mapping

from attention_jax.training.captioning import Captioning
from attention_jax.training.classification import Classification
from attention_jax.training.glimpsing import Glimpsing
from attention_jax.training.recalling import Recall
from attention_jax.training.system import System
from attention_jax.training.translation import Translation

SYSTEMS: Mapping[str, type[System]] = {
  'captioning': Captioning,
  'classification': Classification,
  'glimpsing': Glimpsing,
  'recall': Recall,
  'translation': Translation,
}
