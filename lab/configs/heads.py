"""1 to 16 heads at equal parameters: in a recurrent decoder with scaled_dot or additive scores, and in a Transformer.

  python -m experiments.ablate --config=lab/configs/heads.py --workdir=runs/claims/heads --workers=2

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of NETtalk. The full form, for an accelerator:
--config=lab/configs/heads.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from lab.claim_configs import nettalk_config

SCORES = ('scaled_dot', 'additive')
FORMS = {
  'small': {'width': 64, 'layers': 2, 'steps': 600, 'heads': (1, 4, 16), 'transformer_scores': SCORES[:1]},
  'full': {'width': 256, 'layers': 4, 'steps': 8000, 'heads': (1, 2, 4, 8, 16), 'transformer_scores': SCORES},
}


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = nettalk_config(sizes['steps'])
  config.model.embedding = width
  config.model.encoder = f'birnn(rnn="gru", features={width})'
  config.model.decoder = f'luong(rnn="gru", features={width})'
  config.model.attention.features = width
  # Several heads project values and contexts. A single head does so too, so that all have the same parameters.
  config.model.attention.project_values = True
  return config


def get_sweep(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  recurrent = grid({'model.attention.score': SCORES, 'model.attention.heads': sizes['heads']})
  transformers = [
    _transformer(score, heads, sizes) for score in sizes['transformer_scores'] for heads in sizes['heads']
  ]
  return Sweep(
    [*recurrent, *transformers],
    baseline=recurrent[0] | {'model.decoder': get_config(form).model.decoder},  # which the Transformers replace
    metrics=('phoneme_error_rate', 'alignment_error_rate'),
    question='Do more heads help at equal parameters, and also with additive scores?',
  )


def _transformer(score, heads, sizes):
  """Settings of a Transformer that has these heads in self-attention and in attention over the source."""
  width = sizes['width']
  spec = (
    f'transformer(features={width}, layers={sizes["layers"]}, heads={heads}, hidden={2 * width}, score="{score}", '
    'norm_first=True)'
  )
  return {
    'model.attention.score': score,
    'model.attention.heads': heads,
    'model.encoder': spec,
    'model.decoder': spec,
  }
