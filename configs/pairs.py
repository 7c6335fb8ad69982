"""French -> English on one table of sentence pairs, with the filters of PyTorch's tutorial on translation.

  python -m experiments.train --config=configs/pairs.py:bahdanau2015_deep_tanh --workdir=runs/pairs \\
    --config.data.folder=FOLDER

FOLDER contains fra.txt of manythings.org/anki (fra-eng.zip), or another table of sentence TAB translation with this
name. To filter by length only, or to translate English -> Spanish with the normalisation of TensorFlow's tutorial and
with longer sentences:

  --config.data.task="pairs(path='fra.txt', reverse=True)"
  --config.data.task="pairs(path='spa.txt', normalize='tensorflow', max_length=0)" \\
    --config.data.buckets='((10, 10), (20, 20), (60, 60))'
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

PREFIXES = ('i am ', 'i m ', 'he is', 'he s ', 'she is', 'she s ', 'you are', 'you re ', 'we are', 'we re ')
PREFIXES += ('they are', 'they re ')


def get_config(preset: str = 'bahdanau2015_deep_tanh'):
  config = default_config()
  config.data.task = f"pairs(path='fra.txt', reverse=True, prefixes={PREFIXES})"
  config.data.vocabulary = 'word'
  config.data.buckets = ((7, 7), (10, 10))
  config.data.batch_size = 64
  config.model.embedding = 128
  config.model.dropout = 0.2
  config.training.steps = 3000
  config.training.schedule = 'cosine(peak=2e-3, warmup=100)'
  config.training.evaluate_every = 500
  config.training.checkpoint_every = 500
  config.training.select = 'bleu'
  config.evaluation.metrics = ('bleu(tokenize="none")', 'exact_match')
  config.evaluation.group_references = True
  return apply_preset(config, preset, features=128)
