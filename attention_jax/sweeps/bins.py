"""Metrics by a property of the rows: the length of the source or target, or the frequency of the rarest word."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.analysis.alignment import alignment_scores
from attention_jax.data.text import LINK_LEVELS, Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.metrics import RowCounts, compute_metric
from attention_jax.decoding.scoring import ScoredPair
from attention_jax.errors import UserError, choose
from attention_jax.specs import parse
from attention_jax.sweeps.statistics import Interval, bootstrap_ratio, bootstrap_rows
from attention_jax.systems.text_evaluation import LinkComparison, predict_links, select_texts


def _source_lengths(corpus: Corpus, train: Corpus) -> list[int]:
  return [len(LINK_LEVELS[corpus.level](line)) for line in corpus.source]


def _target_lengths(corpus: Corpus, train: Corpus) -> list[int]:
  return [len(LINK_LEVELS[corpus.level](line)) for line in corpus.target]


def _rarest_frequencies(corpus: Corpus, train: Corpus) -> list[int]:
  """The number of occurrences in the training sources of the rarest unit of each source."""
  split = LINK_LEVELS[corpus.level]
  counts = Counter(unit for line in train.source for unit in split(line))
  return [min((counts[unit] for unit in split(line)), default=0) for line in corpus.source]


# (split, training split) -> a number for each row. All count the units of the task, words or characters.
PROPERTIES: Mapping[str, Callable[[Corpus, Corpus], list[int]]] = {
  'rarest_word': _rarest_frequencies,
  'source_length': _source_lengths,
  'target_length': _target_lengths,
}
SOURCE_PROPERTIES = frozenset({'rarest_word', 'source_length'})  # of the text of the source; a picture has none


class Bin(NamedTuple):
  """Rows with similar values of a property.

  Attributes:
    low, high: the smallest and the largest value among them.
    rows: indices into the argument `values` of `divide_rows`; if references are grouped, these are not rows of the
      split.
  """

  low: int
  high: int
  rows: np.ndarray

  @property
  def name(self) -> str:
    """'3 to 7', or '3' for a single value."""
    return str(self.low) if self.low == self.high else f'{self.low} to {self.high}'


class BinnedMetrics(NamedTuple):
  """Metrics by bins.

  Attributes:
    by: the property, a key of PROPERTIES.
    bins: from the smallest values to the largest.
    metrics: metric -> an interval for each bin.
    units: metric -> unit.
  """

  by: str
  bins: Sequence[Bin]
  metrics: Mapping[str, Sequence[Interval]]
  units: Mapping[str, str]

  def as_json(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      'by': self.by,
      'bins': [{'low': bin.low, 'high': bin.high, 'rows': len(bin.rows)} for bin in self.bins],
      'metrics': {
        name: {'unit': self.units[name], 'values': [interval._asdict() for interval in intervals]}
        for name, intervals in self.metrics.items()
      },
    }


def evaluate_bins(
  corpus: Corpus, train: Corpus, hypotheses: Sequence[str], options: Mapping[str, Any], by: str, count: int
) -> BinnedMetrics:
  """Computes the text metrics of a config for rows with similar values of a property.

  Args:
    corpus: the split.
    train: the training split.
    hypotheses: one per row of the split.
    options: config.evaluation; its metrics are computed.
    by: a key of PROPERTIES.
    count: number of bins, with about equally many rows; fewer if values repeat.

  Returns:
    Each metric of each bin with a 95 % bootstrap interval over its rows.

  Raises:
    UserError: for an unknown property, and for less than one bin.
  """
  check_property(by, count)
  texts = select_texts(corpus, hypotheses, options)
  values = np.array(PROPERTIES[by](corpus, train))[texts.rows]
  bins = divide_rows(values, count)
  metrics = {}
  units = {}
  for spec in options.metrics:
    name, _ = parse(spec, 'metric')
    units[name] = compute_metric(spec, texts.hypotheses, texts.references).unit
    metrics[name] = [
      bootstrap_rows(spec, [texts.hypotheses[row] for row in bin.rows], [texts.references[row] for row in bin.rows])
      for bin in bins
    ]
  return BinnedMetrics(by, bins, metrics, units)


def add_teacher_forcing_metrics(
  table: BinnedMetrics,
  corpus: Corpus,
  train: Corpus,
  pairs: Sequence[ScoredPair],
  vocabularies: tuple[Vocabulary, Vocabulary],
  attends: bool,
  unlinked_targets: bool = False,
) -> BinnedMetrics:
  """Adds metrics by teacher forcing: the loss and, with gold links and attention weights, the alignment error rate.

  Args:
    table: metrics of texts by bins. The added metrics count each row of the split whose value is in a bin. If rows with
      the same source are grouped, the bins cover the values of one row per source: with 'target_length', the value of
      another row may lie outside of all bins, and the row is not counted.
    corpus: the split.
    train: the training split.
    pairs: the scores of all rows of the split.
    vocabularies: source and target vocabulary of the run.
    attends: whether the model has attention weights.
    unlinked_targets: as for `evaluation.alignment_metrics`.
  """
  values = np.array(PROPERTIES[table.by](corpus, train))
  losses = np.array([-sum(pair.log_probs) for pair in pairs])
  num_tokens = np.array([len(pair.log_probs) for pair in pairs])
  counts = {'loss': RowCounts(losses, num_tokens)}
  scales = {'loss': 1}
  units = {'loss': 'nat/token'}
  if attends and corpus.links is not None:
    rows = range(len(pairs))
    links = predict_links(corpus, [pair.weights for pair in pairs], rows, *vocabularies, unlinked_targets)
    counts['alignment_error_rate'] = _link_errors(links)
    scales['alignment_error_rate'] = 100
    units['alignment_error_rate'] = '%'
  metrics = dict(table.metrics)
  for name, row_counts in counts.items():
    metrics[name] = []
    for bin in table.bins:
      rows = np.flatnonzero((values >= bin.low) & (values <= bin.high))
      bin_counts = RowCounts(row_counts.counted[rows], row_counts.total[rows])
      metrics[name].append(bootstrap_ratio(bin_counts, scales[name]))
  return table._replace(metrics=metrics, units=table.units | units)


def _link_errors(links: LinkComparison) -> RowCounts:
  """Numerator and denominator of the alignment error rate of each row: |A| + |S| - |A ∩ S| - |A ∩ P|, and |A| + |S|."""
  errors = []
  sizes = []
  for predicted, sure, possible in zip(*links, strict=True):
    scores = alignment_scores([predicted], [sure], [possible])
    sizes.append(scores.links + len(set(sure)))
    errors.append(scores.error_rate * sizes[-1])
  return RowCounts(np.array(errors), np.array(sizes))


def check_property(by: str, count: int) -> None:
  """Raises UserError for an unknown property, and for less than one bin."""
  choose(by, PROPERTIES, 'value of --by')
  if count < 1:
    raise UserError(f'--bins must be at least 1, got {count}')


def divide_rows(values: np.ndarray, count: int) -> list[Bin]:
  """Divides rows by the quantiles of their values.

  Args:
    values: one per row, integers.
    count: number of bins; fewer if values repeat.
  """
  quantiles = np.quantile(values, np.linspace(0, 1, count + 1)[1:])
  # Values are integers: rounding an end down moves none to another bin. A quantile of 24 may be 23.999999999999996.
  ends = np.unique(np.floor(quantiles + 1e-6))
  codes = np.searchsorted(ends, values)  # a bin has the values above the end of the one before it, up to its own end
  groups = [np.flatnonzero(codes == code) for code in np.unique(codes)]
  return [Bin(int(values[rows].min()), int(values[rows].max()), rows) for rows in groups]
