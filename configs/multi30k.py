"""Multi30k task 1 (image captions), English -> German by words, lower-cased and tokenised.

  python -m experiments.train --config=configs/multi30k.py:bahdanau2015_deep_tanh --workdir=runs/m \\
    --config.data.folder=FOLDER

Measured on 2 CPU cores, BLEU on test2016 (beam 5, tokenize=none): luong2015_birnn 37.37 after 52 minutes on a machine
that also ran other work; bahdanau2015_deep_tanh 37.43 at commit 7428385, with 2800 updates and another order of the
batches; transformer2017_tiny 40.07 after 94 minutes on one core, and 61.26 into French after 110 CPU minutes.

FOLDER contains train.en, train.de, val.en, val.de, test2016.en and test2016.de. Into French:

  --config.data.task="text(train='train', validation='val', test='test2016', source='en', target='fr')"
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

# Training settings of Transformers. Those of the tiny one are the settings of its row in RESULTS.md; the others use a
# lower rate and a longer warmup than recurrent networks, and are untested.
TRANSFORMER_SCHEDULE = {'training.schedule': 'cosine(peak=1e-3, warmup=1000)'}
OVERRIDES = {
  name: TRANSFORMER_SCHEDULE for name in ('transformer2017', 'transformer2017_base', 'transformer2017_big', 'shaw2018')
}
OVERRIDES['transformer2017_small'] = {'training.schedule': 'cosine(peak=1.7e-3, warmup=1000)'}
OVERRIDES['transformer2017_tiny'] = {
  'data.vocabulary': 'subword(size=10000)',
  'data.shared_vocabulary': True,
  'model.share_embeddings': True,
  'training.schedule': 'cosine(peak=2.5e-3, warmup=1000)',
  'training.steps': 7360,
  'training.average': 0.998,
}


def get_config(preset: str = 'bahdanau2015_deep_tanh'):
  config = default_config()
  config.data.task = "text(train='train', validation='val', test='test2016', source='en', target='de')"
  config.data.folder = 'data/multi30k'
  config.data.vocabulary = 'word(min_count=2)'
  config.data.buckets = ((10, 10), (12, 12), (14, 14), (16, 16), (20, 20), (26, 26), (44, 48))
  config.data.batch_size = 128
  config.model.embedding = 256
  config.model.dropout = 0.3
  config.training.steps = 3220
  config.training.schedule = 'cosine(peak=2e-3, warmup=200)'
  config.training.label_smoothing = 0.1
  config.training.log_every = 50
  config.training.evaluate_every = 230
  config.training.checkpoint_every = 230
  config.training.keep = 5
  config.training.select = 'bleu'
  config.evaluation.metrics = ('bleu(tokenize="none")', 'chrf', 'ter')
  config.evaluation.max_length = 50
  apply_preset(config, preset, features=512)
  config.update_from_flattened_dict(OVERRIDES.get(preset, {}))
  return config
