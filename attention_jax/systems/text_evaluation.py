"""Metrics of a split: loss, metrics of the output text, properties of the weights, and their agreement with links."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from attention_jax.analysis.alignment import (
  Link,
  alignment_scores,
  entropy,
  links_from_weights,
  merge_weights,
  monotonicity,
)
from attention_jax.analysis.statistics import average_lagging
from attention_jax.data.batching import Batch, eval_batches
from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.text import Corpus, group_references, normalize_lines
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.metrics import MetricValue, compute_metric, higher_is_better
from attention_jax.decoding.predictor import Prediction, Predictor
from attention_jax.decoding.ranking import DEFAULT_RANKING, LENGTH_PENALTIES, Exponent, Factor, Ranking
from attention_jax.decoding.streaming import is_streamable
from attention_jax.decoding.word_alignment import link_units
from attention_jax.errors import UserError, choose
from attention_jax.losses.sequence import output_loss
from attention_jax.models.encoder_decoder import EncoderDecoder, replace_unreachable_targets
from attention_jax.specs import Count, OutputLength, Repeats, Size, check_fields, parse
from attention_jax.training.compiling import CompiledForRuns
from attention_jax.training.partition import make_mesh, place_parameters, shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.watch import Watch, unwatched

# Metrics of teacher forcing that `training.select` may name -> whether higher is better. Those of alignments need gold
# links.
ALIGNMENT_METRICS = {'alignment_error_rate': False, 'precision': True, 'recall': True}
TEACHER_FORCED_METRICS = {'loss': False, 'accuracy': True} | ALIGNMENT_METRICS


@dataclasses.dataclass(frozen=True)
class TextEvaluationConfig:
  """Fields of `config.evaluation`.

  Attributes:
    metrics: specs of decoding.metrics.METRICS.
    group_references: whether the targets of rows with the same source are alternative references of one example.
    beams: beam size of the evaluation after training, and by default of programs that search; 1 is greedy. Validation
      during training is greedy.
    alpha, beta, gamma: exponent of the length penalty, and factors of the coverage penalty and the end-of-sentence
      normalisation, in the ranking of hypotheses, see decoding.ranking.Ranking; 0 disables each.
    length_penalty: 'wu2016' for ((5 + length) / 6)^alpha, 'power' for length^alpha; the length includes EOS.
    no_repeat_ngram_size: n > 0 excludes hypotheses in which a sequence of n tokens occurs twice (Paulus, Xiong & Socher
      2018).
    min_length: minimum length of hypotheses, without the end-of-sentence token.
    max_length: maximum length of hypotheses, the end-of-sentence token included; 0 for the longest target of the
      buckets.
    batch_size: number of sources that are searched at once.
    replace_unknown: whether an out-of-vocabulary token of a hypothesis is replaced by the source token with the largest
      weight (Jean et al. 2015).
    unlinked_targets: whether predicted links count as errors if their target word (or character) has no gold link;
      otherwise they are left out.
  """

  metrics: tuple[str, ...] = ('exact_match', 'character_error_rate')
  group_references: bool = False
  beams: Repeats = 5
  alpha: Exponent = DEFAULT_RANKING.alpha
  beta: Factor = DEFAULT_RANKING.beta
  gamma: Factor = DEFAULT_RANKING.gamma
  length_penalty: str = DEFAULT_RANKING.length_penalty
  no_repeat_ngram_size: Count = NO_CONSTRAINTS.no_repeat_ngram_size
  min_length: Count = NO_CONSTRAINTS.min_length
  max_length: OutputLength = 0
  batch_size: Size = 128
  replace_unknown: bool = False
  unlinked_targets: bool = False

  def __post_init__(self):
    check_fields(self, 'config.evaluation')
    choose(self.length_penalty, LENGTH_PENALTIES, 'length penalty')
    names = [parse(spec, 'metric')[0] for spec in self.metrics]
    if repeated := [name for name in names if names.count(name) > 1]:
      raise UserError(f'evaluation.metrics must name each metric once, got {repeated[0]!r} more than once')

  @property
  def ranking(self) -> Ranking:
    """The ranking of finished hypotheses."""
    return Ranking(self.alpha, self.beta, self.gamma, self.length_penalty)

  @property
  def constraints(self) -> Constraints:
    """The constraints on hypotheses."""
    return Constraints(self.no_repeat_ngram_size, self.min_length)


class ForcedScores(NamedTuple):
  """Results of teacher forcing on gold targets; loss and accuracy are those of the rows that fit a bucket.

  Attributes:
    loss: cross entropy per target token, EOS included, in nats.
    accuracy: share of target tokens, EOS included, to which the model gives the highest probability.
    weights: [T, S] per row, over its target tokens and source tokens, EOS included (for captions, over all positions
      of the picture); for a latent alignment, the weights given the whole target; None for a row that fits no bucket.
  """

  loss: float
  accuracy: float
  weights: list[np.ndarray | None]


class TeacherForcedScorer:
  """Scores gold targets by teacher forcing. Every process scores its share of the batches, see `map_batches`.

  Args:
    model: the model.
    buckets: buckets of training.
    batch_size: rows per batch, rounded up to a multiple of the number of devices.
    rounds: number of times that a split is expected to be scored, see compiling.compiler_options.
    mesh: the mesh of the devices; by default one of this process's devices.
  """

  def __init__(
    self,
    model: EncoderDecoder,
    buckets: Sequence[Sequence[int]],
    batch_size: int,
    rounds: int = 1,
    mesh: Mesh | None = None,
  ):
    self._mesh = mesh or make_mesh(jax.local_devices())
    self._buckets = buckets
    devices = self._mesh.devices.size
    self.batch_rows = -(-batch_size // devices) * devices

    def run(params, batch: Batch):
      batch = replace_unreachable_targets(model, batch)
      outputs = model.apply({'params': params}, batch.source, batch.source_mask, batch.target)
      return output_loss(outputs, batch.target, batch.target_mask), model.posterior(outputs, batch.target_mask)

    self._rounds = rounds
    self._compiled = CompiledForRuns(self._mesh, run)

  def __call__(self, params: Any, encoded: EncodedCorpus, watch: Watch = unwatched) -> ForcedScores:
    """Scores an encoded corpus; arguments: see `score_batches`."""
    return self.score_batches(params, eval_batches(encoded, self._buckets, self.batch_rows), encoded.rows, watch)

  def score_batches(self, params: Any, batches: Iterable[Batch], rows: int, watch: Watch = unwatched) -> ForcedScores:
    """Scores the batches of a split.

    Args:
      params: the parameters of the model.
      batches: batches of `self.batch_rows` rows; each row of the split is in one batch at most.
      rows: number of rows of the split.
      watch: called before each batch.
    """
    params = place_parameters(params, self._mesh)
    run = self._compiled.select(self._rounds * -(-rows // self.batch_rows), params)
    batch_sums = []
    weights: list[np.ndarray | None] = [None] * rows

    def score(batch):
      return run(params, shard_rows(batch, self._mesh))

    for batch, (sums, batch_weights) in map_batches(score, batches, watch, self._mesh):
      batch_sums.append(sums)
      for i, matrix in enumerate(batch_weights):
        if batch.index[i] >= 0:
          target_length = int(batch.target_mask[i].sum())
          # Image models have one mask entry for all positions.
          source_length = int(np.broadcast_to(batch.source_mask[i], matrix.shape[1:]).sum())
          # A view would keep the whole batch in memory.
          weights[batch.index[i]] = matrix[:target_length, :source_length].copy()
    sums = jax.tree.map(lambda *x: float(sum(x)), *batch_sums)
    return ForcedScores(sums['loss'] / sums['tokens'], sums['accuracy'] / sums['tokens'], weights)


def alignment_metrics(
  corpus: Corpus,
  weights: Sequence[np.ndarray | None],
  source_vocab: Vocabulary,
  target_vocab: Vocabulary,
  unlinked_targets: bool = False,
) -> dict[str, MetricValue]:
  """Computes metrics of the weights of gold targets, and of their agreement with the links of the corpus, if any.

  Rows without weights are left out. A row whose weights are all zero counts as missing all its links.

  Args:
    corpus: the pairs.
    weights: [T, S] per row, or None.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    unlinked_targets: whether predicted links count as errors if their target word (or character), such as the '-' of
      an ISO date, has no gold link; otherwise they are left out.
  """
  rows = [row for row, matrix in enumerate(weights) if matrix is not None]
  if not rows:
    return {}
  link_metrics = {}
  if corpus.links is not None:
    link_metrics = _link_metrics(corpus, weights, rows, source_vocab, target_vocab, unlinked_targets)
  return link_metrics | weight_metrics([weights[row] for row in rows])


def _link_metrics(
  corpus: Corpus,
  weights: Sequence[np.ndarray | None],
  rows: Sequence[int],
  source_vocab: Vocabulary,
  target_vocab: Vocabulary,
  unlinked_targets: bool,
) -> dict[str, MetricValue]:
  """Alignment error rate, precision and recall of the largest weights against the corpus' links.

  Links between words are compared with weights that are merged to words (analysis.merge_weights), whatever the tokens.
  """
  links = predict_links(corpus, weights, rows, source_vocab, target_vocab, unlinked_targets)
  scores = alignment_scores(*links)
  percent = {'alignment_error_rate': scores.error_rate, 'precision': scores.precision, 'recall': scores.recall}
  is_merged = {source_vocab.kind, target_vocab.kind} != {corpus.level}
  merging = f'|merged:{corpus.level}s' if is_merged else ''
  targets = 'forced' if unlinked_targets else 'forced,linked'
  signature = f'links:argmax{merging}|targets:{targets}|rows:{len(rows)}'
  return {name: MetricValue(100 * value, '%', signature) for name, value in percent.items()}


class LinkComparison(NamedTuple):
  """Links of sentences, as `alignment_scores` compares them."""

  predicted: list[Sequence[Link]]
  sure: list[Sequence[Link]]
  possible: list[Sequence[Link]]


def predict_links(
  corpus: Corpus,
  weights: Sequence[np.ndarray | None],
  rows: Sequence[int],
  source_vocab: Vocabulary,
  target_vocab: Vocabulary,
  unlinked_targets: bool = False,
) -> LinkComparison:
  """Returns the links of the largest weights of these rows, and the gold links of the same rows.

  Args:
    corpus: the pairs, with links.
    weights: [T, S] per row of the corpus.
    rows: the rows, which have weights.
    source_vocab: source vocabulary of the run.
    target_vocab: target vocabulary of the run.
    unlinked_targets: as for `alignment_metrics`.

  Raises:
    UserError: for a vocabulary whose tokens are not parts of the units that links connect.
  """
  sure = [corpus.links[row] for row in rows]
  possible = sure if corpus.possible is None else [corpus.possible[row] for row in rows]
  source_units, target_units = link_units(corpus.level, source_vocab, target_vocab)
  predicted = []
  for row, gold in zip(rows, possible, strict=True):
    merged = merge_weights(weights[row], source_units(corpus.source[row]), target_units(corpus.target[row]))
    links = links_from_weights(merged, merged.shape[1] - 1, merged.shape[0] - 1)
    linked_targets = {target for _, target in gold}
    predicted.append([link for link in links if unlinked_targets or link[1] in linked_targets])
  return LinkComparison(predicted, sure, possible)


def weight_metrics(weights: Sequence[np.ndarray]) -> dict[str, MetricValue]:
  """Returns entropy and monotonicity of the weights of target tokens, without the row of EOS.

  Entropy is left out if no target token has weight, and monotonicity if no two adjacent target tokens have links.

  Args:
    weights: [T, S] per row, EOS included, in the order of the text.
  """
  entropies = np.concatenate([entropy(matrix[:-1]) for matrix in weights])
  forward_moves = np.concatenate([monotonicity(matrix, matrix.shape[1] - 1, matrix.shape[0] - 1) for matrix in weights])
  signature = f'per:token|targets:forced|rows:{len(weights)}'
  metrics = {}
  if entropies.size:
    metrics['entropy'] = MetricValue(float(entropies.mean()), 'nat', signature)
  if forward_moves.size:
    metrics['monotonicity'] = MetricValue(100 * float(forward_moves.mean()), '%', f'links:argmax|{signature}')
  return metrics


def lagging_metric(predictions: Iterable[Prediction]) -> dict[str, MetricValue]:
  """Returns the mean average lagging of the best hypotheses of a streaming model.

  Empty hypotheses and those of empty sources are left out. There is no metric if none remains.
  """
  values = [
    average_lagging(hypotheses[0].weights, len(tokens), len(hypotheses[0].tokens))
    for _, tokens, hypotheses in predictions
    if hypotheses
  ]
  values = [value for value in values if np.isfinite(value)]
  signature = f'per:row|targets:hypotheses|rows:{len(values)}'
  return {'average_lagging': MetricValue(float(np.mean(values)), 'token', signature)} if values else {}


def predict_and_evaluate(
  corpus: Corpus, predictor: Predictor, options: TextEvaluationConfig, *, beams: int, watch: Watch = unwatched
) -> tuple[dict[str, MetricValue], list[Prediction]]:
  """Predicts every source of a corpus, and computes the metrics of the best hypotheses.

  Args:
    corpus: the pairs.
    predictor: called with sources, beams and watch.
    options: config.evaluation.
    beams: beams of the search.
    watch: called before each batch.

  Returns:
    The metrics by name, and one prediction per row of the corpus.
  """
  sources = group_references(corpus)[0] if options.group_references else list(corpus.source)
  prediction_of = dict(zip(sources, predictor(sources, beams=beams, watch=watch), strict=True))
  predictions = [prediction_of[source] for source in corpus.source]
  texts = [prediction.hypotheses[0].text if prediction.hypotheses else '' for prediction in predictions]
  return text_metrics(corpus, texts, options), predictions


def text_metrics(corpus: Corpus, hypotheses: Sequence[str], options: TextEvaluationConfig) -> dict[str, MetricValue]:
  """Computes the metrics of output text that a config selects.

  Args:
    corpus: the pairs.
    hypotheses: one per row of the corpus.
    options: config.evaluation.
  """
  texts = select_texts(corpus, hypotheses, options)
  return {
    parse(spec, 'metric')[0]: compute_metric(spec, texts.hypotheses, texts.references) for spec in options.metrics
  }


class ComparedTexts(NamedTuple):
  """Hypotheses with their sources, and the references that they are compared with.

  Attributes:
    sources: one per row.
    hypotheses: one per row.
    references: one or more per row.
    rows: the index in the corpus of each row, or of the first row with its source if references are grouped.
  """

  sources: list[str]
  hypotheses: list[str]
  references: list[list[str]]
  rows: list[int]


def select_texts(corpus: Corpus, hypotheses: Sequence[str], options: TextEvaluationConfig) -> ComparedTexts:
  """Returns the rows that metrics of text compare: one per row of the corpus, or per source if references are grouped.

  Hypotheses are normalised as the corpus is.

  Args:
    corpus: the pairs.
    hypotheses: one per row of the corpus.
    options: config.evaluation.

  Raises:
    UserError: if references are grouped, and the hypotheses of a source differ.
  """
  hypotheses = normalize_lines(hypotheses, corpus.normalization)
  if not options.group_references:
    references = [[target] for target in corpus.target]
    return ComparedTexts(list(corpus.source), hypotheses, references, [*range(len(references))])
  sources, references, rows = group_references(corpus)
  first_row = dict(zip(sources, rows, strict=True))
  for row, source in enumerate(corpus.source):
    first = first_row[source]
    if hypotheses[row] != hypotheses[first]:
      raise UserError(
        f'hypotheses {first + 1} and {row + 1} differ, but belong to the same source; expected equal ones, because '
        'config.evaluation.group_references compares one hypothesis with all references of a source'
      )
  return ComparedTexts(sources, [hypotheses[row] for row in rows], references, rows)


def evaluate_corpus(
  params: Any,
  corpus: Corpus,
  encoded: EncodedCorpus,
  scorer: TeacherForcedScorer,
  predictor: Predictor,
  options: TextEvaluationConfig,
  *,
  beams: int,
  watch: Watch = unwatched,
) -> tuple[dict[str, MetricValue], list[Prediction]]:
  """Computes all metrics of a split.

  Args:
    params: the parameters of the model.
    corpus: the split.
    encoded: the same split, encoded.
    scorer: scores its targets.
    predictor: predicts its targets.
    options: config.evaluation.
    beams: beams of the search.
    watch: called before each batch.

  Returns:
    The metrics by name, and one prediction per row of the corpus.
  """
  forced = scorer(params, encoded, watch)
  metrics = {
    'loss': MetricValue(forced.loss, 'nat/token', 'targets:forced'),
    'accuracy': MetricValue(100 * forced.accuracy, '%', 'targets:forced'),
  }
  texts, predictions = predict_and_evaluate(corpus, predictor, options, beams=beams, watch=watch)
  metrics |= texts
  if is_streamable(predictor.model):
    metrics |= lagging_metric(predictions)
  if predictor.model.traits.attends:
    vocabularies = (predictor.source_vocab, predictor.target_vocab)
    metrics |= alignment_metrics(corpus, forced.weights, *vocabularies, options.unlinked_targets)
  return metrics, predictions


def text_metric_directions(options: TextEvaluationConfig) -> dict[str, bool]:
  """Returns the names of the text metrics of config.evaluation, and whether a higher value is better."""
  return {parse(spec, 'metric')[0]: higher_is_better(spec) for spec in options.metrics}
