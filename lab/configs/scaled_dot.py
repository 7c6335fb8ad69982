"""Scaled and unscaled dot products and additive scores, as the number of features of query and key grows.

  python -m experiments.ablate --config=lab/configs/scaled_dot.py --workdir=runs/claims/scaled_dot --workers=2

The full form, for an accelerator: --config=lab/configs/scaled_dot.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from attention_jax.systems.config import default_config

FORMS = {
  'small': {'width': 48, 'batch_size': 32, 'steps': 400},
  'full': {'width': 256, 'batch_size': 64, 'steps': 6000},
}
# Only queries, keys, values and contexts grow; encoder and decoder have the same width in all settings. There are two
# heads because a single head would project query and key for the additive score only.
HEADS = 2
HEAD_FEATURES = (4, 32, 256)


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  config = default_config()
  config.data.task = 'dates'
  config.data.buckets = ((42, 11),)
  config.data.batch_size = sizes['batch_size']
  config.model.embedding = sizes['width']
  config.model.encoder = f'birnn(rnn="gru", features={sizes["width"]})'
  config.model.decoder = f'luong(rnn="gru", features={sizes["width"]}, input_feeding=False)'
  config.model.attention.heads = HEADS
  config.training.steps = sizes['steps']
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = sizes['steps']
  config.training.select = 'exact_match'
  config.evaluation.max_length = 12
  config.evaluation.beams = 1
  return config


def get_sweep():
  features = [HEADS * size for size in HEAD_FEATURES]
  return Sweep(
    grid({'model.attention.features': features, 'model.attention.score': ['dot', 'scaled_dot', 'additive']}),
    baseline={'model.attention.features': features[-1], 'model.attention.score': 'scaled_dot'},
    metrics=('exact_match', 'alignment_error_rate', 'entropy'),
    question='Does the dot product need its scale as features grow, and is the additive score better than both?',
  )
