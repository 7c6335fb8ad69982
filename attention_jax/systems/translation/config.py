"""Fields of the config of a translation system."""

import dataclasses

from attention_jax.specs import Probability, Size, check_fields


@dataclasses.dataclass(frozen=True)
class TranslationDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of data.tasks.TASKS.
    folder: folder that relative paths of the task start from; for the task 'prepared', the prepared data set itself;
      also where tfds data sets, such as dates, are stored.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    shared_vocabulary: whether source and target have one vocabulary.
    normalization: Unicode normal form of all text, 'NFC', 'NFKC' or 'none': data, sources to translate, and the
      hypotheses and references of metrics.
    buckets: maximum (source, target) lengths, the end-of-sentence token included. In training, a pair is padded to the
      smallest bucket that holds it; each bucket is one compilation.
    max_left_out: largest share of the pairs of a split that fit no bucket; they are left out of training and loss. A
      larger share is an error.
    batch_size, batch_unit: size of a batch, in rows ('sentences') or in tokens ('tokens'): rows times the longer side
      of the bucket, padding included. By tokens, the number of rows is a multiple of 8, at least 8.
  """

  task: str = 'dates'
  folder: str = 'data'
  vocabulary: str = 'char'
  shared_vocabulary: bool = False
  normalization: str = 'none'
  buckets: tuple[tuple[int, int], ...] = ((42, 11),)
  max_left_out: Probability = 0.5
  batch_size: Size = 128
  batch_unit: str = 'sentences'

  def __post_init__(self):
    check_fields(self, 'config.data')
