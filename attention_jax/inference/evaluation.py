"""Metrics of a split: loss, what search makes of its sources, what weights are like and how they agree with links."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.analysis.alignment import (
  alignment_scores,
  entropy,
  links_from_weights,
  merge_weights,
  monotonicity,
)
from attention_jax.data.batching import Batch, eval_batches
from attention_jax.data.encoding import EncodedCorpus, token_units
from attention_jax.data.text import Corpus, group_references
from attention_jax.data.vocab import Vocabulary
from attention_jax.inference.metrics import MetricValue, compute_metric
from attention_jax.inference.predictor import Prediction, Predictor
from attention_jax.losses.sequence import output_loss, replace_unreachable_targets
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.specs import parse
from attention_jax.training.partition import jit_on_mesh, make_mesh, replicate, shard_batch

# What is measured on given targets, whatever the config: whether more of it is better. Alignments need gold links.
ALIGNMENT_METRICS = {'alignment_error_rate': False, 'precision': True, 'recall': True}
FORCED_METRICS = {'loss': False, 'accuracy': True} | ALIGNMENT_METRICS


class ForcedScores(NamedTuple):
  """What a model says of given targets: loss and accuracy per token, and per row (None where it fits no bucket) the
  weights [T, S] of its target tokens, EOS included, over its source tokens, EOS included; of a latent alignment those
  given the whole target."""

  loss: float
  accuracy: float
  weights: list[np.ndarray | None]


class TeacherForcedScorer:
  """Scores given targets (teacher forcing). Every process does all of it on its own devices."""

  def __init__(self, model: EncoderDecoder, buckets: Sequence[Sequence[int]], batch_size: int):
    self._mesh, self._buckets = make_mesh(jax.local_devices()), buckets
    devices = self._mesh.devices.size
    self.rows = -(-batch_size // devices) * devices

    def run(params, batch: Batch):
      batch = replace_unreachable_targets(model, batch)
      outputs = model.apply({'params': params}, batch.source, batch.source_mask, batch.target)
      return output_loss(outputs, batch.target, batch.target_mask), model.posterior(outputs, batch.target_mask)

    self._run = jit_on_mesh(self._mesh, run)

  def __call__(self, params: Any, encoded: EncodedCorpus) -> ForcedScores:
    return self.score_batches(params, eval_batches(encoded, self._buckets, self.rows), encoded.rows)

  def score_batches(self, params: Any, batches: Iterable[Batch], rows: int) -> ForcedScores:
    """Of a split of so many rows, each of them in one of the batches of `self.rows`, or in none."""
    params = replicate(jax.device_get(params), self._mesh)
    totals, weights = [], [None] * rows
    for batch in batches:
      sums, found = self._run(params, shard_batch(batch, self._mesh))
      totals.append(sums)
      for i, matrix in enumerate(np.asarray(found)):
        if batch.index[i] >= 0:
          target = int(batch.target_mask[i].sum())
          source = int(np.broadcast_to(batch.source_mask[i], matrix.shape[1:]).sum())
          weights[batch.index[i]] = matrix[:target, :source].copy()  # a view would keep the whole batch
    sums = jax.tree.map(lambda *x: float(sum(x)), *jax.device_get(totals))
    return ForcedScores(sums['loss'] / sums['tokens'], sums['accuracy'] / sums['tokens'], weights)


def alignment_metrics(
  corpus: Corpus, weights: Sequence[np.ndarray | None], source_vocab: Vocabulary, target_vocab: Vocabulary
) -> dict[str, MetricValue]:
  """What the weights of given targets are like, and where the corpus has links, how far they agree with these.

  Rows without weights are left out. A row whose weights are all 0 is not: a token that looks nowhere misses its links.
  """
  rows = [row for row, matrix in enumerate(weights) if matrix is not None]
  if not rows:
    return {}
  against_links = {} if corpus.links is None else _link_metrics(corpus, weights, rows, source_vocab, target_vocab)
  return against_links | weight_metrics([weights[row] for row in rows])


def _link_metrics(corpus, weights, rows, source_vocab, target_vocab) -> dict[str, MetricValue]:
  """Alignment error rate, precision and recall of the heaviest weights against the corpus' links.

  Links between words are held against weights that are merged to words (analysis.merge_weights), whatever the tokens.
  Target tokens without any gold link (the '-' of an ISO date) belong to no source token: they are left out.
  """
  sure = [corpus.links[r] for r in rows]
  possible = sure if corpus.possible is None else [corpus.possible[r] for r in rows]
  source_units, target_units = token_units(source_vocab, corpus.level), token_units(target_vocab, corpus.level)
  merged = [merge_weights(weights[r], source_units(corpus.source[r]), target_units(corpus.target[r])) for r in rows]
  links = [_predicted(w, {target for _, target in gold}) for w, gold in zip(merged, possible, strict=True)]
  scores = alignment_scores(links, sure, possible)
  percent = {'alignment_error_rate': scores.error_rate, 'precision': scores.precision, 'recall': scores.recall}
  how = '' if {source_vocab.kind, target_vocab.kind} == {corpus.level} else f'|merged:{corpus.level}s'
  signature = f'links:argmax{how}|targets:forced,linked|rows:{len(rows)}'
  return {name: MetricValue(100 * value, '%', signature) for name, value in percent.items()}


def weight_metrics(weights: Sequence[np.ndarray]) -> dict[str, MetricValue]:
  """Entropy and monotonicity of the target tokens' weights, each where there is something to measure it of."""
  nats = np.concatenate([entropy(w[:-1]) for w in weights])
  onward = np.concatenate([monotonicity(w, w.shape[1] - 1, w.shape[0] - 1) for w in weights])
  signature = f'per:token|targets:forced|rows:{len(weights)}'
  found = {}
  if nats.size:
    found['entropy'] = MetricValue(float(nats.mean()), 'nat', signature)
  if onward.size:
    found['monotonicity'] = MetricValue(100 * float(onward.mean()), '%', f'links:argmax|{signature}')
  return found


