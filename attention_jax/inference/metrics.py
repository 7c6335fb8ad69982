"""Metrics of output text: METRICS names them, spec strings such as `bleu(tokenize="none")` choose them.

Each takes hypotheses (one string a row) and references (one or more strings a row, not the same number everywhere) and
returns a MetricValue. Distances and n-gram statistics come from sacrebleu and rapidfuzz. Rates may exceed 100 where a
hypothesis is much longer than its reference.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF, TER

from attention_jax.errors import UserError, choose
from attention_jax.specs import bind, schema_of

References = Sequence[Sequence[str]]
# sacrebleu's other tokenizers need further packages or download a model.
TOKENIZERS = ('13a', 'char', 'intl', 'none', 'zh')


class MetricValue(NamedTuple):
  """A value in its unit, and the signature that says exactly what was computed."""

  value: float
  unit: str
  signature: str


class MetricSummary(NamedTuple):
  """A MetricValue over several runs: their mean, their standard deviation (n - 1), and the value of each."""

  value: float
  unit: str
  signature: str
  deviation: float
  values: tuple[float, ...]


def aggregate_runs(results: Sequence[MetricValue]) -> MetricSummary:
  """One metric of two or more runs, together."""
  values = tuple(result.value for result in results)
  return MetricSummary(statistics.fmean(values), *results[0][1:], statistics.stdev(values), values)


class Metric(NamedTuple):
  """A row of METRICS: fn(hypotheses, references, *, options) -> MetricValue, which way is better, and what options it has
  where single lines are compared."""

  fn: Callable[..., MetricValue]
  higher_is_better: bool
  sentence_level: tuple[tuple[str, Any], ...] = ()


def compute_metric(
  spec: str, hypotheses: Sequence[str], references: References, *, sentence_level: bool = False
) -> MetricValue:
  """The metric that `spec` names, over a whole corpus.

  Args:
    spec: a name of METRICS, with options or without.
    hypotheses: one string per row, at least one row.
    references: one or more strings per row.
    sentence_level: whether the rows are no corpus but lines that are compared with one another, see Metric.

  Raises: UserError for an unknown metric or option, no rows, rows that do not match, or a row without a reference.
  """
  name, options = _read(spec)
  if not hypotheses or len(hypotheses) != len(references):
    raise UserError(
      f'{name} needs at least one row and references for each, '
      f'got {len(hypotheses)} hypotheses and {len(references)} rows of references'
    )
  for row, several in enumerate(references):
    if isinstance(several, str) or not several:
      raise UserError(f'{name}: row {row} needs a list of at least one reference, got {several!r}')
  row = METRICS[name]
  return row.fn(hypotheses, references, **(dict(row.sentence_level) if sentence_level else {}) | options)


def higher_is_better(spec: str) -> bool:
  """Whether a checkpoint with more of it is the better one. Raises: UserError as `compute_metric` does for a wrong spec."""
  return METRICS[_read(spec)[0]].higher_is_better


def _read(spec: str) -> tuple[str, dict[str, Any]]:
  name, _, options = bind(spec, METRICS, 'metric', lambda metric: schema_of(metric.fn))
  return name, options


def bleu(
  hypotheses: Sequence[str],
  references: References,
  *,
  tokenize: str = '13a',
  lowercase: bool = False,
  order: int = 4,
  effective_order: bool = False,
) -> MetricValue:
  """BLEU, Papineni et al. (2002), of n-grams up to `order`. tokenize='none' for text that is tokenised already.

  With effective_order, n-grams that are longer than every line do not count; of a corpus that is no BLEU.
  """
  choose(tokenize, TOKENIZERS, 'tokenizer of bleu')
  if order < 1:
    raise UserError(f'bleu: order is {order}; possible: 1 or more')
  # force: the tokenizer is chosen by name and stands in the signature, so a warning about it would say nothing new.
  options = {'tokenize': tokenize, 'lowercase': lowercase, 'effective_order': effective_order}
  metric = BLEU(**options, force=True, max_ngram_order=order)
  found = _sacrebleu(metric, 'points', hypotheses, references)
  return found if order == 4 else found._replace(signature=f'{found.signature}|order:{order}')


def chrf(
  hypotheses: Sequence[str], references: References, *, word_order: int = 0, lowercase: bool = False
) -> MetricValue:
  """chrF2, Popović (2015); chrF++ with word_order=2."""
  return _sacrebleu(CHRF(word_order=word_order, lowercase=lowercase), 'points', hypotheses, references)


def ter(hypotheses: Sequence[str], references: References, *, lowercase: bool = True) -> MetricValue:
  """Translation edit rate, Snover et al. (2006); like tercom it ignores case unless lowercase=False."""
  return _sacrebleu(TER(case_sensitive=not lowercase), '%', hypotheses, references)


def _sacrebleu(metric, unit: str, hypotheses: Sequence[str], references: References) -> MetricValue:
  most = max(map(len, references))
  # One list per reference number; None, which sacrebleu skips, where a row has fewer ('' would count as a reference).
  streams = [[row[i] if i < len(row) else None for row in references] for i in range(most)]
  score = metric.corpus_score(hypotheses, streams)
  return MetricValue(score.score, unit, f'{score.name}|{metric.get_signature()}')


def exact_match(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Share of rows whose whole output is one of its references, but for spaces at the ends and runs of them."""
  hits = sum(_spaced(said) in map(_spaced, several) for said, several in zip(hypotheses, references, strict=True))
  return MetricValue(100 * hits / len(hypotheses), '%', 'exact_match|case:mixed')


