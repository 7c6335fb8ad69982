"""Letters to phonemes with and without attention, at three widths and with the same schedule.

  python -m experiments.ablate --config=lab/configs/bottleneck.py --workdir=runs/claims/bottleneck --workers=2

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=lab/configs/bottleneck.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid, product, zipped
from lab.claim_configs import nettalk_config

STEPS = {'small': 1200, 'full': 8000}
WIDTHS = (32, 64, 128)
WIDTH_FIELDS = ('model.embedding', 'model.encoder.features', 'model.decoder.features', 'model.attention.features')


def get_config(form: str = 'small'):
  config = nettalk_config(STEPS[choose(form, STEPS, 'form')], evaluations=2)
  config.model.encoder = 'birnn(rnn="gru")'
  return config


def get_sweep():
  decoders = grid({'model.decoder': ['plain(rnn="gru")', 'luong(rnn="gru")']})
  widths = zipped({field: list(WIDTHS) for field in WIDTH_FIELDS})
  return Sweep(
    product(decoders, widths),
    baseline={'model.decoder': 'plain(rnn="gru")', 'model.embedding': WIDTHS[1]},
    metrics=('phoneme_error_rate', 'sequence_error_rate'),
    question='Does quality without attention fall with the length of the source, and does a wider vector help?',
  )
