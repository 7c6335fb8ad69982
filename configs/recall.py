"""Copying sequences of up to 20 vectors of 8 bits by a Neural Turing Machine, Graves et al. 2014; the sequences of the
split 'unseen' have 50.

  python -m experiments.train --config=configs/recall.py:graves2014 --workdir=runs/recall

Measured: time on a CPU, exact match on the splits 'test' and 'unseen', and the sequences of 'unseen'. RESULTS.md has
the flags of each row.

  copy, three seeds                 10 min   99.9 %  100.0 %, sequences of 50 vectors
  associative_recall, 4000 updates  15 min  100.0 %   99.6 %, twice as many items
  repeat_copy, feedforward          69 min   97.7 %   65.6 %, 20 vectors ten times (with 256 slots)
  priority_sort, eight heads       116 min   92.2 %   72.7 %, the highest 16 of 30 vectors

The other tasks, and a network without a memory:

  --config.data.task=repeat_copy --config.model.cell="turing(controller='feedforward')"
  --config.data.task=associative_recall
  --config.data.task=ngrams
  --config.data.task=priority_sort
  --config.model.cell='recurrent(features=256, layers=3)'
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset


def get_config(preset: str = 'graves2014'):
  config = default_config('recall')
  config.training.steps = 2000
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = 500
  config.training.checkpoint_every = 500
  config.training.select = 'cost'
  return apply_preset(config, preset, features=100)
