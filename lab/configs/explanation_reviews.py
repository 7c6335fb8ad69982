"""Classification of film reviews by additive attention with learned or uniform weights, over a recurrent encoder and,
in the full form, also over embeddings alone.

  python -m experiments.ablate --config=lab/configs/explanation_reviews.py --workdir=runs/claims/reviews

--config.data.folder=FOLDER is the folder of train.jsonl.gz and dev.jsonl.gz of IMDB. The full form, for an accelerator:
--config=lab/configs/explanation_reviews.py:full --seeds=5.
"""

from attention_jax.errors import choose
from attention_jax.sweeps.space import Sweep, grid
from attention_jax.systems.config import default_config

# Embeddings without a recurrence are a part of the full form alone.
FORMS = {
  'small': {'width': 50, 'words': 100, 'steps': 470, 'encoders': ('birnn(rnn="gru", features=50)',)},
  'full': {'width': 128, 'words': 400, 'steps': 2500, 'encoders': ('birnn(rnn="gru", features=128)', 'embedded')},
}
UNIFORM = 'softmax(temperature=1e9)'  # uniform weights: the parameters of the score remain, without influence


def get_config(form: str = 'small'):
  sizes = FORMS[choose(form, FORMS, 'form')]
  width = sizes['width']
  config = default_config('classification')
  config.data.task = "jsonl(train='train.jsonl.gz', validation='dev.jsonl.gz', html=True)"
  config.data.folder = 'data/imdb'
  config.data.vocabulary = 'word(min_count=5)'
  config.data.joined = True
  config.data.buckets = ((1, sizes['words']),)
  config.data.batch_size = 64
  config.model.classifier = 'flat'
  config.model.encoder = sizes['encoders'][0]
  config.model.embedding = width
  config.model.attention.score = 'dot'  # of tanh(W h + b) and a learned vector: the additive score without a query
  config.model.attention.features = width
  config.model.dropout = 0.3
  config.training.steps = sizes['steps']
  config.training.schedule = 'cosine(peak=3e-3, warmup=50)'
  config.training.evaluate_every = sizes['steps']
  config.training.checkpoint_every = sizes['steps']
  config.training.select = 'accuracy'
  return config


def get_sweep(form: str = 'small'):
  encoders = FORMS[choose(form, FORMS, 'form')]['encoders']
  return Sweep(
    grid({'model.encoder': encoders, 'model.attention.alignment': ['softmax', UNIFORM]}),
    baseline={'model.encoder': encoders[0], 'model.attention.alignment': 'softmax'},
    metrics=('accuracy', 'loss'),
    question='Do learned weights give better classifiers of reviews than uniform ones?',
  )
