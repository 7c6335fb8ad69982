"""What a model says of given targets, token by token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.data.batching import eval_batches
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.errors import UserError
from attention_jax.losses.sequence import replace_unreachable_targets
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.models.layered import LayeredDecoder
from attention_jax.training.partition import jit_on_mesh, make_mesh, replicate, shard_batch


class ScoredPair(NamedTuple):
  """A target: its tokens without EOS; the natural log of the probability of each and of EOS; weights [T, S] with a row
  for EOS and a column for the source's EOS, of a latent alignment those given the whole target; where it was asked for
  the weights [L, N, T, S] of every layer and head, else None."""

  tokens: list[str]
  log_probs: list[float]
  weights: np.ndarray
  layers: np.ndarray | None = None


def score_pairs(
  model: EncoderDecoder,
  params: Any,
  corpus: Corpus,
  source_vocab: Vocabulary,
  target_vocab: Vocabulary,
  buckets: Sequence[Sequence[int]],
  batch_size: int = 128,
  layers: bool = False,
) -> list[ScoredPair]:
  """One ScoredPair per pair, in order. Pairs longer than every bucket get one of their own, in steps of 32.

  Args: layers, whether with the weights of every layer and head.
  Raises: UserError where they are asked for of a decoder that has one layer of attention or none.
  """
  if layers and isinstance(model, Ensemble):
    raise UserError('layers are those of one run, and several speak as one by the mean of their weights; possible: one')
  if layers and not isinstance(model.decoder, LayeredDecoder):
    possible = ', '.join(name for name, cls in DECODERS.items() if issubclass(cls, LayeredDecoder))
    raise UserError(f'this decoder does not attend in several layers; possible: {possible}')

  def run(params, batch):
    batch = replace_unreachable_targets(model, batch)
    outputs = model.apply({'params': params}, batch.source, batch.source_mask, batch.target)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(outputs.logits), batch.target[..., None], axis=-1)[..., 0]
    return log_probs, model.posterior(outputs, batch.target_mask), outputs.layers if layers else ()

  mesh = make_mesh(jax.local_devices())
  run = jit_on_mesh(mesh, run)
  rows = -(-batch_size // mesh.devices.size) * mesh.devices.size
  encoded = encode(corpus, source_vocab, target_vocab)
  params = replicate(jax.device_get(params), mesh)
  found: list[ScoredPair | None] = [None] * encoded.rows
  for batch in eval_batches(encoded, _holding(encoded, buckets), rows):
    log_probs, weights, every = jax.device_get(run(params, shard_batch(batch, mesh)))
    for i in np.flatnonzero(batch.index >= 0):
      row, size = batch.index[i], int(batch.source_mask[i].sum())
      length, tokens = int(batch.target_mask[i].sum()), target_vocab.tokenize(corpus.target[batch.index[i]])
      of_layers = np.moveaxis(every[i, :length, ..., :size], 0, 2).copy() if layers else None
      found[row] = ScoredPair(tokens, log_probs[i, :length].tolist(), weights[i, :length, :size].copy(), of_layers)
  return found


def _holding(encoded: EncodedCorpus, buckets: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
  """The buckets, and one that holds the longest source and target where they do not."""
  longest = tuple(-(-int(lengths.max()) // 32) * 32 for lengths in encoded.lengths)
  return [*map(tuple, buckets), *([] if longest in map(tuple, buckets) else [longest])]
