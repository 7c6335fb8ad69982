"""Corpora as ids: flat arrays that are cheap to index and hold millions of lines in memory."""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from attention_jax.data.text import Corpus, Links, format_count, format_line_numbers
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK

Buckets = tuple[tuple[int, int], ...]

MAX_BUCKET_LENGTH = 128  # of either side, of buckets that are chosen from the data
_BUCKET_QUANTILES = (0.6, 0.9, 1.0)  # of the lengths of each side
_BUCKET_MULTIPLE = 4  # similar lengths share a compilation


class EncodedSplit(Protocol):
  """One split as ids: in memory (EncodedCorpus) or on disk (prepared.PreparedSplit).

  Attributes:
    rows: number of rows.
    lengths: source and target lengths [rows], EOS included.
    num_tokens: number of source tokens and of target tokens, EOS included.
    num_uncopyable_tokens: number of target ids that do not occur in their source, for a shared vocabulary.
    links: None in a split without links between tokens.
    identity: a tree of arrays that identifies the content; digests of the split are computed from it.
  """

  rows: int
  lengths: tuple[np.ndarray, np.ndarray]
  num_tokens: tuple[int, int]
  num_uncopyable_tokens: int
  links: np.ndarray | None
  identity: Any

  def num_unknown_tokens(self, vocab_sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of source and of target tokens that are out of vocabulary."""

  def read(self, rows: np.ndarray) -> tuple['EncodedCorpus', np.ndarray]:
    """Returns a split in memory that contains the rows, and their positions in it; those of filler rows are -1."""


class EncodedCorpus(NamedTuple):
  """One split as ids in memory.

  Row i of the source is `source[source_offsets[i]:source_offsets[i + 1]]` and ends with EOS.

  Attributes:
    source: int32, all rows concatenated; ids >= the size of the vocabulary are out-of-vocabulary tokens, see `encode`.
    source_offsets: int64 [rows + 1].
    target: int32, likewise, with the target vocabulary.
    target_offsets: int64 [rows + 1].
    links: int32 [N, 2], gold (source token, target token) pairs of all rows concatenated; the possible ones where the
      data distinguishes them from sure ones. None where the data has no links that can be mapped to these tokens.
    link_offsets: int64 [rows + 1]; None without links.
  """

  source: np.ndarray
  source_offsets: np.ndarray
  target: np.ndarray
  target_offsets: np.ndarray
  links: np.ndarray | None = None
  link_offsets: np.ndarray | None = None

  @property
  def rows(self) -> int:
    """Number of rows."""
    return len(self.source_offsets) - 1

  @property
  def lengths(self) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths [rows], EOS included."""
    return np.diff(self.source_offsets), np.diff(self.target_offsets)

  @property
  def num_uncopyable_tokens(self) -> int:
    """Number of target ids that do not occur in their source, for a shared vocabulary."""
    source_lengths, target_lengths = self.lengths
    row_numbers = np.arange(self.rows, dtype=np.int64)
    source = np.repeat(row_numbers, source_lengths) << 32 | self.source
    target = np.repeat(row_numbers, target_lengths) << 32 | self.target
    return int(np.count_nonzero(~np.isin(target, source)))

  @property
  def num_tokens(self) -> tuple[int, int]:
    """Number of source tokens and of target tokens, EOS included."""
    return len(self.source), len(self.target)

  @property
  def identity(self) -> 'EncodedCorpus':
    """All arrays."""
    return self

  def num_unknown_tokens(self, vocab_sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of source and of target tokens that are out of vocabulary."""
    sides = zip((self.source, self.target), vocab_sizes, strict=True)
    source, target = (int(np.count_nonzero((ids == UNK) | (ids >= size))) for ids, size in sides)
    return source, target

  def read(self, rows: np.ndarray) -> tuple['EncodedCorpus', np.ndarray]:
    """Returns this split and the same rows."""
    return self, rows

  def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source ids and the target ids of one row."""
    source = self.source[self.source_offsets[row] : self.source_offsets[row + 1]]
    return source, self.target[self.target_offsets[row] : self.target_offsets[row + 1]]

  def row_links(self, row: int) -> np.ndarray:
    """Returns the links [n, 2] of one row of a split that has links."""
    return self.links[self.link_offsets[row] : self.link_offsets[row + 1]]


def encode_split(corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary) -> EncodedSplit:
  """Returns the ids of a corpus: those on disk if it was prepared, otherwise those of `encode`.

  Args:
    corpus: the split as text.
    source_vocab: the vocabulary of the source; not used if the corpus was prepared.
    target_vocab: the vocabulary of the target, likewise.
  """
  return encode(corpus, source_vocab, target_vocab) if corpus.prepared is None else corpus.prepared


def encode(corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary) -> EncodedCorpus:
  """Returns the ids of a corpus, EOS appended on both sides, and its links as links between tokens.

  A source token that is out of vocabulary gets the id V + s, where V is the size of the source vocabulary and s the
  first position of that token in its line. The same token in the target, if it is out of vocabulary there too, gets the
  size of the target vocabulary plus s. Other unknown tokens are UNK.

  Args:
    corpus: the split as text.
    source_vocab: the vocabulary of the source.
    target_vocab: the vocabulary of the target.
  """
  unknown_positions: list[dict[str, int]] = []  # of each row: unknown source token -> its first position

  def encode_source(line: str) -> list[int]:
    ids = source_vocab.encode(line)
    tokens = source_vocab.tokenize(line) if UNK in ids else []
    positions = _first_unknown_positions(tokens, ids) if tokens else {}
    unknown_positions.append(positions)
    return _replace_unknown(ids, tokens, positions, len(source_vocab)) if tokens else ids

  def encode_target(line: str, positions: dict[str, int]) -> list[int]:
    ids = target_vocab.encode(line)
    if not positions or UNK not in ids:
      return ids
    return _replace_unknown(ids, target_vocab.tokenize(line), positions, len(target_vocab))

  source, source_offsets = _flatten(map(encode_source, corpus.source))
  target, target_offsets = _flatten(map(encode_target, corpus.target, unknown_positions))
  links, link_offsets = _flatten_links(corpus, source_vocab, target_vocab)
  return EncodedCorpus(source, source_offsets, target, target_offsets, links, link_offsets)


def _first_unknown_positions(tokens: Sequence[str], ids: Sequence[int]) -> dict[str, int]:
  """The first position of each unknown token of a line."""
  positions = {}
  for position, (token, id) in enumerate(zip(tokens, ids, strict=True)):
    if id == UNK:
      positions.setdefault(token, position)
  return positions


def _replace_unknown(
  ids: Sequence[int], tokens: Sequence[str], positions: dict[str, int], vocab_size: int
) -> list[int]:
  """The ids of a line, with `vocab_size` + position for unknown tokens that have a position."""
  pairs = zip(ids, tokens, strict=True)
  return [vocab_size + positions[token] if id == UNK and token in positions else id for id, token in pairs]


def token_units(vocabulary: Vocabulary, level: str) -> Callable[[str], Sequence[int]] | None:
  """Returns a function that maps a line to the unit of each of its tokens.

  Args:
    vocabulary: splits a line into tokens.
    level: the kind of unit, a key of text.LINK_LEVELS.

  Returns:
    line -> the number of the unit that contains each token, -1 for none; None if the tokens of this vocabulary are not
    parts of such units.
  """
  if level == 'word':
    return vocabulary.word_ids
  if level == vocabulary.kind:
    return lambda line: range(len(vocabulary.tokenize(line)))
  return None


def _flatten(rows: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Rows with EOS appended, concatenated, and their offsets."""
  lengths = [0]

  def append_eos(ids: Sequence[int]) -> list[int]:
    row = [*ids, EOS]
    lengths.append(len(row))
    return row

  flat = np.fromiter(itertools.chain.from_iterable(map(append_eos, rows)), np.int32)
  return flat, np.cumsum(lengths, dtype=np.int64)


def _flatten_links(
  corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
  """The links between tokens of all rows, concatenated, and their offsets; (None, None) where there are none."""
  gold = corpus.links if corpus.possible is None else corpus.possible
  source_units = token_units(source_vocab, corpus.level)
  target_units = token_units(target_vocab, corpus.level)
  if gold is None or source_units is None or target_units is None:
    return None, None
  rows = [
    _links_between_tokens(links, source_units(source), target_units(target))
    for links, source, target in zip(gold, corpus.source, corpus.target, strict=True)
  ]
  flat = np.array(list(itertools.chain.from_iterable(rows)), np.int32).reshape(-1, 2)
  return flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _links_between_tokens(links: Links, source_units: Sequence[int], target_units: Sequence[int]) -> Links:
  """Replaces each link between two units by links between all tokens of the one and all tokens of the other."""
  source_tokens = _tokens_by_unit(source_units)
  target_tokens = _tokens_by_unit(target_units)
  return tuple((i, j) for s, t in links for i in source_tokens[s] for j in target_tokens[t])


def _tokens_by_unit(units: Sequence[int]) -> dict[int, list[int]]:
  tokens = collections.defaultdict(list)
  for token, unit in enumerate(units):
    tokens[unit].append(token)
  return tokens


def check_buckets(buckets: Iterable[Sequence[int]]) -> Buckets:
  """Returns (source, target) length pairs, EOS included, smallest area first.

  Raises:
    UserError: for anything but distinct pairs of positive whole numbers.
  """
  try:
    pairs = [(source, target) for source, target in buckets]
  except (TypeError, ValueError):
    pairs = []
  are_sizes = all(isinstance(size, int | np.integer) and size > 0 for pair in pairs for size in pair)
  if not pairs or not are_sizes or len(set(pairs)) < len(pairs):
    raise UserError(
      'buckets must be distinct pairs of a source and a target length, each at least 1, such as ((20, 20), (40, 40)); '
      f'got {buckets}'
    )
  return tuple(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)))


def choose_buckets(encoded: EncodedSplit) -> Buckets:
  """Returns at most three buckets from the lengths of a split: quantiles of each side, rounded up to a multiple of 4.

  The largest holds every pair whose sides have at most MAX_BUCKET_LENGTH tokens, EOS included.
  """
  lengths = np.minimum(np.stack(encoded.lengths), MAX_BUCKET_LENGTH)
  quantiles = np.quantile(lengths, _BUCKET_QUANTILES, axis=1, method='higher')  # [quantiles, 2]
  rounded = -(-quantiles // _BUCKET_MULTIPLE) * _BUCKET_MULTIPLE
  return check_buckets({(int(source), int(target)) for source, target in rounded})


def assign_buckets(encoded: EncodedSplit, buckets: Iterable[Sequence[int]]) -> np.ndarray:
  """Returns for each row the position, in the order of `check_buckets`, of the smallest bucket that holds the pair.

  Returns:
    int32 [rows]; -1 for a pair that no bucket holds.
  """
  source, target = encoded.lengths
  bucket_index = np.full(encoded.rows, -1, np.int32)
  for i, (longest_source, longest_target) in reversed(list(enumerate(check_buckets(buckets)))):
    bucket_index[(source <= longest_source) & (target <= longest_target)] = i
  return bucket_index


def describe_corpus(
  split: str, corpus: Corpus, encoded: EncodedSplit, buckets: Iterable[Sequence[int]], vocab_sizes: tuple[int, int]
) -> list[str]:
  """Describes an encoded split: counts, rows per bucket, unknown tokens, and what is left out.

  Args:
    split: name of the split.
    corpus: the split as text.
    encoded: the split as ids.
    buckets: (source, target) length pairs, EOS included.
    vocab_sizes: sizes of the source and the target vocabulary.

  Returns:
    Lines of a report.
  """
  buckets = check_buckets(buckets)
  bucket_index = assign_buckets(encoded, buckets)
  pairs = format_count(encoded.rows, 'pair')
  bucket_rows = ', '.join(f'{s}x{t}: {np.sum(bucket_index == i)}' for i, (s, t) in enumerate(buckets))
  report = [*corpus.report, f'{split}: {pairs} ({corpus.name}); buckets {bucket_rows}']
  unknown = []
  for side, count, total in zip(
    ('source', 'target'), encoded.num_unknown_tokens(vocab_sizes), encoded.num_tokens, strict=True
  ):
    if count:
      unknown.append(f'{count / total:.2%} of {side} tokens')
  if unknown:
    report.append(f'{split}: unknown {", ".join(unknown)}')
  too_long = np.flatnonzero(bucket_index < 0)
  if len(too_long):
    lines = format_line_numbers([corpus.line(row) for row in too_long])
    longest = ' and '.join(str(max(lengths)) for lengths in encoded.lengths)
    report.append(
      f'{split}: {len(too_long)} of {pairs} fit no bucket and are left out of training, loss and alignments '
      f'({lines} of {corpus.name}); the longest source and target have {longest} tokens with EOS'
    )
  return report
