"""One table of sentence pairs, as in tutorials on translation: normalised, filtered, and split by distinct sources."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from attention_jax.data.files import read_lines
from attention_jax.data.text import Corpus, format_count
from attention_jax.errors import UserError, choose


def unchanged(sentence: str) -> str:
  """The sentence as it is."""
  return sentence


def pytorch(sentence: str) -> str:
  """Lower-case letters a to z, accents removed, and .!? after a space: PyTorch's seq2seq_translation_tutorial.

  Each run of other characters becomes one space.
  """
  decomposed = unicodedata.normalize('NFD', sentence.lower().strip())
  without_accents = ''.join(c for c in decomposed if unicodedata.category(c) != 'Mn')
  separated = re.sub(r'([.!?])', r' \1', without_accents)
  return re.sub(r'[^a-z.!?]+', ' ', separated).strip()


def tensorflow(sentence: str) -> str:
  """Lower-case letters a to z, and .?!,¿ as words of their own; nothing else: TensorFlow's nmt_with_attention."""
  lowered = unicodedata.normalize('NFKD', sentence).lower()
  filtered = re.sub(r'[^ a-z.?!,¿]', '', lowered)
  return ' '.join(re.sub(r'([.?!,¿])', r' \1 ', filtered).split())


NORMALIZERS: Mapping[str, Callable[[str], str]] = {'none': unchanged, 'pytorch': pytorch, 'tensorflow': tensorflow}


def read_pairs(path: str, normalize: str, max_length: int, prefixes: Sequence[str], reverse: bool) -> Corpus:
  """Reads a table of sentence TAB translation [TAB anything], such as those of manythings.org/anki.

  Args:
    path: the table, plain or .gz.
    normalize: a key of NORMALIZERS.
    max_length: maximum length of either side in words, the end-of-sentence token included; 0 for no limit.
    prefixes: prefixes of the normalised first column, of which a pair must have one; () for all pairs.
    reverse: whether the second column is the source.

  Raises:
    UserError: for an unknown normaliser, for a file that cannot be read, for a line with one column that is not blank,
      and if no pair is left.
  """
  normalizer = NORMALIZERS[choose(normalize, NORMALIZERS, 'normaliser')]
  rows = []
  for number, line in enumerate(read_lines(path), 1):
    columns = line.split('\t')
    if len(columns) == 1 and line.strip():
      raise UserError(f'{path}:{number}: 1 column; expected sentence TAB translation')
    rows.append((number, *map(normalizer, (*columns, '')[:2])))
  filters = {
    'blank': lambda first, second: first.strip() and second.strip(),
    'without a prefix': lambda first, second: not prefixes or first.startswith(tuple(prefixes)),
    'too long': lambda first, second: not max_length or max(len(first.split()), len(second.split())) < max_length,
  }
  left_out = []
  used_rows = rows
  for reason, passes in filters.items():
    num_before = len(used_rows)
    used_rows = [row for row in used_rows if passes(*row[1:])]
    if len(used_rows) < num_before:
      left_out.append(f'{num_before - len(used_rows)} {reason}')
  report = f'{path}: {len(used_rows)} of {format_count(len(rows), "pair")} used'
  report += f'; left out: {", ".join(left_out)}' if left_out else ''
  if not used_rows:
    options = f'normalize={normalize!r}, max_length={max_length} and prefixes={tuple(prefixes)}'
    raise UserError(f'{report}; expected at least one pair with {options}')
  lines, first, second = (list(column) for column in zip(*used_rows, strict=True))
  source, target = (second, first) if reverse else (first, second)
  return Corpus(source, target, name=path, lines=lines, report=(report,))


def split_by_source(corpus: Corpus, shares: Mapping[str, float], seed: int) -> dict[str, Corpus]:
  """Divides a corpus into 'train' and other splits, no two of which have a source in common.

  Args:
    corpus: the rows.
    shares: share of the distinct sources in each split other than 'train', at least one source; splits with a share of
      0 are left out.
    seed: seed of the random choice.

  Raises:
    UserError: if no source is left for 'train'.
  """
  sources = list(dict.fromkeys(corpus.source))
  counts = {split: max(1, round(share * len(sources))) for split, share in shares.items() if share}
  if sum(counts.values()) >= len(sources):
    requested = ', '.join(f'{split}={share}' for split, share in shares.items())
    raise UserError(
      f'{corpus.name}: {requested} leaves no training pair of {format_count(len(sources), "distinct source")}; '
      'expected smaller shares, or 0 to leave a split out'
    )
  order = np.random.default_rng(seed).permutation(len(sources))
  split_of = dict.fromkeys(sources, 'train')
  first = 0
  for split, count in counts.items():
    split_of |= {sources[i]: split for i in order[first : first + count]}
    first += count
  rows = {split: [] for split in ('train', *counts)}
  for row, source in enumerate(corpus.source):
    rows[split_of[source]].append(row)
  return {split: _take(corpus, chosen, corpus.report if split == 'train' else ()) for split, chosen in rows.items()}


def _take(corpus: Corpus, rows: Sequence[int], report: tuple[str, ...]) -> Corpus:
  source, target = ([column[row] for row in rows] for column in (corpus.source, corpus.target))
  return Corpus(source, target, name=corpus.name, lines=[corpus.line(row) for row in rows], report=report)
