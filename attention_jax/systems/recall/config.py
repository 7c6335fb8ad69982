"""Fields of the config of a recall system."""

import dataclasses

from attention_jax.specs import Size, check_fields


@dataclasses.dataclass(frozen=True)
class RecallDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of systems.recall.tasks.RECALL.
    batch_size: episodes of a batch.
  """

  task: str = 'copy'
  batch_size: Size = 32

  def __post_init__(self):
    check_fields(self, 'config.data')


@dataclasses.dataclass(frozen=True)
class RecallEvaluationConfig:
  """Fields of `config.evaluation`.

  Attributes:
    batch_size: number of episodes that are evaluated at once.
  """

  batch_size: Size = 64

  def __post_init__(self):
    check_fields(self, 'config.evaluation')
