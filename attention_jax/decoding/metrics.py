"""Metrics of output text: rows of METRICS, selected by spec strings such as `bleu(tokenize="none")`.

A metric takes hypotheses (one string per row) and references (one or more strings per row, whose number may differ
between rows), and returns a MetricValue. Distances and n-grams come from sacrebleu, rouge-score and rapidfuzz.
Rates of edits may exceed 100 if a hypothesis is much longer than its reference.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF, TER

from attention_jax.decoding.rouge import f_measures
from attention_jax.errors import UserError, choose
from attention_jax.specs import Count, Schema, Size, bind, schema_of

References = Sequence[Sequence[str]]
# sacrebleu's other tokenizers need further packages or download a model.
TOKENIZERS = ('13a', 'char', 'intl', 'none', 'zh')


class MetricValue(NamedTuple):
  """Result of a metric.

  Attributes:
    value: its value.
    unit: the unit of the value.
    signature: everything that is needed to compute the same number again.
  """

  value: float
  unit: str
  signature: str


class MetricSummary(NamedTuple):
  """A metric over several runs.

  Attributes:
    value: the mean.
    unit: as in MetricValue.
    signature: as in MetricValue.
    deviation: the sample standard deviation, of divisor n - 1 for n runs; NaN if a value is not finite.
    values: the value of each run.
  """

  value: float
  unit: str
  signature: str
  deviation: float
  values: tuple[float, ...]


def aggregate_runs(results: Sequence[MetricValue]) -> MetricSummary:
  """Summarises the results of one metric of two or more runs."""
  values = tuple(result.value for result in results)
  first = results[0]
  mean, deviation = mean_and_deviation(values)
  return MetricSummary(mean, first.unit, first.signature, deviation, values)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and the sample standard deviation, which is NaN for one value and if a value is not finite."""
  if all(map(math.isfinite, values)):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
  with np.errstate(invalid='ignore'):  # ∞ - ∞ is NaN
    return float(np.mean(values)), math.nan


class Metric(NamedTuple):
  """A row of METRICS.

  Attributes:
    fn: (hypotheses, references, *, options) -> MetricValue.
    higher_is_better: whether a higher value is better.
    sentence_level: defaults of options when single sentences are compared.
    count: for a rate or a mean over rows, (hypotheses, references, *, options) -> RowCounts.
    sacrebleu: for a metric of sacrebleu, (*, options) -> the object that computes it.
  """

  fn: Callable[..., MetricValue]
  higher_is_better: bool
  sentence_level: tuple[tuple[str, Any], ...] = ()
  count: Callable[..., 'RowCounts'] | None = None
  sacrebleu: Callable[..., Any] | None = None


class RowCounts(NamedTuple):
  """A rate or a mean by rows: 100 times the sum of `counted` over the sum of `total`.

  Attributes:
    counted: errors, matches, or F-measure of each row, [R].
    total: tokens or characters of the nearest reference of each row, or 1, [R].
  """

  counted: np.ndarray
  total: np.ndarray

  @property
  def rate(self) -> float:
    """The rate of all rows, in % or points."""
    return 100 * float(self.counted.sum()) / float(self.total.sum())


def compute_metric(
  spec: str, hypotheses: Sequence[str], references: References, *, sentence_level: bool = False
) -> MetricValue:
  """Computes a metric over a whole corpus.

  Args:
    spec: a name of METRICS, with or without options.
    hypotheses: one string per row, at least one row.
    references: one or more strings per row.
    sentence_level: whether single sentences are compared, which changes the defaults of some options, see Metric.

  Raises:
    UserError: for an unknown metric or option, an option that the metric rejects, no rows, different numbers of rows,
      or a row without a reference; for a token or character error rate, if all nearest references are empty.
  """
  name, options = _parse_spec(spec)
  if not hypotheses or len(hypotheses) != len(references):
    raise UserError(
      f'{name} needs at least one row and references for each, '
      f'got {len(hypotheses)} hypotheses and {len(references)} rows of references'
    )
  for index, row_references in enumerate(references):
    if isinstance(row_references, str) or not row_references:
      raise UserError(f'{name}: row {index} needs a list of at least one reference, got {row_references!r}')
  metric = METRICS[name]
  defaults = dict(metric.sentence_level) if sentence_level else {}
  return metric.fn(hypotheses, references, **defaults | options)


def count_rows(spec: str, hypotheses: Sequence[str], references: References) -> RowCounts | None:
  """Returns the counts of each row of a metric that is a rate or a mean over rows, or None for any other metric.

  Args:
    spec: a name of METRICS, with or without options.
    hypotheses: one string per row.
    references: one or more strings per row.
  """
  name, options = _parse_spec(spec)
  count = METRICS[name].count
  return None if count is None else count(hypotheses, references, **options)


