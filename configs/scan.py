"""SCAN: commands -> actions, split by length.

  python -m experiments.train --config=configs/scan.py:luong2015_birnn --workdir=runs/scan --config.data.folder=FOLDER

FOLDER contains length.train.tsv.gz and length.test.tsv.gz. There is no validation split, and the test split must not
select a checkpoint: the last parameters are evaluated. Another split:

  --config.data.task="tsv(train='jump.train.tsv.gz', test='jump.test.tsv.gz')"
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'luong2015_birnn'):
  config = default_config()
  config.data.task = "tsv(train='length.train.tsv.gz', test='length.test.tsv.gz')"
  config.data.folder = 'data/scan'
  config.data.vocabulary = 'word'
  config.data.buckets = ((10, 10), (10, 20), (10, 30), (10, 50))
  config.data.batch_size = 64
  config.model.embedding = 200
  config.model.dropout = 0.5
  config.training.steps = 10_000
  config.training.clip = 5.0
  config.evaluation.metrics = ('exact_match', 'token_error_rate')
  apply_preset(config, preset, features=200)
  return config
