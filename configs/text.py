"""Your own parallel text. The vocabulary and the lengths of batches are chosen from the data.

  python -m experiments.train --config=configs/text.py:bahdanau2015_deep_tanh@tiny --workdir=runs/mine \\
    --config.data.folder=FOLDER

The size after '@' is a row of SIZES: tiny for thousands of pairs on a CPU, small for tens of thousands, base (the
default) for more on an accelerator. FOLDER contains train.source, train.target, validation.source and so on, one
sentence per line (plain or .gz). For files with other names, for a table, or for a translation set in tfds format:

  --config.data.task="text(train='train', validation='dev', test='test', source='en', target='de')"
  --config.data.task="tsv(train='train.tsv', validation='validation.tsv')"
  --config.data.task="tfds(name='wmt14_translate/de-en')" --config.data.folder=TFDS_DATA_DIR
"""

from typing import NamedTuple

from attention_jax.errors import choose
from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


class Size(NamedTuple):
  """A row of SIZES.

  Attributes:
    features: width of layers and attention; presets whose names fix their sizes ignore it.
    embedding: width of embeddings; that of Transformers is `features`.
    depth: layers of Transformers, convolutional models and GNMT.
    dropout: probability of dropout.
    tokens: tokens of a batch.
    steps: updates.
    schedule: the learning rate.
    average: decay of the moving average of the parameters.
  """

  features: int
  embedding: int
  depth: int
  dropout: float
  tokens: int
  steps: int
  schedule: str
  average: float


SIZES = {
  'tiny': Size(128, 64, 2, 0.1, 1024, 2_000, 'cosine(peak=2e-3, warmup=200)', 0.99),
  'small': Size(256, 128, 3, 0.2, 2048, 10_000, 'cosine(peak=1.5e-3, warmup=500)', 0.998),
  'base': Size(512, 256, 3, 0.2, 4096, 20_000, 'rsqrt(peak=1e-3, warmup=1000)', 0.999),
}


def get_config(preset: str = 'bahdanau2015_deep_tanh'):
  """Returns the config of 'PRESET@SIZE', or of 'PRESET' in the size base."""
  name, at, size_name = preset.partition('@')
  size = SIZES[choose(size_name if at else 'base', SIZES, 'size')]
  config = default_config()
  config.data.task = "text(train='train', validation='validation', test='test', source='source', target='target')"
  config.data.folder = 'data/text'
  config.data.vocabulary = 'subword(size=8000, min_count=100)'
  config.data.shared_vocabulary = True
  config.data.buckets = ()
  config.data.batch_size = size.tokens
  config.data.batch_unit = 'tokens'
  config.model.embedding = size.embedding
  config.model.share_embeddings = True
  config.model.dropout = size.dropout
  config.training.steps = size.steps
  config.training.schedule = size.schedule
  config.training.label_smoothing = 0.1
  config.training.average = size.average
  config.training.evaluate_every = config.training.checkpoint_every = size.steps // 10
  config.training.keep = 5
  config.training.select = 'chrf'
  config.evaluation.metrics = ('bleu', 'chrf', 'ter', 'exact_match')
  apply_preset(config, name, features=size.features, depth=size.depth)
  return config
