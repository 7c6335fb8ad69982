"""Fields of the config of a glimpsing system."""

import dataclasses

from attention_jax.specs import Repeats, Size, check_fields


@dataclasses.dataclass(frozen=True)
class GlimpsingDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of systems.glimpsing.data.DIGITS.
    folder: folder that relative paths of the task start from.
    batch_size: pictures of a batch.
  """

  task: str = 'digits'
  folder: str = 'data'
  batch_size: Size = 32

  def __post_init__(self):
    check_fields(self, 'config.data')


@dataclasses.dataclass(frozen=True)
class GlimpsingEvaluationConfig:
  """Fields of `config.evaluation`.

  Attributes:
    samples: glimpse paths sampled for each picture; their probabilities are averaged.
    batch_size: number of pictures that are classified at once.
  """

  samples: Repeats = 10
  batch_size: Size = 128

  def __post_init__(self):
    check_fields(self, 'config.evaluation')
