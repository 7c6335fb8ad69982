"""A question and records of people -> an answer with their names, many of which are out of vocabulary. No download.

  python -m experiments.train --config=configs/records.py:see2017 --workdir=runs/records

Measured, seed 0, on one core, exact match on test and on unseen names: see2017 with
--config.training.evaluate_every=250 97.4 and 98.5 %; vinyals2015 97.3 and 97.9, gu2016 91.9 and 77.8 %;
transformer2017 with --config.model.output='pointer_generator(tied=True)' in 19 minutes 100 and 100 %.

bahdanau2015_deep_tanh, for comparison, cannot copy. The answers of vinyals2015 consist of words of the source.
"""

from attention_jax.systems.config import default_config
from attention_jax.systems.presets import apply_preset

# A lower rate and a longer warmup than for recurrent networks. With the higher rate, these two presets were trained for
# 400 updates only.
TRANSFORMER_SCHEDULE = {'training.schedule': 'cosine(peak=1e-3, warmup=300)'}
OVERRIDES = {name: TRANSFORMER_SCHEDULE for name in ('transformer2017', 'shaw2018')}
FORMS = {'pointer': 'list'}  # form of the answers by output layer; 'sentence' for all others


def get_config(preset: str = 'see2017'):
  config = default_config()
  config.data.vocabulary = 'word(min_count=40)'
  config.data.shared_vocabulary = True
  config.data.buckets = ((14, 13), (20, 18), (26, 23))  # of two, three and four people
  config.data.batch_size = 64
  config.model.embedding = 64
  config.model.dropout = 0.1
  config.training.steps = 3000
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = 500
  config.training.checkpoint_every = 500
  config.training.select = 'exact_match'
  config.evaluation.metrics = ('exact_match', 'token_error_rate')
  apply_preset(config, preset, features=128)
  config.update_from_flattened_dict(OVERRIDES.get(preset, {}))
  config.data.task = f'records(form={FORMS.get(config.model.output, "sentence")!r})'
  return config