def sacrebleu_metric(spec: str) -> Any | None:
  """Returns sacrebleu's object of a metric, or None for a metric that is not sacrebleu's."""
  name, options = _parse_spec(spec)
  make = METRICS[name].sacrebleu
  return None if make is None else make(**options)


def reference_streams(references: References) -> list[list[str | None]]:
  """Returns references as sacrebleu takes them: one list per reference number.

  Rows with fewer references have None, which sacrebleu skips; '' would count as one.
  """
  max_references = max(map(len, references))
  return [[row[i] if i < len(row) else None for row in references] for i in range(max_references)]


def higher_is_better(spec: str) -> bool:
  """Returns whether a higher value of the metric is better.

  Raises:
    UserError: for an unknown metric or option.
  """
  return METRICS[_parse_spec(spec)[0]].higher_is_better


def _parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
  """Name and options of a metric."""
  name, _, options = bind(spec, METRICS, 'metric', _schema)
  return name, options


def _schema(metric: Metric) -> Schema:
  """The options of a metric, without those that its row sets, such as the order of `bleu_1`."""
  return schema_of(metric.fn, getattr(metric.fn, 'keywords', ()))


def bleu(
  hypotheses: Sequence[str],
  references: References,
  *,
  tokenize: str = '13a',
  lowercase: bool = False,
  order: Size = 4,
  effective_order: bool = False,
) -> MetricValue:
  """BLEU, Papineni et al. (2002).

  Args:
    hypotheses: one string per row.
    references: one or more strings per row.
    tokenize: one of TOKENIZERS; 'none' for text that is tokenised already.
    lowercase: whether case is ignored.
    order: length of the longest n-grams.
    effective_order: whether n-grams that are longer than every hypothesis are ignored; not standard for a corpus.

  Raises:
    UserError: for an unknown tokenizer.
  """
  metric = _make_bleu(tokenize=tokenize, lowercase=lowercase, order=order, effective_order=effective_order)
  result = _sacrebleu(metric, 'points', hypotheses, references)
  return result if order == 4 else result._replace(signature=f'{result.signature}|order:{order}')


def _make_bleu(
  *, tokenize: str = '13a', lowercase: bool = False, order: int = 4, effective_order: bool = False
) -> BLEU:
  choose(tokenize, TOKENIZERS, 'tokenizer of bleu')
  # force=True silences a warning about tokenised input: the tokenizer is chosen by name, and part of the signature.
  return BLEU(
    tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True, max_ngram_order=order
  )


def chrf(
  hypotheses: Sequence[str], references: References, *, word_order: Count = 0, lowercase: bool = False
) -> MetricValue:
  """chrF2, Popović (2015); chrF++ with word_order=2.

  Args:
    hypotheses: one string per row.
    references: one or more strings per row.
    word_order: length of the longest n-grams of words; 0 for n-grams of characters alone.
    lowercase: whether case is ignored.
  """
  return _sacrebleu(_make_chrf(word_order=word_order, lowercase=lowercase), 'points', hypotheses, references)


def _make_chrf(*, word_order: int = 0, lowercase: bool = False) -> CHRF:
  return CHRF(word_order=word_order, lowercase=lowercase)


def ter(hypotheses: Sequence[str], references: References, *, lowercase: bool = True) -> MetricValue:
  """Translation edit rate, Snover et al. (2006); like tercom it ignores case unless lowercase=False.

  Args:
    hypotheses: one string per row.
    references: one or more strings per row.
    lowercase: whether case is ignored.
  """
  return _sacrebleu(_make_ter(lowercase=lowercase), '%', hypotheses, references)


def _make_ter(*, lowercase: bool = True) -> TER:
  return TER(case_sensitive=not lowercase)


def _sacrebleu(metric, unit: str, hypotheses: Sequence[str], references: References) -> MetricValue:
  score = metric.corpus_score(hypotheses, reference_streams(references))
  return MetricValue(score.score, unit, f'{score.name}|{metric.get_signature()}')


def rouge(
  hypotheses: Sequence[str], references: References, *, kind: str, tokenize: str = 'ascii', stem: bool = False
) -> MetricValue:
  """ROUGE of summaries, Lin (2004): the mean over rows of the F-measure against the best reference of the row.

  Args:
    hypotheses: one string per row.
    references: one or more strings per row.
    kind: 'rouge1', 'rouge2' or 'rougeL'; rows of METRICS are rouge_1, rouge_2 and rouge_l.
    tokenize: 'ascii', lower-cased words of letters a to z and digits, or 'space', words between spaces, for any script.
    stem: whether suffixes of English words are removed, with the tokenizer 'ascii' only.

  Raises:
    UserError: for an unknown tokenizer, and for stems with 'space'.
  """
  counts = _count_f_measures(hypotheses, references, kind=kind, tokenize=tokenize, stem=stem)
  stemmed = '|stem:porter' if stem else ''
  return MetricValue(counts.rate, 'points', f'{kind}|f-measure|refs:best|tok:{tokenize}{stemmed}|rouge_score')


