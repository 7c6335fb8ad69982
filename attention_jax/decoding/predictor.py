"""Prediction: searches for hypotheses of source text in batches; the search is compiled once for each batch shape."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attention_jax.analysis.alignment import Link, links_from_weights
from attention_jax.data.batching import Batch, eval_batches
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.generate import Hypotheses
from attention_jax.decoding.loop import MIN_SOURCES
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.tokens import EOS, PAD, UNK
from attention_jax.training.compiling import compiler_options
from attention_jax.training.partition import make_mesh, place_parameters, shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.state import count_parameters
from attention_jax.training.watch import Watch, unwatched

# Maximum number of tokens of a source, EOS included, unless a bucket is longer: memory is proportional to the length,
# or to its square. A multiple of 32, because sources longer than all buckets are padded to one.
MAX_SOURCE_LENGTH = 10_240


class Hypothesis(NamedTuple):
  """One output for a source.

  Attributes:
    text: the decoded text.
    tokens: its tokens, without EOS.
    score: its ranking score, see Ranking.
    log_prob: natural log of its probability given the required prefix, if any; EOS included.
    weights: [T, S] attention weights, with a row for EOS and a column for the source's EOS; for a latent alignment,
      those given the whole hypothesis.
  """

  text: str
  tokens: list[str]
  score: float
  log_prob: float
  weights: np.ndarray

  @property
  def alignment(self) -> tuple[Link, ...]:
    """The (source token, target token) links of the largest weights, see `links_from_weights`."""
    return links_from_weights(self.weights, self.weights.shape[1] - 1, len(self.tokens))


class Prediction(NamedTuple):
  """A source and its hypotheses.

  Attributes:
    source: the source text.
    tokens: its tokens, without EOS.
    hypotheses: best first; samples in the order of sampling; none for a source that is too
      long, see Predictor.max_source_length, or if no hypothesis has a finite probability.
  """

  source: str
  tokens: list[str]
  hypotheses: list[Hypothesis]


class Predictor:
  """Translates lines of text. Every process searches its share of the batches, and has the predictions of all.

  Args:
    model: a trained model.
    params: its parameters.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    buckets: buckets of training; longer sources, of up to MAX_SOURCE_LENGTH tokens, share one more, whose length is
      that of the longest of them, rounded up to a multiple of 32 if the model accepts it.
    max_length: maximum length of hypotheses, EOS included; 0 for the longest target of the buckets.
    batch_size: sources per batch, rounded up to a multiple of the number of devices; few lines use a smaller batch.
    ranking: ranking of hypotheses unless a call sets another one.
    constraints: constraints on hypotheses.
    replace_unknown: whether an unknown token is replaced by the source token with the largest weight (Jean et al. 2015;
      Luong et al. 2015).
    mesh: the mesh of the devices; by default one of this process's devices.
    rounds: number of times that lines are expected to be predicted; together with their number it selects how the
      search is compiled, see compiling.compiler_options.
  """

  def __init__(
    self,
    model: EncoderDecoder,
    params: Any,
    source_vocab: Vocabulary,
    target_vocab: Vocabulary,
    *,
    buckets: Sequence[Sequence[int]],
    max_length: int = 0,
    batch_size: int = 128,
    ranking: Ranking = DEFAULT_RANKING,
    constraints: Constraints = NO_CONSTRAINTS,
    replace_unknown: bool = False,
    rounds: int = 1,
    mesh: Mesh | None = None,
  ):
    self.model = model
    self.source_vocab = source_vocab
    self.target_vocab = target_vocab
    self.ranking = ranking
    self.constraints = constraints
    self.max_length = max_output_length(buckets, max_length)
    self._replace_unknown = replace_unknown
    self._rounds = rounds
    self.buckets = buckets
    self._longest_bucket = max(source for source, _ in buckets)
    self._mesh = mesh or make_mesh(jax.local_devices())
    self._batch_size = self._round_to_devices(batch_size)
    # For few sources, a full batch would compile the search for every size to which shrinking_while_loop shrinks it.
    self._small_batch_size = self._round_to_devices(min(batch_size, MIN_SOURCES))
    self._compiled_searches: dict[tuple[BeamSearch | Sampling, Ranking, bool], Callable] = {}
    self._accepted_lengths: dict[int, bool] = {}
    self.set_params(params)

  def set_params(self, params: Any) -> None:
    """Replaces the parameters; nothing is compiled again."""
    self._params = place_parameters(params, self._mesh)

  def __call__(self, lines: Sequence[str], **options: Any) -> list[Prediction]:
    """Returns one prediction per line, in order; the options are those of `stream`."""
    predictions: list[Prediction | None] = [None] * len(lines)
    for row, prediction in self.stream(lines, **options):
      predictions[row] = prediction
    return predictions

  def stream(
    self,
    lines: Sequence[str],
    *,
    beams: int = 1,
    groups: int = 1,
    diversity: float = 0.5,
    ranking: Ranking | None = None,
    sampling: Sampling | None = None,
    line_numbers: Sequence[int] | None = None,
    prefixes: Sequence[str] | None = None,
    watch: Watch = unwatched,
  ) -> Iterable[tuple[int, Prediction]]:
    """Yields (row, prediction) as soon as a batch, of sources of similar length, is finished.

    Sources that are too long, see `max_source_length`, come first.

    Args:
      lines: the sources.
      beams: beams of the search; 1 is greedy.
      groups: number of groups of a diverse beam search, see search.beam.
      diversity: penalty of a diverse beam search, see search.beam.
      ranking: ranking of hypotheses; by default that of the predictor.
      sampling: options of sampling, which replaces the search; None for a search.
      line_numbers: number of each line, on which its samples depend; by default its index in `lines`.
      prefixes: required beginning of the hypotheses of each line, '' for none.
      watch: called before each batch.

    Raises:
      UserError: if `line_numbers` or `prefixes` does not have an entry for each line, for a prefix that leaves no room
        within the maximum length, for replace_unknown with a model that does not attend, and for options of the beam
        search that search.beam rejects.
    """
    for name, values in (('prefixes', prefixes), ('line_numbers', line_numbers)):
      if values is not None and len(values) != len(lines):
        raise UserError(f'{name} must have an entry for each of the {len(lines)} lines, got {len(values)}')
    if self._replace_unknown and not self.model.traits.attends:
      raise UserError('replace_unknown needs attention weights, but the decoder does not attend')
    corpus = Corpus(list(lines), list(prefixes or [''] * len(lines)))
    encoded = encode(corpus, self.source_vocab, self.target_vocab)
    if prefixes:
      self._check_prefixes(prefixes, encoded.lengths[1] - 1)
    # The seed is an input of the compiled search, so that all seeds share one.
    strategy = dataclasses.replace(sampling, seed=0) if sampling else BeamSearch(beams, groups, diversity)
    batch_size = self._small_batch_size if len(lines) <= self._small_batch_size else self._batch_size
    run_search = self._compiled_search(strategy, ranking or self.ranking, -(-len(lines) // batch_size))
    longest = self.max_source_length(int(encoded.lengths[0].max(initial=1)))
    for row in np.flatnonzero(encoded.lengths[0] > longest):
      yield int(row), Prediction(lines[row], self.source_vocab.tokenize(lines[row]), [])

    numbers = np.asarray(range(len(lines)) if line_numbers is None else line_numbers, np.int32)

    def search(batch: Batch) -> Hypotheses:
      rng_inputs = sampling and (np.full_like(batch.index, sampling.seed), numbers[batch.index])
      prefix_ids = self._prefix_ids(batch) if prefixes else None
      inputs = (batch.source, batch.source_mask, rng_inputs, prefix_ids)
      return run_search(self._params, *shard_rows(inputs, self._mesh))

    batches = eval_batches(encoded, self._search_buckets(encoded, longest), batch_size)
    for batch, hypotheses in map_batches(search, batches, watch, self._mesh):
      yield from self._predictions(batch, hypotheses, corpus)

  def max_source_length(self, length: int) -> int:
    """Returns the length of the longest source, EOS included, that can be searched: at most `length`.

    The model must accept it, and it must not exceed MAX_SOURCE_LENGTH or, if that is longer, the longest bucket. If the
    model rejects even one token, only the second condition applies, and the search reports the error.
    """
    length = min(length, max(self._longest_bucket, MAX_SOURCE_LENGTH))
    if self._is_accepted(length) or not self._accepts_length(1):
      return length  # a model that rejects even one token does so for a reason other than the length
    accepted = 1
    rejected = length
    while rejected - accepted > 1:
      middle = (accepted + rejected) // 2
      if self._accepts_length(middle):
        accepted = middle
      else:
        rejected = middle
    return accepted

  def _round_to_devices(self, rows: int) -> int:
    devices = self._mesh.devices.size
    return -(-rows // devices) * devices

  def _compiled_search(self, strategy: BeamSearch | Sampling, ranking: Ranking, batches: int) -> Callable:
    """The compiled search, made once for each strategy and ranking, and for few and for many batches."""
    runs = batches * self._rounds * strategy.hypotheses
    options = compiler_options(runs, count_parameters(self._params))
    key = (strategy, ranking, options is None)
    if key not in self._compiled_searches:
      self._compiled_searches[key] = compile_search(
        self.model, strategy, self.max_length, ranking, self._mesh, options, self.constraints
      )
    return self._compiled_searches[key]

  def _is_accepted(self, length: int) -> bool:
    """`_accepts_length`, without tracing a model for a length of its buckets; those of an ensemble are of its first."""
    is_trained = length <= self._longest_bucket and not isinstance(self.model, Ensemble)
    return is_trained or self._accepts_length(length)

  def _accepts_length(self, length: int) -> bool:
    """Whether the model accepts a source of this length; positions or parameters of some models limit it."""
    if length not in self._accepted_lengths:
      self._accepted_lengths[length] = self._can_trace(length)
    return self._accepted_lengths[length]

  def _can_trace(self, length: int) -> bool:
    """Whether encoding and the first step raise no UserError for a source of this length, by its shapes alone."""

    def first_step(params, source, mask):
      variables = {'params': params}
      carry, memory = self.model.apply(variables, source, mask, self.max_length, method='start')
      return self.model.apply(variables, carry, source[:, 0], memory, method='step')

    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    mask = jax.ShapeDtypeStruct(ids.shape, jnp.bool_)
    try:
      jax.eval_shape(first_step, self._params, ids, mask)
    except UserError:
      return False
    return True

  def _search_buckets(self, encoded: EncodedCorpus, longest: int) -> list[tuple[int, int]]:
    """Buckets for sources of up to `longest` tokens and every target of the corpus."""
    target_length = int(encoded.lengths[1].max(initial=1))
    lengths = search_lengths(self.buckets, longest)
    # Lengths beyond the buckets are rounded up, and buckets of an ensemble are those of its first model: both may be
    # more than the model accepts. Several such lengths become one.
    source_lengths = {length if self._is_accepted(length) else longest for length in lengths}
    return [(length, target_length) for length in sorted(source_lengths)]

  def _check_prefixes(self, prefixes: Sequence[str], lengths: np.ndarray) -> None:
    """Raises UserError for a prefix that leaves no room for EOS."""
    for prefix, length in zip(prefixes, lengths, strict=True):
      if length >= self.max_length:
        limit = f'at most {self.max_length - 1} tokens, as hypotheses have at most {self.max_length} with EOS'
        raise UserError(f'a prefix must have {limit}, got {length}: {prefix[:40]!r}')

  def _prefix_ids(self, batch: Batch) -> np.ndarray:
    """The prefixes [B, P] of a batch; P is a multiple of 8, so that few shapes are compiled."""
    prefixes = np.where(batch.target == EOS, PAD, batch.target)
    return np.pad(prefixes, ((0, 0), (0, -prefixes.shape[1] % 8)), constant_values=PAD)

  def _predictions(self, batch: Batch, hypotheses: Hypotheses, corpus: Corpus) -> Iterator[tuple[int, Prediction]]:
    """(row of the corpus, prediction) of each row of a batch except fillers."""
    beams = range(hypotheses.lengths.shape[1])
    for i, row in enumerate(batch.index):
      if row >= 0:
        source_length = int(batch.source_mask[i].sum())
        tokens = self.source_vocab.tokenize(corpus.source[row])
        prefix = self.target_vocab.tokenize(corpus.target[row])
        results = [
          self._make_hypothesis(hypotheses, i, k, source_length, tokens, prefix)
          for k in beams
          if hypotheses.lengths[i, k]
        ]
        yield int(row), Prediction(corpus.source[row], tokens, results)

  def _make_hypothesis(
    self, hypotheses: Hypotheses, i: int, k: int, source_length: int, source: list[str], prefix: list[str]
  ) -> Hypothesis:
    """Decodes one hypothesis.

    Args:
      hypotheses: the results of a batch.
      i: row of the batch.
      k: number of the hypothesis.
      source_length: tokens of the source, EOS included.
      source: tokens of the source.
      prefix: tokens with which the hypothesis begins; they may be out of vocabulary.
    """
    length = int(hypotheses.lengths[i, k])
    ids = hypotheses.tokens[i, k, :length].tolist()
    if ids[-1] == EOS:
      ids = ids[:-1]
    weights = hypotheses.weights[i, k, :length, :source_length].copy()  # a view would keep the whole batch in memory
    # Ids vocab_size + s are words of the source; ids vocab_size + len(source) + t are words of the prefix.
    vocab_size = len(self.target_vocab)
    words = source + prefix
    if self._replace_unknown and source:
      # Without any weight on a word of the source, the token stays unknown.
      word_weights = weights[: len(ids), : len(source)]
      best_ids = np.where(word_weights.any(-1), vocab_size + word_weights.argmax(-1), UNK)
      ids = [int(best_ids[t]) if id == UNK else id for t, id in enumerate(ids)]
    ids[: len(prefix)] = [vocab_size + len(source) + t for t in range(len(prefix))]
    tokens = [self.target_vocab.id_to_token(id) if id < vocab_size else words[id - vocab_size] for id in ids]
    text = self.target_vocab.decode(ids, words)
    score = float(hypotheses.scores[i, k])
    log_prob = float(hypotheses.log_probs[i, k])
    return Hypothesis(text, tokens, score, log_prob, weights)


def search_lengths(buckets: Sequence[Sequence[int]], longest: int) -> tuple[int, ...]:
  """Returns the source lengths of the buckets, and `longest` rounded up to a multiple of 32 if it exceeds them."""
  lengths = sorted({source for source, _ in buckets})
  if longest > lengths[-1]:
    lengths.append(-(-longest // 32) * 32)
  return tuple(lengths)


def max_output_length(buckets: Sequence[Sequence[int]], max_length: int) -> int:
  """Returns the maximum length of hypotheses, EOS included: max_length, or for 0 the longest target of the buckets."""
  return max_length or max(target for _, target in buckets)