def _predicted(weights: np.ndarray, linked: set[int]) -> list[tuple[int, int]]:
  links = links_from_weights(weights, weights.shape[1] - 1, weights.shape[0] - 1)
  return [(source, target) for source, target in links if target in linked]


def predict_and_evaluate(
  corpus: Corpus, predictor: Predictor, options: Mapping[str, Any], *, beams: int
) -> tuple[dict[str, MetricValue], list[Prediction]]:
  """Searches for every source of the corpus and measures the best hypotheses; one prediction per row of the corpus.

  `options` is config.evaluation.
  """
  sources = group_references(corpus)[0] if options['group_references'] else list(corpus.source)
  by_source = dict(zip(sources, predictor(sources, beams=beams), strict=True))
  predictions = [by_source[source] for source in corpus.source]
  return text_metrics(corpus, [p.hypotheses[0].text if p.hypotheses else '' for p in predictions], options), predictions


def text_metrics(corpus: Corpus, hypotheses: Sequence[str], options: Mapping[str, Any]) -> dict[str, MetricValue]:
  """The metrics of `options`, config.evaluation, for one hypothesis a row of the corpus."""
  references = [[target] for target in corpus.target]
  if options['group_references']:
    sources, references, _ = group_references(corpus)
    said = dict(zip(corpus.source, hypotheses, strict=True))
    hypotheses = [said[source] for source in sources]
  return {parse(spec)[0]: compute_metric(spec, hypotheses, references) for spec in options['metrics']}


def evaluate_corpus(
  params: Any,
  corpus: Corpus,
  encoded: EncodedCorpus,
  scorer: TeacherForcedScorer,
  predictor: Predictor,
  options: Mapping[str, Any],
  *,
  beams: int,
) -> tuple[dict[str, MetricValue], list[Prediction]]:
  """Everything that is measured on a split, and the predictions it was measured on."""
  forced = scorer(params, encoded)
  found = {'loss': MetricValue(forced.loss, 'nat/token', 'targets:forced')}
  found['accuracy'] = MetricValue(100 * forced.accuracy, '%', 'targets:forced')
  texts, predictions = predict_and_evaluate(corpus, predictor, options, beams=beams)
  found |= texts
  if predictor.model.traits.attends:
    found |= alignment_metrics(corpus, forced.weights, predictor.source_vocab, predictor.target_vocab)
  return found, predictions
