"""Configs that several sweeps of lab/configs/ begin with."""

from typing import Any

from attention_jax.systems.config import default_config


def nettalk_config(steps: int, evaluations: int = 1) -> Any:
  """Returns a config for the pronunciation of words, from letters to phonemes, on the data of NETtalk.

  Fields of the model have their defaults, except a dropout of 0.1.

  Args:
    steps: number of updates.
    evaluations: number of evaluations during training.
  """
  config = _short_training(steps, evaluations)
  config.data.task = "tsv(train='train.tsv', validation='dev.tsv')"
  config.data.folder = 'data/nettalk'
  config.data.vocabulary = 'word'
  config.data.buckets = ((20, 20),)
  config.training.select = 'phoneme_error_rate'
  config.evaluation.metrics = ('phoneme_error_rate', 'sequence_error_rate')
  config.evaluation.group_references = True
  return config


def dates_config(steps: int, evaluations: int = 1) -> Any:
  """Returns a config for the conversion of dates to ISO 8601. Arguments and model: see `nettalk_config`."""
  config = _short_training(steps, evaluations)
  config.data.task = 'dates'
  config.data.buckets = ((20, 11), (42, 11))
  config.training.select = 'exact_match'
  config.evaluation.max_length = 12
  return config


def _short_training(steps: int, evaluations: int) -> Any:
  config = default_config()
  config.data.batch_size = 64
  config.model.dropout = 0.1
  config.training.steps = steps
  config.training.schedule = 'cosine(peak=3e-3, warmup=100)'
  config.training.evaluate_every = steps // evaluations
  config.evaluation.beams = 1
  return config