def _count_f_measures(
  hypotheses: Sequence[str], references: References, *, kind: str, tokenize: str = 'ascii', stem: bool = False
) -> RowCounts:
  return RowCounts(np.array(f_measures(hypotheses, references, kind, tokenize, stem)), np.ones(len(hypotheses), int))


def exact_match(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Share of rows whose output equals one of their references, up to the amount of white space around words."""
  return MetricValue(_count_matches(hypotheses, references).rate, '%', 'exact_match|case:mixed')


def _count_matches(hypotheses: Sequence[str], references: References) -> RowCounts:
  matches = [
    _normalize_spaces(hypothesis) in map(_normalize_spaces, row_references)
    for hypothesis, row_references in zip(hypotheses, references, strict=True)
  ]
  return RowCounts(np.array(matches, int), np.ones(len(matches), int))


def sequence_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Share of rows that equal none of their references, token by token.

  Papers on grapheme-to-phoneme conversion use the name word error rate for it.
  """
  counts = _count_wrong_sequences(hypotheses, references)
  return MetricValue(counts.rate, '%', 'sequence_error_rate|case:mixed|tok:space')


def _count_wrong_sequences(hypotheses: Sequence[str], references: References) -> RowCounts:
  errors = [
    all(hypothesis.split() != reference.split() for reference in row_references)
    for hypothesis, row_references in zip(hypotheses, references, strict=True)
  ]
  return RowCounts(np.array(errors, int), np.ones(len(errors), int))


def token_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Edits / tokens, where tokens are separated by white space; against the nearest reference of each row."""
  return _error_rate(_count_token_edits(hypotheses, references), 'token_error_rate|case:mixed|tok:space')


def _count_token_edits(hypotheses: Sequence[str], references: References) -> RowCounts:
  return _count_edits(hypotheses, references, str.split)


def character_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Edits / characters, with one space between words; against the nearest reference of each row."""
  return _error_rate(_count_character_edits(hypotheses, references), 'character_error_rate|case:mixed|tok:char')


def _count_character_edits(hypotheses: Sequence[str], references: References) -> RowCounts:
  return _count_edits(hypotheses, references, lambda text: list(_normalize_spaces(text)))


def _normalize_spaces(text: str) -> str:
  """Puts one space between words, as vocabularies of words and of pieces do when they decode."""
  return ' '.join(text.split())


def _count_edits(hypotheses: Sequence[str], references: References, split: Callable) -> RowCounts:
  """Edits, and lengths of the nearest references; of equally near references the first one counts."""
  edits = []
  lengths = []
  for hypothesis, row_references in zip(hypotheses, references, strict=True):
    tokens = split(hypothesis)
    reference_tokens = [split(reference) for reference in row_references]
    distances = [Levenshtein.distance(tokens, reference) for reference in reference_tokens]
    edits.append(min(distances))
    lengths.append(len(reference_tokens[distances.index(edits[-1])]))
  return RowCounts(np.array(edits), np.array(lengths))


def _error_rate(counts: RowCounts, signature: str) -> MetricValue:
  if not counts.total.any():
    name = signature.split('|')[0]
    raise UserError(f'{name} needs a row whose nearest reference is not empty, got {len(counts.total)} with empty ones')
  return MetricValue(counts.rate, '%', f'{signature}|refs:nearest')


# Without effective_order, a hypothesis of fewer tokens than `order` always has a BLEU of 0.
SENTENCE_BLEU = (('effective_order', True),)

_TOKEN_ERRORS = Metric(token_error_rate, False, count=_count_token_edits)

METRICS: Mapping[str, Metric] = {
  'bleu': Metric(bleu, True, SENTENCE_BLEU, sacrebleu=_make_bleu),
  **{
    f'bleu_{order}': Metric(
      functools.partial(bleu, order=order), True, SENTENCE_BLEU, sacrebleu=functools.partial(_make_bleu, order=order)
    )
    for order in (1, 2, 3)
  },
  'character_error_rate': Metric(character_error_rate, False, count=_count_character_edits),
  'chrf': Metric(chrf, True, sacrebleu=_make_chrf),
  'exact_match': Metric(exact_match, True, count=_count_matches),
  'phoneme_error_rate': _TOKEN_ERRORS,
  **{
    f'rouge_{kind.lower()}': Metric(
      functools.partial(rouge, kind=f'rouge{kind}'),
      True,
      count=functools.partial(_count_f_measures, kind=f'rouge{kind}'),
    )
    for kind in ('1', '2', 'L')
  },
  'sequence_error_rate': Metric(sequence_error_rate, False, count=_count_wrong_sequences),
  'ter': Metric(ter, False, sacrebleu=_make_ter),
  'token_error_rate': _TOKEN_ERRORS,
  'word_error_rate': _TOKEN_ERRORS,
}
