"""From source text to hypotheses: search over whole batches, one compiled call per bucket."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attention_jax.data.batching import Batch, eval_batches
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding import search
from attention_jax.decoding.prefix import force_prefix
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.functional.copying import emittable
from attention_jax.functional.masking import padding_mask
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.tokens import EOS, PAD, UNK
from attention_jax.training.partition import jit_on_mesh, make_mesh, replicate, shard_batch


class Hypothesis(NamedTuple):
  """One output of a source: tokens without EOS; weights [T, S] with a row for EOS and a column for the source's EOS."""

  text: str
  tokens: list[str]
  score: float
  log_prob: float
  weights: np.ndarray


class Prediction(NamedTuple):
  """A source, its tokens without EOS, and its hypotheses, best first, or in the order in which they were drawn.

  There are none of a source that is longer than the model can read.
  """

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
    batch_size: sources searched at once, rounded up to a multiple of the devices; of few lines, fewer.
    ranking: of hypotheses, where a call does not say another.
    replace_unknown: whether the source token with the heaviest weight is written in the place of an unknown one (Jean
      et al. 2015; Luong et al. 2015).
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
    ranking: search.Ranking = search.DEFAULT_RANKING,
    replace_unknown: bool = False,
  ):
    self.model, self.source_vocab, self.target_vocab, self.ranking = model, source_vocab, target_vocab, ranking
    self._mesh, self._replace_unknown = make_mesh(jax.local_devices()), replace_unknown
    self.set_params(params)
    self._buckets, self._largest = buckets, max(source for source, _ in buckets)
    self.max_length = max_output_length(buckets, max_length)
    devices = self._mesh.devices.size
    # Few sources are not searched as many: search would be made for every size that many shrink to on their way.
    self._rows, self._few = (
      -(-rows // devices) * devices for rows in (batch_size, min(batch_size, search.MIN_SOURCES))
    )
    self._find = functools.cache(lambda how, ranking: compile_search(model, how, self.max_length, ranking, self._mesh))
    self._reads = functools.cache(self._reads)

  def set_params(self, params: Any) -> None:
    """Predicts with these parameters from now on; nothing is compiled again."""
    self._params = replicate(jax.device_get(params), self._mesh)

  def __call__(self, lines: Sequence[str], **options: Any) -> list[Prediction]:
    """One prediction per line, in order; options as those of `stream`."""
    found: list[Prediction | None] = [None] * len(lines)
    for row, prediction in self.stream(lines, **options):
      found[row] = prediction
    return found

  def stream(
    self,
    lines: Sequence[str],
    *,
    beams: int = 1,
    groups: int = 1,
    diversity: float = 0.5,
    ranking: search.Ranking | None = None,
    sampling: Sampling | None = None,
    first_line: int = 0,
    prefixes: Sequence[str] | None = None,
  ) -> Iterable[tuple[int, Prediction]]:
    """(row, prediction) as they get done: batches of sources of similar length.

    Args:
      beams: of the search; 1 is greedy.
      groups, diversity: of a diverse search, see search.beam.
      sampling: draws hypotheses instead of searching for them.
      first_line: the number of the first line; what is drawn of a line depends on its number.
      prefixes: how the hypotheses of each line begin, '' for anyhow.

    Raises: UserError for a prefix that leaves nothing of the greatest length, and where nothing tells what an unknown
      word stands for.
    """
    if self._replace_unknown and not self.model.traits.attends:
      raise UserError('unknown words are replaced by where the weights are, and this decoder attends to nothing')
    corpus = Corpus(list(lines), list(prefixes or [''] * len(lines)))
    encoded = encode(corpus, self.source_vocab, self.target_vocab)
    how = (
      dataclasses.replace(sampling, seed=0) if sampling else BeamSearch(beams, groups, diversity)
    )  # one for all seeds
    find = self._find(how, ranking or self.ranking)
    rows = self._few if len(lines) <= self._few else self._rows
    longest = self.max_source_length(int(encoded.lengths[0].max(initial=1)))
    for row in np.flatnonzero(encoded.lengths[0] > longest):
      yield int(row), Prediction(lines[row], self.source_vocab.tokenize(lines[row]), [])
    for batch in eval_batches(encoded, self._any_target(encoded, longest), rows):
      drawn = sampling and (np.full_like(batch.index, sampling.seed), batch.index + first_line)
      given = batch.source, batch.source_mask, drawn, self._begun(encoded, batch) if prefixes else None
      hypotheses = jax.device_get(find(self._params, *shard_batch(given, self._mesh)))
      yield from self._read(batch, hypotheses, corpus)

  def _begun(self, encoded: EncodedCorpus, batch: Batch) -> np.ndarray:
    """The prefixes [B, P] of a batch, in few shapes."""
    target = np.where(batch.target == EOS, PAD, batch.target)
    longest = int((target != PAD).sum(1).max())
    if longest >= self.max_length:
      raise UserError(f'a prefix has {longest} tokens, and hypotheses at most {self.max_length} with their end')
    return np.pad(target, ((0, 0), (0, -target.shape[1] % 8)), constant_values=PAD)

  def max_source_length(self, wanted: int) -> int:
    """How many tokens of a source the model can read, EOS included, where `wanted` would be enough."""
    if wanted <= self._largest or self._reads(wanted) or not self._reads(1):
      return wanted  # what cannot read one token has another mistake, which the search tells
    able, unable = 1, wanted
    while unable - able > 1:
      middle = (able + unable) // 2
      able, unable = (middle, unable) if self._reads(middle) else (able, middle)
    return able

  def _reads(self, size: int) -> bool:
    """Whether the model takes a source of so many tokens: some have positions or parameters for so many alone."""

    def run(params, source, mask):
      carry, memory = self.model.apply({'params': params}, source, mask, self.max_length, method='start')
      return self.model.apply({'params': params}, carry, source[:, 0], memory, method='step')

    ids = jax.ShapeDtypeStruct((1, size), jnp.int32)
    try:
      jax.eval_shape(run, self._params, ids, jax.ShapeDtypeStruct(ids.shape, jnp.bool_))
    except UserError:
      return False
    return True

  def _any_target(self, encoded: EncodedCorpus, longest: int) -> list[tuple[int, int]]:
    """Buckets for sources of up to `longest` tokens, with any target."""
    target = int(encoded.lengths[1].max(initial=1))
    # A size beyond the buckets is rounded up, perhaps beyond what the model reads.
    fits = lambda size: size <= self._largest or self._reads(size)
    return [(size if fits(size) else longest, target) for size in search_lengths(self._buckets, longest)]

  def _read(self, batch: Batch, found: search.Hypotheses, corpus: Corpus) -> Iterable[tuple[int, Prediction]]:
    for i, row in enumerate(batch.index):
      if row >= 0:
        size = int(batch.source_mask[i].sum())
        source, target = corpus.source[row], corpus.target[row]
        given = self.source_vocab.tokenize(source), self.target_vocab.tokenize(target)
        which = range(found.lengths.shape[1])
        best = [self._hypothesis(found, i, k, size, *given) for k in which if found.lengths[i, k]]
        yield int(row), Prediction(source, given[0], best)

  def _hypothesis(
    self, found: search.Hypotheses, i: int, k: int, size: int, source: list[str], begins: list[str]
  ) -> Hypothesis:
    """begins: the tokens that it had to begin with, which the vocabulary need not know."""
    length = int(found.lengths[i, k])
    ids = found.tokens[i, k, :length].tolist()
    content, known = ids[:-1] if ids[-1] == EOS else ids, len(self.target_vocab)
    weights = found.weights[i, k, :length, :size].copy()  # a view would keep the whole batch
    if self._replace_unknown and source:
      near = weights[: len(content), : len(source)]
      heaviest = np.where(near.any(-1), known + near.argmax(-1), UNK)  # no weight tells nothing
      content = [int(heaviest[t]) if id == UNK else id for t, id in enumerate(content)]
    content[: len(begins)] = [known + len(source) + t for t in range(len(begins))]
    words = source + begins
    tokens = [self.target_vocab.id_to_token(id) if id < known else words[id - known] for id in content]
    text = self.target_vocab.decode(content, words)
    return Hypothesis(text, tokens, float(found.scores[i, k]), float(found.log_probs[i, k]), weights)


def search_lengths(buckets: Sequence[Sequence[int]], longest: int) -> tuple[int, ...]:
  """The lengths to which sources are padded for a search, where the longest of them has so many tokens."""
  sizes = sorted({source for source, _ in buckets})
  return (*sizes, *([-(-longest // 32) * 32] if longest > sizes[-1] else []))


def max_output_length(buckets: Sequence[Sequence[int]], max_length: int) -> int:
  """Tokens that a hypothesis may have, EOS included: max_length, or the longest target of the buckets for 0."""
  return max_length or max(target for _, target in buckets)


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """How a search goes: with one beam it is greedy; groups and diversity as in search.beam."""

  beams: int = 1
  groups: int = 1
  diversity: float = 0.5

  def make_search(self, drawn: Any = None) -> Callable:
    """What finds hypotheses of a model's steps; it draws nothing."""
    if self.beams == self.groups == 1:
      return search.greedy
    return functools.partial(search.beam, beams=self.beams, groups=self.groups, diversity=self.diversity)


def compile_beam_search(
  model: EncoderDecoder, beams: int, max_length: int, ranking: search.Ranking = search.DEFAULT_RANKING
):
  """(params, source [B, S], source_mask [B, S]) -> search.Hypotheses, compiled once per shape. One beam is greedy."""
  return compile_search(model, BeamSearch(beams), max_length, ranking)


def compile_search(
  model: EncoderDecoder, how: BeamSearch | Sampling, max_length: int, ranking: search.Ranking, mesh: Mesh | None = None
) -> Callable:
  """(params, source, source_mask, drawn, prefix) -> search.Hypotheses, compiled once per shape.

  `drawn`, for Sampling alone: seeds [B] and numbers [B] of the sources. `prefix`: [B, P], or None. `mesh`: that the
  sources are divided over, if they are.
  """

  def run(params, source, source_mask, drawn=None, prefix=None):
    variables = {'params': params}
    carry, memory = model.apply(variables, source, source_mask, max_length, method='start')
    step = lambda carry, token, memory: model.apply(variables, carry, token, memory, method='step')
    if model.copies:
      step = mask_absent_copies(step)
    if prefix is not None:
      step, carry, memory = force_prefix(step, carry, memory, prefix)
    found = how.make_search(drawn)(step, carry, memory, max_length=max_length, ranking=ranking, source_mask=source_mask)
    if model.traits.latent:
      found = found._replace(weights=_posterior(model, variables, source, source_mask, found))
    return found

  return jit_on_mesh(mesh, run) if mesh else jax.jit(run)


def mask_absent_copies(step: Callable) -> Callable:
  """A step of an output layer that copies, without the words that cannot be said; an end always can."""

  def able(carry, token, memory):
    carry, (logits, *rest) = step(carry, token, memory)
    possible = emittable(logits).at[..., EOS].set(True)
    return carry, (jnp.where(possible, logits, search.IMPOSSIBLE_SCORE), *rest)

  return able


def _posterior(model, variables: Any, source: jax.Array, source_mask: jax.Array, found: search.Hypotheses):
  """Weights [B, K, T, S] of a latent alignment given whole hypotheses: while searching, only what stood before."""

  def forced(given):
    tokens, lengths = given
    outputs = model.apply(variables, source, source_mask, tokens)
    return model.posterior(outputs, padding_mask(lengths, tokens.shape[-1]))

  by_rank = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (found.tokens, found.lengths))
  return jnp.moveaxis(jax.lax.map(forced, by_rank), 0, 1)
