"""Film reviews -> positive (1) or negative (0), Maas et al. 2011.

  python -m experiments.train --config=configs/imdb.py:yang2016 --workdir=runs/imdb --config.data.folder=FOLDER

Measured, accuracy on dev: yang2016 90.6 % in 16 CPU minutes, lin2017 88.6 % in 9; yang2016 with
--config.training.average=0.998 and word2vec vectors of the training split, 91.4 %.

FOLDER contains train.jsonl.gz and dev.jsonl.gz with the fields text and label. To read the data set of tfds:

  --config.data.task="tfds(name='imdb_reviews', validation='train[80%:]', html=True)"
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

ONE_LEVEL_PRESETS = ('lin2017', 'cheng2016')  # presets without a sentence level


def get_config(preset: str = 'yang2016'):
  config = default_config('classification')
  config.data.task = "jsonl(train='train.jsonl.gz', validation='dev.jsonl.gz', html=True)"
  config.data.vocabulary = 'word(min_count=5)'
  config.data.joined = preset in ONE_LEVEL_PRESETS
  config.data.buckets = ((1, 128), (1, 256), (1, 400)) if config.data.joined else ((8, 32), (16, 32), (32, 32))
  config.data.batch_size = 64
  config.model.embedding = 100
  config.model.dropout = 0.3
  config.training.steps = 945
  config.training.schedule = 'cosine(peak=2e-3, warmup=100)'
  config.training.evaluate_every = 315
  config.training.checkpoint_every = 315
  config.training.select = 'accuracy'
  return apply_preset(config, preset, features=100)
