"""CMUdict: English letters -> phonemes without stress.

  python -m experiments.train --config=configs/cmudict.py:luong2015_birnn --workdir=runs/cmudict \\
    --config.data.folder=FOLDER

FOLDER contains train.tsv and dev.tsv: letters TAB phonemes, separated by spaces. Several pronunciations of a word are
several references: phoneme_error_rate counts edits to the nearest one, sequence_error_rate the outputs that equal none
of them (the WER of the grapheme-to-phoneme literature).
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'luong2015_birnn'):
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/cmudict'
  config.data.vocabulary = 'word'
  config.data.buckets = ((7, 7), (9, 9), (11, 11), (14, 14), (24, 24))
  config.data.batch_size = 256
  config.model.embedding = 128
  config.model.dropout = 0.2
  config.training.steps = 12_000
  config.training.schedule = 'cosine(peak=2e-3, warmup=400)'
  config.training.evaluate_every = 1000
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  config.evaluation.batch_size = 256
  apply_preset(config, preset, features=256)
  return config
