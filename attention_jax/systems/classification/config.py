"""Fields of the config of a classification system."""

import dataclasses

from attention_jax.specs import Size, check_fields


@dataclasses.dataclass(frozen=True)
class ClassificationDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of systems.classification.data.DOCUMENTS.
    folder: folder that relative paths of the task start from; for the task 'prepared', the prepared data set itself;
      also where tfds data sets are stored.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    joined: whether a document is read as one sentence, without its sentence boundaries.
    buckets: (sentences, tokens of a sentence) of documents; each is one compilation. The largest bucket bounds what is
      read: longer sentences are split (joined documents and texts of a pair are cut), further sentences are dropped.
    batch_size: documents of a batch.
  """

  task: str = 'entailment'
  folder: str = 'data'
  vocabulary: str = 'word'
  joined: bool = False
  buckets: tuple[tuple[int, int], ...] = ((2, 20),)
  batch_size: Size = 64

  def __post_init__(self):
    check_fields(self, 'config.data')


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluationConfig:
  """Fields of `config.evaluation`.

  Attributes:
    batch_size: number of documents that are classified at once.
  """

  batch_size: Size = 128

  def __post_init__(self):
    check_fields(self, 'config.evaluation')
