"""Handwritten digits by six glimpses of 8 x 8 pixels, Mnih et al. 2014.

  python -m experiments.train --config=configs/mnist.py:mnih2014 --workdir=runs/mnist --config.data.folder=FOLDER

Measured, seed 0, errors with one sample and with ten:

- 28 x 28 in 16 CPU minutes: 1.84 and 0.67 %; with --config.training.steps=120000 --config.training.average=0.999 and a
  restart (RESULTS.md), two hours, 1.06 and 0.40 %;
- canvas of 60 x 60 in 26 minutes: 3.17 and 2.00 %;
- the same with clutter in 55 minutes: 10.75 and 5.91 %;
- both canvases, trained longer and with larger batches (RESULTS.md): 1.85 and 1.06 %, 6.88 and 3.58 %.

FOLDER contains mnist.npz, or MNIST as prepared by tfds. For the data set of tfds, a larger canvas, or a canvas with
clutter:

  --config.data.task='tfds(name="mnist")'
  --config.data.task='npz(canvas=60)' --config.model.size=12 --config.model.scales=3
  --config.data.task='npz(canvas=60, clutter=4)' --config.model.size=12 --config.model.scales=4
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

OVERRIDES = {
  'jaderberg2015': {'model.size': 28},
  'ba2015': {'data.task': 'npz(canvas=60, objects=2)', 'model.size': 12, 'model.scales': 2},
}


def get_config(preset: str = 'mnih2014'):
  config = default_config('glimpsing')
  config.data.task = 'npz'
  config.data.batch_size = 64
  config.model.samples = 4
  config.training.steps = 20000
  config.training.schedule = 'cosine(peak=1e-3, warmup=200)'
  config.training.evaluate_every = 2000
  config.training.checkpoint_every = 2000
  config.training.select = 'error'
  apply_preset(config, preset, features=256)
  config.update_from_flattened_dict(OVERRIDES.get(preset, {}))
  return config
