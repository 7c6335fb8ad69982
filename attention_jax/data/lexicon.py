"""Lexicons of IBM model 1 (Brown et al. 1993), and shortlists of target tokens for a search."""

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.atomic import write_atomic
from attention_jax.data.encoding import EncodedCorpus, EncodedSplit
from attention_jax.errors import UserError
from attention_jax.tokens import SPECIAL_TOKENS, UNK

ITERATIONS = 5  # of expectation maximisation
# Approximate limit for the co-occurrences in the rows that are read of a split: each is a source and a target position
# of one row, and takes about 75 bytes at the peak of memory.
MAX_COOCCURRENCES = 30_000_000
SHORTLIST_MULTIPLE = 512  # tokens; each size of a shortlist is one compilation


class Lexicon(NamedTuple):
  """Translations of every source token, and target tokens by frequency, in a training split.

  The translations of source token i are `targets[offsets[i]:offsets[i + 1]]`, the likeliest first.

  Attributes:
    offsets: int64 [source vocabulary + 1].
    targets: int32 [N], ids of target tokens.
    probs: float32 [N], t(target | source).
    by_frequency: int32 [target vocabulary], all ids: the special tokens, then the others, the most frequent first.
    digest: identifies the data.
  """

  offsets: np.ndarray
  targets: np.ndarray
  probs: np.ndarray
  by_frequency: np.ndarray
  digest: str

  def shortlist(self, source: np.ndarray, count: int, required: np.ndarray | None = None) -> np.ndarray:
    """Selects target tokens for a batch of sources (L'Hostis et al. 2016).

    They are the `count` likeliest translations of each source token, the `count` most frequent target tokens, and the
    special tokens. The next most frequent ones fill the list up to a multiple of SHORTLIST_MULTIPLE.

    Args:
      source: source ids of any shape; out-of-vocabulary ids count as UNK.
      count: number of translations and of frequent tokens.
      required: further target ids that have to be in the list.

    Returns:
      Ascending ids, int32 [V'], where V' is at most the size of the target vocabulary.
    """
    words = np.unique(_oov_to_unk(source, len(self.offsets) - 1))
    starts = self.offsets[words]
    counts = np.minimum(self.offsets[words + 1] - starts, count)
    translations = self.targets[_ranges(starts, counts)]
    size = len(self.by_frequency)
    is_listed = np.zeros(size, bool)
    is_listed[translations] = True
    is_listed[self.by_frequency[: len(SPECIAL_TOKENS) + count]] = True
    if required is not None:
      is_listed[_oov_to_unk(required, size)] = True
    unlisted = self.by_frequency[~is_listed[self.by_frequency]]
    is_listed[unlisted[: -int(is_listed.sum()) % SHORTLIST_MULTIPLE]] = True
    return np.flatnonzero(is_listed).astype(np.int32)


def make_lexicon(encoded: EncodedSplit, source_size: int, target_size: int, digest: str = '') -> Lexicon:
  """Makes a lexicon from a training split.

  Of a split with more than MAX_COOCCURRENCES co-occurrences, rows at equal distances are read. The EOS of each source
  is the empty word (NULL) of the model.

  Args:
    encoded: the split.
    source_size: size of the source vocabulary.
    target_size: size of the target vocabulary.
    digest: identifies the data.
  """
  corpus, rows = encoded.read(_select_rows(encoded))
  source = _oov_to_unk(corpus.source, source_size)
  target = _oov_to_unk(corpus.target, target_size)
  source_positions, target_positions = cooccurring_positions(corpus, rows)
  sources, targets, probs = ibm_model_1(source[source_positions], target[target_positions], target_positions)
  order = np.lexsort((targets, -probs, sources))
  offsets = np.searchsorted(sources[order], np.arange(source_size + 1))
  # The split that `read` returns may have other rows too.
  positions = _ranges(corpus.target_offsets[rows], corpus.lengths[1][rows])
  frequencies = np.bincount(target[positions], minlength=target_size)
  frequencies[: len(SPECIAL_TOKENS)] = len(target) + 1
  by_frequency = np.argsort(-frequencies, kind='stable').astype(np.int32)
  return Lexicon(offsets, targets[order].astype(np.int32), probs[order].astype(np.float32), by_frequency, digest)