def sequence_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Share of rows whose output, token by token, is none of its references: what papers on g2p call word error rate."""
  split = [any(h.split() == r.split() for r in rs) for h, rs in zip(hypotheses, references, strict=True)]
  return MetricValue(100 * split.count(False) / len(split), '%', 'sequence_error_rate|case:mixed|tok:space')


def token_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Edits / tokens, where tokens are separated by white space; against the nearest reference of each row."""
  return _error_rate(hypotheses, references, str.split, 'token_error_rate|case:mixed|tok:space')


def character_error_rate(hypotheses: Sequence[str], references: References) -> MetricValue:
  """Edits / characters, against the nearest reference of each row; a run of spaces is one, at the ends none."""
  split = lambda text: list(_spaced(text))
  return _error_rate(hypotheses, references, split, 'character_error_rate|case:mixed|tok:char')


def _spaced(text: str) -> str:
  """With one space between words, as vocabularies of words and of pieces decode, whose models can say no other."""
  return ' '.join(text.split())


def _error_rate(hypotheses: Sequence[str], references: References, split: Callable, signature: str) -> MetricValue:
  """Σ edits / Σ lengths of the nearest references; of references equally near the first one counts."""
  edits = length = 0
  for hypothesis, several in zip(hypotheses, references, strict=True):
    tokens = split(hypothesis)
    distances = [(Levenshtein.distance(tokens, split(reference)), i) for i, reference in enumerate(several)]
    nearest, i = min(distances)
    edits, length = edits + nearest, length + len(split(several[i]))
  if not length:
    raise UserError(f'{signature.split("|")[0]}: every reference is empty, so there is nothing to divide by')
  return MetricValue(100 * edits / length, '%', f'{signature}|refs:nearest')


SHORT = (('effective_order', True),)  # otherwise no line of three words is like any other

METRICS: Mapping[str, Metric] = {
  'bleu': Metric(bleu, True, SHORT),
  **{f'bleu_{order}': Metric(functools.partial(bleu, order=order), True, SHORT) for order in (1, 2, 3)},
  'character_error_rate': Metric(character_error_rate, False),
  'chrf': Metric(chrf, True),
  'exact_match': Metric(exact_match, True),
  'phoneme_error_rate': Metric(token_error_rate, False),
  'sequence_error_rate': Metric(sequence_error_rate, False),
  'ter': Metric(ter, False),
  'token_error_rate': Metric(token_error_rate, False),
  'word_error_rate': Metric(token_error_rate, False),
}
