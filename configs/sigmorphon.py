"""SIGMORPHON 2017, inflection with the largest training sets ('high'): tags and the letters of a lemma -> the letters
of its form. exact_match is the accuracy of the shared task.

  python -m experiments.train --config=configs/sigmorphon.py:wu2019_hard_monotonic --workdir=runs/s \\
    --config.data.folder=FOLDER

FOLDER contains german.train.tsv and german.dev.tsv: `V PST <sep> g e h e n` TAB `g i n g`. For another language, add:

  --config.data.task="tsv(train='finnish.train.tsv', validation='finnish.dev.tsv')"
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'wu2019_hard_monotonic'):
  config = default_config()
  config.data.task = "tsv(train='german.train.tsv', validation='german.dev.tsv')"
  config.data.folder = 'data/sigmorphon2017'
  config.data.vocabulary = 'word'
  config.data.buckets = ((14, 12), (18, 18), (24, 24), (50, 48))
  config.data.batch_size = 64
  config.model.embedding = 128
  config.model.dropout = 0.3
  config.training.steps = 6000
  config.training.schedule = 'cosine(peak=1e-3, warmup=200)'
  config.training.evaluate_every = 500
  config.training.select = 'exact_match'
  config.evaluation.metrics = ('exact_match', 'character_error_rate')
  apply_preset(config, preset, features=256)
  return config
