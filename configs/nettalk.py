"""NETtalk: English letters -> phonemes, with links annotated by hand, against which alignments are measured.

  python -m experiments.train --config=configs/nettalk.py:bahdanau2015_deep_tanh --workdir=runs/n \\
    --config.data.folder=FOLDER

FOLDER contains train.tsv and dev.tsv: letters TAB phonemes TAB links.
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'bahdanau2015_deep_tanh'):
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/nettalk'
  config.data.vocabulary = 'word'
  config.data.buckets = ((8, 8), (12, 12), (20, 20))
  config.data.batch_size = 64
  config.model.embedding = 64
  config.model.dropout = 0.3
  config.training.steps = 4000
  config.training.schedule = 'cosine(peak=2e-3, warmup=200)'
  config.training.evaluate_every = 500
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  apply_preset(config, preset, features=128)
  return config
