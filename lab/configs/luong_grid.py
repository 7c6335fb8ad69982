"""Sweep over the scores, the global and local alignments and the input feeding of Luong et al. (2015).

  python -m experiments.ablate --config=lab/configs/luong_grid.py --workdir=runs/claims/luong_grid --workers=2

The task is letters to phonemes: --config.data.folder=FOLDER contains train.tsv and dev.tsv of CMUdict. The small form
varies one part at a time; the full form, for an accelerator, is the whole grid:
--config=lab/configs/luong_grid.py:full --seeds=5. The forms
multi30k_small and, for an accelerator, multi30k are the same for the captions of Multi30k.
"""

from attention_jax.errors import choose
from attention_jax.specs import parse
from attention_jax.sweeps.space import Sweep, grid, product
from attention_jax.systems.config import default_config

CMUDICT = {
  'data.task': "tsv(train='train.tsv', validation='dev.tsv')",
  'data.folder': 'data/cmudict',
  'data.vocabulary': 'word',
  'data.buckets': ((24, 24),),
  'training.select': 'phoneme_error_rate',
  'evaluation.metrics': ('phoneme_error_rate', 'sequence_error_rate'),
  'evaluation.group_references': True,
}
MULTI30K = {
  'data.task': "text(train='train', validation='val', test='test2016', source='en', target='de')",
  'data.folder': 'data/multi30k',
  'data.vocabulary': 'word(min_count=2)',
  'data.buckets': ((10, 10), (12, 12), (14, 14), (16, 16), (20, 20), (26, 26), (44, 48)),
  'training.select': 'bleu',
  'evaluation.metrics': ('bleu(tokenize="none")', 'chrf'),
  'evaluation.max_length': 50,
}
# Fewer programs to compile, and a smaller output layer.
MULTI30K_SMALL = MULTI30K | {'data.buckets': ((12, 12), (18, 18), (44, 48)), 'data.vocabulary': 'word(min_count=5)'}
# window: letters or words to each side of the centre of local attention; words have 1 to 22 letters, mostly 5 to 11,
# and captions mostly 8 to 17 words.
FORMS = {
  'small': {'task': CMUDICT, 'window': 3, 'width': 64, 'batch_size': 64, 'steps': 1000},
  'full': {'task': CMUDICT, 'window': 3, 'width': 512, 'batch_size': 256, 'steps': 12_000},
  'multi30k_small': {'task': MULTI30K_SMALL, 'window': 5, 'width': 128, 'batch_size': 64, 'steps': 900},
  'multi30k': {'task': MULTI30K, 'window': 10, 'width': 512, 'batch_size': 128, 'steps': 3220},
}
SMALL_FORMS = ('small', 'multi30k_small')
SCORES = ('general', 'dot', 'concat', 'location(max_positions=96)')
ALIGNMENTS = ('softmax', 'local_m(width={})', 'local_p(width={})')
INPUT_FEEDING = (True, False)


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = default_config()
  config.update_from_flattened_dict(sizes['task'])
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
  config.evaluation.batch_size = 256
  config.evaluation.beams = 1
  return config


def get_sweep(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  scores = grid({'model.attention.score': SCORES})
  alignments = grid({'model.attention.alignment': [spec.format(sizes['window']) for spec in ALIGNMENTS]})
  feeding = grid({'model.decoder.input_feeding': INPUT_FEEDING})
  baseline = scores[0] | alignments[0] | feeding[0]
  one_at_a_time = [baseline | change for change in ({}, *scores[1:], *alignments[1:], *feeding[1:])]
  return Sweep(
    one_at_a_time if form in SMALL_FORMS else product(scores, alignments, feeding),
    baseline=baseline,
    metrics=tuple(parse(spec)[0] for spec in sizes['task']['evaluation.metrics']),
    question='Which score, which alignment, and input feeding or not?',
  )
