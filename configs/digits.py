"""Handwritten digits of 8 x 8 pixels (part of scikit-learn) on a canvas of 20 x 20, by glimpses of 4 x 4 and 8 x 8
pixels.

  python -m experiments.train --config=configs/digits.py:mnih2014 --workdir=runs/digits

Measured with seed 0 on one core: after six minutes the error is 7.4 % with one sample (config.evaluation.samples) and
0.4 % with ten. jaderberg2015, a spatial transformer, has 2.4 % after four minutes on two cores shared with another job.
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

OVERRIDES = {
  'jaderberg2015': {'model.size': 10, 'training.steps': 2000},
  'ba2015': {'data.task': 'digits(canvas=20, objects=2)', 'model.size': 8, 'model.scales': 1, 'model.glimpses': 4},
}


def get_config(preset: str = 'mnih2014'):
  config = default_config('glimpsing')
  config.data.task = 'digits(canvas=20)'
  config.data.batch_size = 64
  config.model.size = 4
  config.model.scales = 2
  config.model.samples = 4
  config.training.steps = 12_000
  config.training.schedule = 'cosine(peak=1e-3, warmup=100)'
  config.training.evaluate_every = 1000
  config.training.checkpoint_every = 1000
  config.training.select = 'error'
  apply_preset(config, preset, features=128)
  config.update_from_flattened_dict(OVERRIDES.get(preset, {}))
  return config
