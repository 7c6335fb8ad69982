"""python -m experiments.ablate --config=configs/claims/bottleneck.py --workdir=runs/claims/bottleneck --workers=2

Letters to phonemes with and without attention, at three widths and with the same schedule.

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=configs/claims/bottleneck.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid, product, zipped
from attention_jax.systems.config import default_config

STEPS = {'small': 1200, 'full': 8000}
WIDTHS = (32, 64, 128)
WIDTH_FIELDS = ('model.embedding', 'model.encoder.features', 'model.decoder.features', 'model.attention.features')


def get_config(form: str = 'small'):
  steps = STEPS[choose(form, STEPS, 'form')]
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/nettalk'
  config.data.vocabulary = 'word'
  config.data.buckets = ((20, 20),)
  config.data.batch_size = 64
  config.model.encoder = 'birnn(rnn="gru")'
  config.model.dropout = 0.1
  config.training.steps = steps
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = steps // 2
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  config.evaluation.beams = 1
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
