"""python -m experiments.ablate --config=configs/claims/explanation_words.py --workdir=runs/claims/words --workers=2

Letters to phonemes by attention whose weights are learned, or frozen to uniform ones.

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=configs/claims/explanation_words.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from attention_jax.systems.config import default_config

FORMS = {'small': {'width': 64, 'steps': 800}, 'full': {'width': 256, 'steps': 8000}}
UNIFORM = 'softmax(temperature=1e9)'  # frozen weights: the same parameters, without any influence


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/nettalk'
  config.data.vocabulary = 'word'
  config.data.buckets = ((20, 20),)
  config.data.batch_size = 64
  config.model.embedding = width
  config.model.encoder = f'birnn(rnn="gru", features={width})'
  config.model.decoder = f'bahdanau(rnn="gru", features={width}, readout={width})'
  config.model.attention.features = width
  config.model.dropout = 0.1
  config.training.steps = sizes['steps']
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = sizes['steps']
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  config.evaluation.beams = 1
  return config


def get_sweep():
  return Sweep(
    grid({'model.attention.alignment': ['softmax', UNIFORM]}),
    baseline={'model.attention.alignment': 'softmax'},
    metrics=('phoneme_error_rate', 'sequence_error_rate'),
    question='Do learned weights give better phonemes than uniform ones?',
  )
