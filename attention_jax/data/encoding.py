"""A corpus as ids: flat arrays that are cheap to index and fit millions of lines in memory."""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.data.text import Corpus, Links, format_count, format_line_numbers
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK

Buckets = tuple[tuple[int, int], ...]


class EncodedCorpus(NamedTuple):
  """One split as ids. Row i of the source is `source[source_offsets[i]:source_offsets[i + 1]]` and ends with EOS.

  Attributes:
    source: int32, all rows after one another; ids from the size of the vocabulary on are unknown tokens, see `encode`.
    source_offsets: int64 [rows + 1].
    target: int32, all rows after one another.
    target_offsets: int64 [rows + 1].
    links: int32 [N, 2], gold (source token, target token) pairs of all rows after one another, the possible ones where
      the data tells them from sure ones; None where the data has none, or none between parts of these tokens.
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
    return len(self.source_offsets) - 1

  @property
  def lengths(self) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths [rows], EOS included."""
    return np.diff(self.source_offsets), np.diff(self.target_offsets)

  @property
  def num_uncopyable_tokens(self) -> int:
    """How many tokens of targets stand nowhere in their source."""
    rows = [np.repeat(np.arange(self.rows, dtype=np.int64), lengths) for lengths in self.lengths]
    source, target = (row << 32 | ids for row, ids in zip(rows, (self.source, self.target), strict=True))
    return int(np.count_nonzero(~np.isin(target, source)))

  def row_links(self, row: int) -> np.ndarray:
    """The links [n, 2] of one row of a split that has links."""
    return self.links[self.link_offsets[row] : self.link_offsets[row + 1]]


def encode(corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary) -> EncodedCorpus:
  """The ids of a corpus, EOS appended on both sides, and its links as links between tokens.

  A token of the source that the vocabulary does not know has the id V + s, where V is the size of the vocabulary and s
  where that token stands first in its line; the same token in the target has the same s. Other unknown ones are UNK.
  """
  places: list[dict[str, int]] = []

  def source(line: str) -> list[int]:
    ids = source_vocab.encode(line)
    tokens = source_vocab.tokenize(line) if UNK in ids else []
    places.append(_first_places(tokens, ids) if tokens else {})
    return _placed(ids, tokens, places[-1], len(source_vocab)) if tokens else ids

  def target(line: str) -> list[int]:
    ids, known = target_vocab.encode(line), next(of_sources)
    return _placed(ids, target_vocab.tokenize(line), known, len(target_vocab)) if known and UNK in ids else ids

  sources = _flat(corpus.source, source)
  of_sources = iter(places)
  return EncodedCorpus(*sources, *_flat(corpus.target, target), *_flat_links(corpus, source_vocab, target_vocab))


def _first_places(tokens: Sequence[str], ids: Sequence[int]) -> dict[str, int]:
  """Where each unknown token of a line stands first."""
  places = {}
  for place, (token, id) in enumerate(zip(tokens, ids, strict=True)):
    if id == UNK:
      places.setdefault(token, place)
  return places


def _placed(ids: Sequence[int], tokens: Sequence[str], places: dict[str, int], size: int) -> list[int]:
  """The ids of a line, unknown ones as the places they have."""
  named = zip(ids, tokens, strict=True)
  return [size + places[token] if id == UNK and token in places else id for id, token in named]


def token_units(vocabulary: Vocabulary, level: str) -> Callable[[str], Sequence[int]] | None:
  """line -> for each token the unit of `level` (text.LINK_LEVELS) that it is part of, -1 for none.

  None for a vocabulary whose tokens are not parts of such units.
  """
  return {'word': vocabulary.word_ids, vocabulary.kind: lambda line: range(len(vocabulary.tokenize(line)))}.get(level)


def _flat(lines: Iterable[str], ids: Callable[[str], list[int]]) -> tuple[np.ndarray, np.ndarray]:
  lengths = [0]

  def line_ids(line: str) -> list[int]:
    row = [*ids(line), EOS]
    lengths.append(len(row))
    return row

  flat = np.fromiter(itertools.chain.from_iterable(map(line_ids, lines)), np.int32)
  return flat, np.cumsum(lengths, dtype=np.int64)


