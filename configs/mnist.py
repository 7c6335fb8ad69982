"""python -m experiments.train --config=configs/mnist.py:mnih2014 --workdir=runs/mnist --config.data.folder=FOLDER

Handwritten digits by six glimpses of 8 x 8 pixels, Mnih et al. 2014. FOLDER holds mnist.npz, or MNIST as
tfds prepares it. Somewhere on a larger canvas, and among pieces of others:

  --config.data.task='tfds(name="mnist")'
  --config.data.task='npz(canvas=60)' --config.model.size=12 --config.model.scales=3
  --config.data.task='npz(canvas=60, clutter=4)' --config.model.size=12 --config.model.scales=4
"""

from attention_jax.training.config import default_config
from attention_jax.training.presets import apply_preset


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
  return apply_preset(config, preset, features=256)
