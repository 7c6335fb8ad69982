"""Scoring of targets by teacher forcing, token by token."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis.alignment import Link, links_from_weights
from attention_jax.data.batching import Batch, dummy_batch, eval_batches
from attention_jax.data.encoding import EncodedCorpus, assign_buckets, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.errors import UserError
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoder_decoder import EncoderDecoder, replace_unreachable_targets
from attention_jax.models.layered import LayeredDecoder
from attention_jax.training.partition import fetch, jit_on_mesh, make_mesh, replicate, shard_batch


class ScoredPair(NamedTuple):
  """Scores of one target.

  Attributes:
    tokens: the tokens of the target, without EOS.
    log_probs: natural log of the probability of each token and of EOS; that of UNK for a token that the model cannot
      emit.
    weights: [T, S] attention weights, with a row for EOS and a column for the source's EOS; for a latent alignment,
      those given the whole target.
    layer_weights: [L, N, T, S] weights of every layer and head, or None.
  """

  tokens: list[str]
  log_probs: list[float]
  weights: np.ndarray
  layer_weights: np.ndarray | None = None

  @property
  def log_prob(self) -> float:
    """Natural log of the probability of the target, EOS included."""
    return sum(self.log_probs)

  @property
  def alignment(self) -> tuple[Link, ...]:
    """The (source token, target token) links of the largest weights, see `links_from_weights`."""
    return links_from_weights(self.weights, self.weights.shape[1] - 1, len(self.tokens))


class PairScorer:
  """Scores pairs by teacher forcing; the model is compiled once for each batch shape.

  Args:
    model: a trained model.
    params: its parameters.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    buckets: buckets of training. If a pair fits none, there is a further bucket for the longest source and target, with
      their lengths rounded up to multiples of 32 if the model accepts these, and unrounded otherwise.
    batch_size: pairs per batch, rounded up to a multiple of the number of devices.
  """

  def __init__(
    self,
    model: EncoderDecoder,
    params: Any,
    source_vocab: Vocabulary,
    target_vocab: Vocabulary,
    buckets: Sequence[Sequence[int]],
    batch_size: int = 128,
  ):
    self._model = model
    self._vocabularies = (source_vocab, target_vocab)
    self._buckets = buckets
    self._mesh = make_mesh(jax.local_devices())
    self._params = replicate(fetch(params), self._mesh)
    self._rows = -(-batch_size // self._mesh.devices.size) * self._mesh.devices.size
    self._compiled = {
      with_layers: jit_on_mesh(self._mesh, functools.partial(self._run, with_layers)) for with_layers in (False, True)
    }

  def __call__(self, corpus: Corpus, with_layer_weights: bool = False) -> list[ScoredPair]:
    """Returns one ScoredPair per pair of a corpus, in order.

    Args:
      corpus: the pairs.
      with_layer_weights: whether to return the weights of every layer and head.

    Raises:
      UserError: if `with_layer_weights` is set for an ensemble, or for a decoder that is not a LayeredDecoder; and if
        the model does not accept the longest source or target.
    """
    if with_layer_weights:
      _check_layered(self._model)
    if not corpus.source:
      return []
    run = self._compiled[with_layer_weights]
    encoded = encode(corpus, *self._vocabularies)
    pairs: list[ScoredPair | None] = [None] * encoded.rows
    for batch in eval_batches(encoded, _with_largest_bucket(encoded, self._buckets, self._accepts), self._rows):
      log_probs, weights, layer_weights = jax.device_get(run(self._params, shard_batch(batch, self._mesh)))
      for i in np.flatnonzero(batch.index >= 0):
        row = batch.index[i]
        source_length = int(batch.source_mask[i].sum())
        target_length = int(batch.target_mask[i].sum())
        # Copies, because views would keep the whole batch in memory.
        layers = layer_weights[i, :target_length, ..., :source_length] if with_layer_weights else None
        pairs[row] = ScoredPair(
          self._vocabularies[1].tokenize(corpus.target[row]),
          log_probs[i, :target_length].tolist(),
          weights[i, :target_length, :source_length].copy(),
          None if layers is None else np.moveaxis(layers, 0, 2).copy(),
        )
    return pairs

  def _run(self, with_layer_weights: bool, params: Any, batch: Batch) -> tuple[Any, ...]:
    batch = replace_unreachable_targets(self._model, batch)
    outputs = self._model.apply({'params': params}, batch.source, batch.source_mask, batch.target)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(outputs.logits), batch.target[..., None], axis=-1)[..., 0]
    layers = outputs.layers if with_layer_weights else ()
    return log_probs, self._model.posterior(outputs, batch.target_mask), layers

  def _accepts(self, bucket: tuple[int, int]) -> bool:
    """Whether the model accepts these lengths; positions or parameters of some models limit them."""
    try:
      jax.eval_shape(functools.partial(self._run, False), self._params, dummy_batch(*bucket))
    except UserError:
      return False
    return True


def has_layer_weights(model: EncoderDecoder) -> bool:
  """Returns whether a model has weights of every layer and head: not an ensemble, whose weights are means."""
  return not isinstance(model, Ensemble) and isinstance(model.decoder, LayeredDecoder)


def _check_layered(model: EncoderDecoder) -> None:
  """Raises UserError for an ensemble, and for a decoder that does not attend in each of its layers."""
  if isinstance(model, Ensemble):
    raise UserError(
      f'weights of layers need a single model, got an ensemble of {len(model.models)}, which averages weights'
    )
  if not has_layer_weights(model):
    expected = ', '.join(name for name, cls in DECODERS.items() if issubclass(cls, LayeredDecoder))
    raise UserError(f'the decoder does not attend in each of its layers; expected one of: {expected}')


def _with_largest_bucket(
  encoded: EncodedCorpus, buckets: Sequence[Sequence[int]], accepts: Callable[[tuple[int, int]], bool]
) -> list[tuple[int, int]]:
  """The buckets, and one for the longest source and the longest target if a pair fits no bucket."""
  buckets = [tuple(bucket) for bucket in buckets]
  if (assign_buckets(encoded, buckets) >= 0).all():
    return buckets
  longest = tuple(int(lengths.max()) for lengths in encoded.lengths)
  rounded = tuple(-(-length // 32) * 32 for length in longest)
  return [*buckets, rounded if accepts(rounded) else longest]
