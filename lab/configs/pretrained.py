"""Softmax or 1.5-entmax in the attention over the source of an imported Transformer that is trained further.

The model is trained on Multi30k, written in the layout of MarianMT, and imported as a model of others would be:

  python -m experiments.train --config=lab/configs/pretrained.py:base --workdir=runs/claims/base
  python -m experiments.export --workdir=runs/claims/base --output=runs/claims/marian --format=marian
  python -m experiments.import_model --from=runs/claims/marian --workdir=runs/claims/imported
  python -m experiments.ablate --config=lab/configs/pretrained.py --workdir=runs/claims/pretrained --workers=2 \\
    --config.initial_run=runs/claims/imported

--config.data.folder=FOLDER of the first and the last command is that of configs/multi30k.py. The full form, for an
accelerator, trains further for longer: --config=lab/configs/pretrained.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from attention_jax.systems.config import default_config

# form -> updates, the learning rate, and the vocabulary: that of the imported run is a file of the exported one.
IMPORTED = "sentencepiece(path='runs/claims/marian/source.spm')"
FORMS = {
  'base': (2400, 'cosine(peak=2.5e-3, warmup=600)', 'subword(size=4000)'),
  'small': (400, 'cosine(peak=5e-4, warmup=50)', IMPORTED),
  'full': (4000, 'cosine(peak=5e-4, warmup=200)', IMPORTED),
}
STACK = 'transformer(features=128, layers=3, heads=4, hidden=256, bias=True)'


def get_config(form: str = 'small'):
  steps, schedule, vocabulary = FORMS[choose(form, FORMS, 'form')]
  config = default_config()
  config.data.task = "text(train='train', validation='val', test='test2016', source='en', target='de')"
  config.data.folder = 'data/multi30k'
  config.data.vocabulary = vocabulary
  config.data.shared_vocabulary = True
  config.data.buckets = ((14, 14), (20, 20), (48, 56))
  config.data.batch_size = 128
  config.model.encoder = STACK
  config.model.decoder = STACK
  config.model.attention.score = 'scaled_dot'
  config.model.attention.features = 128
  config.model.attention.heads = 4
  config.model.attention.bias = True
  config.model.output = 'tied'
  config.model.embedding = 128
  config.model.share_embeddings = True
  config.model.dropout = 0.2
  config.training.optimizer = 'adam(b2=0.98)'
  config.training.label_smoothing = 0.1
  config.training.steps = steps
  config.training.schedule = schedule
  config.training.evaluate_every = steps // 2
  config.training.select = 'bleu'
  config.evaluation.metrics = ('bleu(tokenize="none")', 'chrf')
  config.evaluation.max_length = 60
  return config


def get_sweep(form: str = 'small'):
  return Sweep(
    grid({'model.attention.alignment': ['softmax', 'entmax15']}),
    baseline={'model.attention.alignment': 'softmax'},
    metrics=('bleu', 'chrf', 'entropy'),
    question='Does a sparse alignment in place of the softmax change what an imported model translates?',
  )
