"""WMT 2014, English -> German: 4.5 million pairs, 32,000 subwords for both sides, batches of 24,576 tokens on
each side, padding included, and the schedule of Vaswani et al. 2017.

  python -m experiments.train --config=configs/wmt14.py:transformer2017_base --workdir=runs/wmt \\
    --config.data.folder=FOLDER

Not trained yet; `python -m lab.compile_for_pod --vocabulary_size=32000
--config=configs/wmt14.py:transformer2017_base` compiles its updates ahead of time.

FOLDER contains the tfds set wmt14_translate/de-en as array_record. transformer2017_big and gnmt2016 have the sizes of
their papers, gehring2017 the number of layers of its paper, all three with the settings in OVERRIDES. On more than
64 devices batches get filler rows, see docs/scaling.md.
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

# (features, layers) of presets that are not Transformers.
SIZES = {'gnmt2016': (1024, 8), 'gehring2017': (512, 15)}
OVERRIDES = {
  'transformer2017_big': {
    'training.steps': 300_000,
    'training.schedule': 'rsqrt(peak=5e-4, warmup=4000)',
    'training.keep': 20,
    'model.dropout': 0.3,
  },
  # Adam at the rate of the paper for all updates, where the paper switches to SGD; the penalties of its search.
  'gnmt2016': {
    'training.schedule': 'constant(rate=2e-4, warmup=200)',
    'training.clip': 5.0,
    'training.label_smoothing': 0.0,
    'model.embedding': 1024,
    'model.dropout': 0.2,
    'evaluation.alpha': 0.2,
    'evaluation.beta': 0.2,
    # A bridge from all final states of the encoder to all initial ones of the decoder would have more parameters than
    # the rest of the model.
    'model.decoder': 'gnmt(features=1024, layers=8, current=False, bridge=False)',
  },
  'gehring2017': {'model.dropout': 0.2},
}


def get_config(preset: str = 'transformer2017_base'):
  config = default_config()
  config.data.task = "tfds(name='wmt14_translate/de-en', source='en', target='de')"
  config.data.folder = '~/tensorflow_datasets'
  config.data.vocabulary = 'subword(size=32000, coverage=0.9995, max_lines=2000000)'
  config.data.shared_vocabulary = True
  config.data.buckets = ((16, 16), (32, 32), (64, 64), (96, 96), (128, 128))
  config.data.batch_size = 24576
  config.data.batch_unit = 'tokens'
  config.model.share_embeddings = True
  config.model.embedding = 512
  config.model.dropout = 0.1
  config.model.dtype = 'bfloat16'
  config.training.steps = 100_000
  config.training.schedule = 'rsqrt(peak=7e-4, warmup=4000)'
  config.training.label_smoothing = 0.1
  config.training.evaluate_every = 2000
  config.training.checkpoint_every = 1000
  config.training.keep = 5
  config.training.select = 'bleu'
  config.evaluation.metrics = ('bleu', 'chrf')
  config.evaluation.beams = 4
  config.evaluation.max_length = 160
  features, depth = SIZES.get(preset, (512, 6))
  apply_preset(config, preset, features=features, depth=depth)
  config.update_from_flattened_dict(OVERRIDES.get(preset, {}))
  return config
