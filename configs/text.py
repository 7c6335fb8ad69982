"""Your own parallel text, with subwords by sentencepiece and batches by tokens.

  python -m experiments.train --config=configs/text.py:bahdanau2015_deep_tanh --workdir=runs/mine \\
    --config.data.folder=FOLDER \\
    --config.data.task="text(train='train', validation='validation', test='test', source='en', target='de')"

FOLDER contains train.en, train.de and so on, one sentence per line (plain or .gz). For a table, or for a translation
set in tfds format:

  --config.data.task="tsv(train='train.tsv', validation='validation.tsv')"
  --config.data.task="tfds(name='wmt14_translate/de-en')" --config.data.folder=TFDS_DATA_DIR
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'bahdanau2015_deep_tanh'):
  config = default_config()
  config.data.task = "text(train='train', validation='validation', test='test', source='source', target='target')"
  config.data.folder = 'data/text'
  config.data.vocabulary = 'subword(size=8000)'
  config.data.shared_vocabulary = True
  config.data.buckets = ((16, 16), (32, 32), (64, 64))
  config.data.batch_size = 4096
  config.data.batch_unit = 'tokens'
  config.model.embedding = 256
  config.model.share_embeddings = True
  config.model.dropout = 0.2
  config.training.steps = 20_000
  config.training.schedule = 'rsqrt(peak=1e-3, warmup=1000)'
  config.training.label_smoothing = 0.1
  config.training.average = 0.999
  config.training.keep = 5
  config.training.select = 'bleu'
  config.evaluation.metrics = ('bleu', 'chrf', 'ter')
  apply_preset(config, preset, features=512)
  return config