def _flat_links(corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary):
  gold = corpus.links if corpus.possible is None else corpus.possible
  source_units, target_units = (token_units(vocabulary, corpus.level) for vocabulary in (source_vocab, target_vocab))
  if gold is None or source_units is None or target_units is None:
    return None, None
  rows = [
    _between_tokens(links, source_units(source), target_units(target))
    for links, source, target in zip(gold, corpus.source, corpus.target, strict=True)
  ]
  flat = np.array(list(itertools.chain.from_iterable(rows)), np.int32).reshape(-1, 2)
  return flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _between_tokens(links: Links, source: Sequence[int], target: Sequence[int]) -> Links:
  """Links between units -> links between all tokens of the one and all tokens of the other."""
  sources, targets = _tokens_of(source), _tokens_of(target)
  return tuple((i, j) for s, t in links for i in sources[s] for j in targets[t])


def _tokens_of(units: Sequence[int]) -> dict[int, list[int]]:
  tokens = collections.defaultdict(list)
  for token, unit in enumerate(units):
    tokens[unit].append(token)
  return tokens


def check_buckets(buckets: Iterable[Sequence[int]]) -> Buckets:
  """The (source, target) length pairs, EOS included, smallest area first. Raises: UserError for anything else."""
  try:
    pairs = [(source, target) for source, target in buckets]
  except (TypeError, ValueError):
    pairs = []
  whole = all(isinstance(size, int | np.integer) and size > 0 for pair in pairs for size in pair)
  if not pairs or not whole or len(set(pairs)) < len(pairs):
    raise UserError(f'buckets are different (source, target) lengths such as ((20, 20), (40, 40)), got {buckets}')
  return tuple(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)))


def assign_buckets(encoded: EncodedCorpus, buckets: Iterable[Sequence[int]]) -> np.ndarray:
  """For each row the position, in check_buckets' order, of the smallest bucket that holds the pair; -1 for none."""
  source, target = encoded.lengths
  chosen = np.full(encoded.rows, -1, np.int32)
  for i, (longest_source, longest_target) in reversed(list(enumerate(check_buckets(buckets)))):
    chosen[(source <= longest_source) & (target <= longest_target)] = i
  return chosen


def describe_corpus(
  split: str, corpus: Corpus, encoded: EncodedCorpus, buckets: Iterable[Sequence[int]], entries: tuple[int, int]
) -> list[str]:
  """What a person should know of an encoded split: counts, rows per bucket, unknown tokens, and what is left out.

  Args: entries, of the source and the target vocabulary.
  """
  buckets, chosen = check_buckets(buckets), assign_buckets(encoded, buckets)
  sizes = ', '.join(f'{s}x{t}: {np.sum(chosen == i)}' for i, (s, t) in enumerate(buckets))
  sides = zip(('source', 'target'), (encoded.source, encoded.target), entries, strict=True)
  shares = {side: np.mean((ids == UNK) | (ids >= known)) for side, ids, known in sides}
  unknown = ', '.join(f'{share:.2%} of {side} tokens' for side, share in shares.items() if share)
  report = [*corpus.report, f'{split}: {format_count(encoded.rows, "pair")} ({corpus.name}); buckets {sizes}']
  if unknown:
    report.append(f'{split}: unknown {unknown}')
  if len(long := np.flatnonzero(chosen < 0)):
    lines = format_line_numbers([corpus.line(row) for row in long])
    longest = ' and '.join(str(max(lengths)) for lengths in encoded.lengths)
    report.append(
      f'{split}: {len(long)} of {format_count(encoded.rows, "pair")} fit no bucket and are left out of training, loss and '
      f'alignments ({lines} of {corpus.name}); the longest source and target have {longest} tokens with EOS'
    )
  return report
