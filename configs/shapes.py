"""Pictures of coloured shapes on a cluttered background -> their positions and properties. Generated; no download.

  python -m experiments.train --config=configs/shapes.py:xu2015_soft --workdir=runs/shapes

RESULTS.md has the measurements; lab/journal.md has those of earlier versions, whose shapes overlap less.
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

# Presets with another number of updates than 8000.
STEPS = {'xu2015_hard_immediate_reward': 12_000}


def get_config(preset: str = 'xu2015_soft'):
  config = default_config('captioning')
  config.data.task = 'shapes'
  config.data.buckets = (20,)
  config.model.embedding = 64
  config.training.steps = 8000
  config.training.schedule = 'cosine(peak=1e-3, warmup=200)'
  config.training.evaluate_every = 500
  config.training.checkpoint_every = 500
  config.training.select = 'exact_match'
  config.evaluation.metrics = ('exact_match', 'bleu(tokenize="none")')
  apply_preset(config, preset, features=128)
  config.training.steps = STEPS.get(preset, config.training.steps)
  return config
