"""Fields of the config of a captioning system."""

import dataclasses

from attention_jax.specs import Probability, Size, check_fields


@dataclasses.dataclass(frozen=True)
class CaptioningDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of systems.captioning.data.PICTURES.
    folder: folder that relative paths of the task start from; for the task 'prepared', the prepared data set itself.
    vocabulary: vocabulary of the captions, a spec of data.vocab.VOCABULARIES.
    buckets: lengths of captions, the end-of-sentence token included; each is one compilation.
    max_left_out: largest share of the captions of a split that fit no bucket; they are left out of training and loss. A
      larger share is an error.
    batch_size: captions of a batch, each with its picture.
  """

  task: str = 'shapes'
  folder: str = 'data'
  vocabulary: str = 'word'
  buckets: tuple[int, ...] = (20,)
  max_left_out: Probability = 0.5
  batch_size: Size = 64

  def __post_init__(self):
    check_fields(self, 'config.data')
