"""Soft, sparse, sampled and exact latent alignments on words with alignments made by hand, and on dates with known
links.

  python -m experiments.ablate --config=lab/configs/alignments.py --workdir=runs/claims/alignments --workers=2

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=lab/configs/alignments.py:full --seeds=5. On dates, which need no folder:
--config=lab/configs/alignments.py:dates, and for an accelerator :dates_full.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from lab.claim_configs import dates_config, nettalk_config

FORMS = {
  'small': {'task': nettalk_config, 'width': 64, 'steps': 1200},
  'full': {'task': nettalk_config, 'width': 256, 'steps': 8000},
  'dates': {'task': dates_config, 'width': 64, 'steps': 800},
  'dates_full': {'task': dates_config, 'width': 256, 'steps': 6000},
}
# Sampled positions are trained by REINFORCE; at half of the targets the expected weights replace the sample, as in the
# preset xu2015_hard_immediate_reward.
HARD = {'model.attention.alignment': 'hard(expectation_rate=0.5)', 'training.auxiliary': 'reinforce(discount=0.0)'}


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = sizes['task'](sizes['steps'], evaluations=2)
  config.model.embedding = width
  config.model.encoder = f'birnn(rnn="gru", features={width})'
  config.model.decoder = f'bahdanau(rnn="gru", features={width}, readout={width})'
  config.model.attention.features = width
  return config


def get_sweep(form: str = 'small'):
  alignments = grid({'model.attention.alignment': ['softmax', 'sparsemax', 'entmax15', 'gumbel', 'latent']})
  return Sweep(
    [*alignments, HARD],
    baseline={'model.attention.alignment': 'softmax'},
    metrics=(get_config(form).training.select, 'alignment_error_rate', 'entropy'),
    question='Soft, sparse, sampled or exact latent: which alignment gives the best words and the best links?',
  )