def ibm_model_1(
  source: np.ndarray, target: np.ndarray, groups: np.ndarray, iterations: int = ITERATIONS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Estimates t(f | e), the probability that source token e is translated by f (Brown et al. 1993, section 4.1).

  Each co-occurrence is a target position of the corpus and one token of its source. One iteration computes the
  probability that they are aligned, t(f | e) / Σ_e' t(f | e') over the co-occurrences of the same target position, and
  from the sums of these probabilities the next t. The first t is uniform.

  Args:
    source: id of the source token of each co-occurrence, [N].
    target: id of its target token, [N].
    groups: position in the corpus of its target token, ascending, [N].
    iterations: number of iterations, at least 1.

  Returns:
    Source ids, target ids and t(target | source) of all pairs that occur together, ordered by source and target.
  """
  size = int(target.max(initial=0)) + 1
  pairs, pair_index = np.unique(source.astype(np.int64) * size + target, return_inverse=True)
  sources, targets = np.divmod(pairs, size)
  is_first = np.diff(groups, prepend=-1) != 0
  group_index = np.cumsum(is_first) - 1
  group_starts = np.flatnonzero(is_first)
  probs = np.ones(len(pairs))
  for _ in range(iterations if len(pairs) else 0):
    unnormalized = probs[pair_index]
    totals = np.add.reduceat(unnormalized, group_starts)
    counts = np.bincount(pair_index, unnormalized / totals[group_index], len(pairs))
    probs = counts / np.bincount(sources, counts)[sources]
  return sources, targets, probs


def cooccurring_positions(encoded: EncodedCorpus, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns all pairs of a source and a target position of the same row, ordered by target position.

  Returns:
    Positions in `encoded.source` and positions in `encoded.target`, [N] each.
  """
  source_lengths, target_lengths = (lengths[rows] for lengths in encoded.lengths)
  targets = _ranges(encoded.target_offsets[rows], target_lengths)
  counts = np.repeat(source_lengths, target_lengths)
  starts = np.repeat(encoded.source_offsets[rows], target_lengths)
  return _ranges(starts, counts), np.repeat(targets, counts)


def save_lexicon(path: Path, lexicon: Lexicon) -> None:
  """Writes a lexicon atomically; if several processes write the same file, the last write remains."""
  with write_atomic(path) as temporary, open(temporary, 'wb') as file:
    np.savez(file, **lexicon._asdict())


def load_lexicon(path: Path) -> Lexicon | None:
  """Reads a lexicon; None if there is no file.

  Raises:
    UserError: for a file that cannot be read, or is not a lexicon.
  """
  try:
    with np.load(path) as arrays:
      return Lexicon(**arrays)._replace(digest=str(arrays['digest']))
  except FileNotFoundError:
    return None
  except (OSError, EOFError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise UserError(
      f'{path}: cannot be read as a lexicon ({" ".join(str(error).split())}); delete the file to make the lexicon again'
    ) from error


def _oov_to_unk(ids: np.ndarray, size: int) -> np.ndarray:
  return np.where(ids < size, ids, UNK)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Concatenates the ranges of `counts` numbers from `starts` on."""
  ends = np.cumsum(counts)
  return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _select_rows(encoded: EncodedSplit) -> np.ndarray:
  """Returns all rows, or every n-th row if they have more than MAX_COOCCURRENCES."""
  source_lengths, target_lengths = encoded.lengths
  num_cooccurrences = int(np.sum(source_lengths * target_lengths))
  return np.arange(0, encoded.rows, max(1, -(-num_cooccurrences // MAX_COOCCURRENCES)))
