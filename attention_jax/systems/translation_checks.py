"""Checks of the config of a translation system, by itself and with its data."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attention_jax.data.batching import check_rows_fit, dummy_batch
from attention_jax.data.encoding import assign_buckets, check_buckets
from attention_jax.data.tasks import TranslationData
from attention_jax.errors import UserError
from attention_jax.inference.compiled_search import compile_beam_search
from attention_jax.inference.predictor import max_output_length
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.systems.base import Config, trace_loss
from attention_jax.training.loss import Loss


def check_shared_vocabulary(config: Config, model: EncoderDecoder) -> None:
  """Raises UserError for a model that needs one vocabulary for both sides, unless the config shares it."""
  # Not checked by size: two vocabularies of equal size would pass for a shared one.
  if config['data']['shared_vocabulary']:
    return
  if config['model']['share_embeddings']:
    field = 'share_embeddings=True'
  elif model.copies:
    field = f'output={config["model"]["output"]!r}'
  else:
    return
  raise UserError(f'config.model.{field} needs one vocabulary for both sides; set config.data.shared_vocabulary=True')


def check_lengths(config: Config, data: TranslationData, model: EncoderDecoder, loss: Loss, params: Any) -> None:
  """Traces training and search at the greatest lengths to which batches are padded.

  A model with a maximum length would otherwise fail hours later, at the longest source or target of a split.

  Args:
    config: the whole config of the run.
    data: the splits.
    model: the model.
    loss: the training loss.
    params: the shapes of the model's parameters.

  Raises:
    UserError: if too few rows of a split fit a bucket, and for lengths that the model does not support.
  """
  buckets = check_buckets(config['data']['buckets'])
  assigned = {split: assign_buckets(encoded, buckets) for split, encoded in data.encoded.items()}
  for split, indices in assigned.items():
    check_rows_fit(split, indices, config['data']['max_left_out'])
  used = np.unique(np.concatenate(list(assigned.values())))
  sources, targets = zip(*(buckets[i] for i in used if i >= 0), strict=True)
  trace_loss(loss, params, dummy_batch(max(sources), max(targets)))
  searched = [encoded for split, encoded in data.encoded.items() if split != 'train']
  longest = max((int(encoded.lengths[0].max(initial=1)) for encoded in searched), default=1)
  # Sources longer than all buckets are padded beyond their length only if the model accepts it, see Predictor.
  search_length = min((source for source, _ in buckets if source >= longest), default=longest)
  search = compile_beam_search(model, 1, max_output_length(buckets, config['evaluation']['max_length']))
  batch = dummy_batch(max(*sources, search_length))
  jax.eval_shape(search, params, batch.source, batch.source_mask)


def common_buckets(buckets: Sequence[Sequence[int]], models: Sequence[EncoderDecoder]) -> list[Sequence[int]]:
  """Returns the buckets whose lengths all models accept.

  Raises:
    UserError: if there are none.
  """
  accepted = [bucket for bucket in buckets if all(_accepts(model, bucket) for model in models)]
  if not accepted:
    raise UserError(f'config.data.buckets of the first run are {buckets}; another run accepts none of these lengths')
  return accepted


def _accepts(model: EncoderDecoder, bucket: Sequence[int]) -> bool:
  """Whether a model accepts the lengths of a bucket; learned positions or parameters of some models limit them."""

  def run(initial, batch):
    arrays = (initial.source, initial.source_mask, initial.target)
    return model.apply(model.init(jax.random.key(0), *arrays), batch.source, batch.source_mask, batch.target)

  try:
    jax.eval_shape(run, dummy_batch(), dummy_batch(*bucket))
  except UserError:
    return False
  return True


def check_no_source_words(config: Config) -> None:
  """Raises UserError for options of the search that need the words of a source."""
  if config['evaluation']['replace_unknown']:
    raise UserError('evaluation.replace_unknown must be False for pictures, which have no source words; got True')
