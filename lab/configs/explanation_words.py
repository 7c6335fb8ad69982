"""Letters to phonemes by attention whose weights are learned, or frozen to uniform ones.

  python -m experiments.ablate --config=lab/configs/explanation_words.py --workdir=runs/claims/words --workers=2

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=lab/configs/explanation_words.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from lab.claim_configs import nettalk_config

FORMS = {'small': {'width': 64, 'steps': 800}, 'full': {'width': 256, 'steps': 8000}}
UNIFORM = 'softmax(temperature=1e9)'  # uniform weights: the parameters of the score remain, without influence


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = nettalk_config(sizes['steps'])
  config.model.embedding = width
  config.model.encoder = f'birnn(rnn="gru", features={width})'
  config.model.decoder = f'bahdanau(rnn="gru", features={width}, readout={width})'
  config.model.attention.features = width
  return config


def get_sweep():
  return Sweep(
    grid({'model.attention.alignment': ['softmax', UNIFORM]}),
    baseline={'model.attention.alignment': 'softmax'},
    metrics=('phoneme_error_rate', 'sequence_error_rate'),
    question='Do learned weights give better phonemes than uniform ones?',
  )
