"""From source text to hypotheses: search over whole batches, one compiled call per bucket."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.data.batching import Batch, in_order
from attention_jax.data.encoding import Encoded, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.functional.masking import padding_mask
from attention_jax.models import search
from attention_jax.models.sampling import Sampling, sample
from attention_jax.models.seq2seq import EncoderDecoder
from attention_jax.tokens import EOS
from attention_jax.training.partition import make_mesh, place, replicate


class Hypothesis(NamedTuple):
  """One output of a source: tokens without EOS; weights [T, S] with a row for EOS and a column for the source's EOS."""

  text: str
  tokens: list[str]
  score: float
  log_prob: float
  weights: np.ndarray


class Prediction(NamedTuple):
  """A source, its tokens without EOS, and its hypotheses, best first, or in the order in which they were drawn."""

  source: str
  tokens: list[str]
  hypotheses: list[Hypothesis]


class Predictor:
  """Translates lines of text. Every process does all of it on its own devices.

  Args:
    model, params: a trained model.
    source_vocab, target_vocab: the run's vocabularies.
    buckets: of training; a longer source gets a bucket of its own, rounded up to a multiple of 32.
    max_length: of hypotheses, EOS included; 0 is the longest target of the buckets.
    batch_size: sources searched at once, rounded up to a multiple of the devices.
    ranking: of hypotheses, where a call does not say another.
  """

  def __init__(
    self, model: EncoderDecoder, params: Any, source_vocab: Vocabulary, target_vocab: Vocabulary, *,
    buckets: Sequence[Sequence[int]], max_length: int = 0, batch_size: int = 128,
    ranking: search.Ranking = search.DEFAULT,
  ):  # fmt: skip
    self.model, self.source_vocab, self.target_vocab, self.ranking = model, source_vocab, target_vocab, ranking
    self._mesh = make_mesh(jax.local_devices())
    self.use(params)
    self._buckets = buckets
    self.max_length = longest_output(buckets, max_length)
    devices = self._mesh.devices.size
    self._rows = -(-batch_size // devices) * devices
    self._search = functools.cache(lambda beams, ranking: compile_search(model, beams, self.max_length, ranking))
    self._sample = functools.cache(lambda how, ranking: compile_sampling(model, how, self.max_length, ranking))

  def use(self, params: Any) -> None:
    """Predicts with these parameters from now on; nothing is compiled again."""
    self._params = replicate(jax.device_get(params), self._mesh)

  def __call__(
    self, lines: Sequence[str], *, beams: int = 1, ranking: search.Ranking | None = None,
    sampling: Sampling | None = None, first: int = 0,
  ) -> list[Prediction]:  # fmt: skip
    """One prediction per line, in order. beams=1 is greedy search.

    Args:
      sampling: draws hypotheses instead of searching for them.
      first: the number of the first line; what is drawn of a line depends on its number.
    """
    found: list[Prediction | None] = [None] * len(lines)
    for row, prediction in self.stream(lines, beams=beams, ranking=ranking, sampling=sampling, first=first):
      found[row] = prediction
    return found

  def stream(
    self, lines: Sequence[str], *, beams: int, ranking: search.Ranking | None = None,
    sampling: Sampling | None = None, first: int = 0,
  ) -> Iterable[tuple[int, Prediction]]:  # fmt: skip
    """(row, prediction) as they get done: batches of sources of similar length."""
    corpus = Corpus(list(lines), [''] * len(lines))
    encoded = encode(corpus, self.source_vocab, self.target_vocab)
    find = functools.partial(self._search, beams, ranking or self.ranking)
    if sampling:  # one program for all seeds
      find = functools.partial(self._sample, dataclasses.replace(sampling, seed=0), ranking or self.ranking)
    for batch in in_order(encoded, self._any_target(encoded), self._rows):
      given = (batch.source, batch.source_mask)
      if sampling:
        given = *given, np.full_like(batch.index, sampling.seed), batch.index + first
      hypotheses = jax.device_get(find()(self._params, *place(given, self._mesh)))
      yield from self._read(batch, hypotheses, corpus.source)

  def _any_target(self, encoded: Encoded) -> list[tuple[int, int]]:
    return [(size, 1) for size in searched_sizes(self._buckets, int(encoded.lengths[0].max(initial=1)))]

  def _read(self, batch: Batch, found: search.Hypotheses, lines: Sequence[str]) -> Iterable[tuple[int, Prediction]]:
    for i, row in enumerate(batch.index):
      if row >= 0:
        size = int(batch.source_mask[i].sum())
        tokens, which = self.source_vocab.tokens(lines[row]), range(found.lengths.shape[1])
        best = [self._hypothesis(found, i, k, size, tokens) for k in which if found.lengths[i, k]]
        yield int(row), Prediction(lines[row], tokens, best)

  def _hypothesis(self, found: search.Hypotheses, i: int, k: int, size: int, source: list[str]) -> Hypothesis:
    length = int(found.lengths[i, k])
    ids = found.tokens[i, k, :length].tolist()
    content = ids[:-1] if ids[-1] == EOS else ids
    known = len(self.target_vocab)
    tokens = [self.target_vocab.piece(id) if id < known else source[id - known] for id in content]
    weights = found.weights[i, k, :length, :size].copy()  # a view would keep the whole batch
    text = self.target_vocab.decode(content, source)
    return Hypothesis(text, tokens, float(found.scores[i, k]), float(found.log_probs[i, k]), weights)


def searched_sizes(buckets: Sequence[Sequence[int]], longest: int) -> tuple[int, ...]:
  """The lengths to which sources are padded for a search, where the longest of them has so many tokens."""
  sizes = sorted({source for source, _ in buckets})
  return (*sizes, *([-(-longest // 32) * 32] if longest > sizes[-1] else []))


def longest_output(buckets: Sequence[Sequence[int]], max_length: int) -> int:
  """Tokens that a hypothesis may have, EOS included: max_length, or the longest target of the buckets for 0."""
  return max_length or max(target for _, target in buckets)


def compile_search(model: EncoderDecoder, beams: int, max_length: int, ranking: search.Ranking = search.DEFAULT):
  """(params, source [B, S], source_mask [B, S]) -> search.Hypotheses, compiled once per shape. One beam is greedy."""
  find = search.greedy if beams == 1 else functools.partial(search.beam, beams=beams)
  return jax.jit(_finder(model, find, max_length, ranking))


def compile_sampling(
  model: EncoderDecoder, sampling: Sampling, max_length: int, ranking: search.Ranking = search.DEFAULT
):
  """As compile_search, but drawn: seeds [B] and numbers [B] of the sources follow source and source_mask."""

  def run(params, source, source_mask, seeds, numbers):
    rngs = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(seeds, numbers)
    draw = functools.partial(sample, rngs=rngs, sampling=sampling)
    return _finder(model, draw, max_length, ranking)(params, source, source_mask)

  return jax.jit(run)


def _finder(model: EncoderDecoder, find: Callable, max_length: int, ranking: search.Ranking) -> Callable:
  """(params, source, source_mask) -> what `find` makes of the model's steps."""

  def run(params, source, source_mask):
    variables = {'params': params}
    carry, memory = model.apply(variables, source, source_mask, max_length, method='start')
    step = lambda carry, token, memory: model.apply(variables, carry, token, memory, method='step')
    found = find(step, carry, memory, max_length=max_length, ranking=ranking, source_mask=source_mask)
    if model.latent:
      found = found._replace(weights=_posterior(model, variables, source, source_mask, found))
    return found

  return run


def _posterior(model, variables: Any, source: jax.Array, source_mask: jax.Array, found: search.Hypotheses):
  """Weights [B, K, T, S] of a latent alignment given whole hypotheses: while searching, only what stood before."""

  def forced(given):
    tokens, lengths = given
    outputs = model.apply(variables, source, source_mask, tokens)
    return model.posterior(outputs, padding_mask(lengths, tokens.shape[-1]))

  by_rank = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (found.tokens, found.lengths))
  return jnp.moveaxis(jax.lax.map(forced, by_rank), 0, 1)
