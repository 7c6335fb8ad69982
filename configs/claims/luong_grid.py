"""python -m experiments.ablate --config=configs/claims/luong_grid.py --workdir=runs/claims/luong_grid --workers=2

Letters to phonemes by the scores, the global and local alignments and the input feeding of Luong et al. (2015).

--config.data.folder=FOLDER is the folder of train.tsv and dev.tsv of CMUdict. The small form varies one part at
a time; the full form, for an accelerator, is the whole grid: --config=configs/claims/luong_grid.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid, product
from attention_jax.systems.config import default_config

FORMS = {
  'small': {'width': 64, 'batch_size': 64, 'steps': 1000},
  'full': {'width': 512, 'batch_size': 256, 'steps': 12_000},
}
WIDTH = 3  # half the width of the window of local attention; words have 2 to 20 letters, mostly 5 to 11
SCORES = ('general', 'dot', 'concat', 'location(max_positions=96)')
ALIGNMENTS = ('softmax', f'local_m(width={WIDTH})', f'local_p(width={WIDTH})')
INPUT_FEEDING = (True, False)


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/cmudict'
  config.data.vocabulary = 'word'
  config.data.buckets = ((24, 24),)
  config.data.batch_size = sizes['batch_size']
  config.model.embedding = width
  config.model.encoder = f'birnn(rnn="lstm", features={width})'
  config.model.decoder = f'luong(rnn="lstm", features={width})'
  config.model.attention.score = SCORES[0]
  config.model.attention.features = width
  config.model.dropout = 0.1
  config.training.steps = sizes['steps']
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = sizes['steps']
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  config.evaluation.batch_size = 256
  config.evaluation.beams = 1
  return config


def get_sweep(form: str = 'small'):
  scores = grid({'model.attention.score': SCORES})
  alignments = grid({'model.attention.alignment': ALIGNMENTS})
  feeding = grid({'model.decoder.input_feeding': INPUT_FEEDING})
  first = scores[0] | alignments[0] | feeding[0]
  one_at_a_time = [first | change for change in ({}, *scores[1:], *alignments[1:], *feeding[1:])]
  settings = {'small': one_at_a_time, 'full': product(scores, alignments, feeding)}
  return Sweep(
    settings[choose(form, settings, 'form')],
    baseline=first,
    metrics=('phoneme_error_rate', 'sequence_error_rate'),
    question='Which score, which alignment, and input feeding or not?',
  )
