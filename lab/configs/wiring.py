"""Attention before the recurrence (Bahdanau et al. 2015) or after it (Luong et al. 2015), input feeding or not, and
reading in one direction or in two, with about the same number of parameters in all settings.

  python -m experiments.ablate --config=lab/configs/wiring.py --workdir=runs/claims/wiring --workers=2

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=lab/configs/wiring.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid, product
from lab.claim_configs import nettalk_config

FORMS = {'small': {'scale': 1, 'steps': 1200}, 'full': {'scale': 4, 'steps': 8000}}
# Widths at which all settings have about the same number of parameters; multiplied by the scale of the form.
ENCODERS = {'birnn(rnn="gru", features={})': 64, 'rnn(rnn="gru", features={})': 57}
DECODERS = {
  'bahdanau(rnn="gru", features={0}, readout={0})': 64,
  'luong(rnn="gru", features={})': 67,
  'luong(rnn="gru", features={}, input_feeding=False)': 80,
}
WIDTH = 64  # of embeddings and attention; also multiplied by the scale


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  config = nettalk_config(sizes['steps'], evaluations=2)
  config.model.embedding = WIDTH * sizes['scale']
  config.model.attention.features = WIDTH * sizes['scale']
  return config


def get_sweep(form: str = 'small'):
  scale = FORMS[choose(form, FORMS, 'form')]['scale']
  encoders = [spec.format(width * scale) for spec, width in ENCODERS.items()]
  decoders = [spec.format(width * scale) for spec, width in DECODERS.items()]
  settings = product(grid({'model.encoder': encoders}), grid({'model.decoder': decoders}))
  return Sweep(
    settings,
    baseline=settings[0],
    metrics=('phoneme_error_rate', 'alignment_error_rate'),
    question='Attention before or after the recurrence, input feeding or not, and one direction or two?',
  )
