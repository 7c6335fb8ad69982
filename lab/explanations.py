"""Measures whether the attention of trained runs explains their outputs: rows of tables over examples and seeds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.sparse

from attention_jax.analysis.agreement import jensen_shannon
from attention_jax.data.batching import gather
from attention_jax.models.encoder_decoder import replace_unreachable_targets
from attention_jax.sweeps.collect import SettingRuns
from attention_jax.sweeps.statistics import Interval, bootstrap_mean
from attention_jax.systems.base import System
from attention_jax.systems.classification.batches import check_document_buckets, gather_documents, largest_bucket
from attention_jax.systems.runs import Run, open_run
from lab.claim_rows import Factor, claim_row, spread_rows
from lab.explanation_measures import (
  READERS,
  Example,
  ExampleReader,
  MeasureOptions,
  explain,
  read_weights,
  summarize_examples,
)
from lab.measured import summarize
from lab.probes import guided_predictions, weighted_counts
from lab.records import Row

# Measure -> its name in the table; τ is Kendall's rank correlation of two orders of the source positions.
MEASURES = {
  'weights and gradients': 'τ of weights and gradients',
  'weights and leave-one-out': 'τ of weights and leave-one-out',
  'gradients and leave-one-out': 'τ of gradients and leave-one-out',
  'permutation': 'change of the output by permuted weights',
  'adversarial': 'divergence of adversarial weights, nat',
  'seeds': 'divergence of the weights of two seeds, nat',
}
GUIDES: Mapping[str, Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]] = {
  # weights [T, S], mask [S], generator -> the weights that guide the probe
  'uniform': lambda weights, mask, rng: np.where(mask, 1 / mask.sum(), 0.0) * np.ones_like(weights),
  'those of the model': lambda weights, mask, rng: weights,
  'the same in random order': lambda weights, mask, rng: _shuffled(weights, mask, rng),
}


def _shuffled(weights: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  shuffled = weights.copy()
  shuffled[:, mask] = rng.permuted(weights[:, mask], axis=1)
  return shuffled


class Study(NamedTuple):
  """The examples and the options of a measurement.

  Attributes:
    split: the split whose examples are explained, and on which guided probes are tested.
    options: options of the measures.
    num_explained: number of examples that are explained.
    num_probe_train: number of training examples of guided probes.
    num_probe_test: number of examples of the split on which guided probes are tested.
  """

  split: str
  options: MeasureOptions
  num_explained: int
  num_probe_train: int
  num_probe_test: int


def pair_examples(system: Any, split: str, count: int) -> Example:
  """Returns pairs of a split, spread evenly over it; target words that the model cannot emit are UNK.

  Args:
    system: a TranslationSystem.
    split: name of the split.
    count: number of pairs; all pairs if there are fewer.

  Returns:
    The pairs, with a leading axis N.
  """
  encoded = system.data.encoded[split]
  rows = spread_rows(encoded.rows, count)
  bucket = tuple(int(lengths[rows].max()) for lengths in encoded.lengths)
  batch = replace_unreachable_targets(system.model, gather(encoded, rows, bucket))
  return Example(batch.source, batch.source_mask, np.asarray(batch.target), batch.target_mask)


def document_examples(system: Any, split: str, count: int) -> Example:
  """Returns documents of a split, spread evenly over it; of each document, only the first sentence.

  Args:
    system: a ClassificationSystem.
    split: name of the split.
    count: number of documents; all documents if there are fewer.

  Returns:
    The documents, with a leading axis N.
  """
  encoded = system.encoded[split]
  rows = spread_rows(encoded.rows, count)
  batch = gather_documents(encoded, rows, largest_bucket(check_document_buckets(system.config.data.buckets)))
  return Example(batch.source[:, 0], batch.source_mask[:, 0], batch.label[:, None], np.ones([len(rows), 1], bool))


EXAMPLES: Mapping[str, Callable[[System, str, int], Example]] = {  # by the name of the system
  'classification': document_examples,
  'translation': pair_examples,
}


def explanation_rows(
  settings: Sequence[SettingRuns], factors: Sequence[Factor], study: Study
) -> tuple[list[Row], list[Row]]:
  """Explains examples by every run, and probes its weights.

  Args:
    settings: settings with learned weights, of one system with the same data.
    factors: the factors that name a row. Rows of measures also have a factor 'measure', rows of probes a factor
      'weights', and all rows an 'interval': over examples for measures, over outputs for probes.
    study: the examples and the options.

  Returns:
    Rows of MEASURES, and rows of the accuracy of probes that are guided by GUIDES. A setting with one seed has no row
    of the divergence of seeds.
  """
  measures = []
  probes = []
  for setting in settings:
    runs = [open_run(run.folder) for run in setting.runs]
    measured, weights = _explain_runs(runs, study)
    if len(runs) > 1:
      measured['seeds'] = _divergences(weights)
    measures += [
      _interval_row(setting, factors, {'measure': title}, 'explanation/value', measured[name])
      for name, title in MEASURES.items()
      if name in measured
    ]
    for guide, correct in _probe_runs(runs, study).items():
      probes.append(_interval_row(setting, factors, {'weights': guide}, 'probe/accuracy', 100 * correct))
  return measures, probes


def _reader_and_loader(run: Run) -> tuple[ExampleReader, Callable[[System, str, int], Example]]:
  name = run.config.system
  return READERS[name], EXAMPLES[name]


def _explain_runs(runs: Sequence[Run], study: Study) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns measure -> [seeds, N], and the weights [seeds, N, T, S] with NaN at the padding of targets."""
  measured = []
  weights = []
  for run in runs:
    reader, load = _reader_and_loader(run)
    examples = load(run.system, study.split, study.num_explained)
    explanations = explain(reader, run.system.model, run.params, examples, study.options)
    measured.append(summarize_examples(examples, explanations))
    weights.append(np.where(examples.target_mask[..., None], explanations.weights, np.nan))
  return {name: np.stack([values[name] for values in measured]) for name in measured[0]}, np.stack(weights)


def _divergences(weights: np.ndarray) -> np.ndarray:
  """Jensen-Shannon divergence of the weights of each pair of seeds, [pairs, N], the mean over outputs."""
  pairs = itertools.combinations(weights, 2)
  return np.stack([np.nanmean(np.asarray(jensen_shannon(*map(jnp.asarray, pair))), axis=1) for pair in pairs])


def _interval_row(
  setting: SettingRuns, factors: Sequence[Factor], extra_factors: Mapping[str, str], metric: str, values: np.ndarray
) -> Row:
  """A row for values [seeds or pairs, n]: mean, deviation over the first axis, 95 % bootstrap interval over n."""
  by_example = np.nanmean(values[:, np.isfinite(values).any(0)], axis=0)
  text = format_interval(bootstrap_mean(by_example), digits=1 if metric == 'probe/accuracy' else 3)
  return claim_row(
    setting, factors, {**extra_factors, 'interval': text}, {metric: summarize(np.nanmean(values, axis=1).tolist())}
  )


def format_interval(interval: Interval, digits: int) -> str:
  """Returns '[0.311, 0.402]'."""
  return f'[{interval.low:.{digits}f}, {interval.high:.{digits}f}]'


def _probe_runs(runs: Sequence[Run], study: Study) -> dict[str, np.ndarray]:
  """Returns guide -> whether each output of the test examples is predicted correctly, [seeds, n]."""
  correct: dict[str, list[np.ndarray]] = {guide: [] for guide in GUIDES}
  for run in runs:
    reader, load = _reader_and_loader(run)
    splits = [load(run.system, 'train', study.num_probe_train), load(run.system, study.split, study.num_probe_test)]
    weights = [read_weights(reader, run.system.model, run.params, examples) for examples in splits]
    size = 1 + max(int(examples.source.max()) for examples in splits)
    for guide, fn in GUIDES.items():
      rng = np.random.default_rng(0)
      features, test_features = (_features(*pair, fn, rng, size) for pair in zip(splits, weights, strict=True))
      labels, test_labels = (examples.target[examples.target_mask] for examples in splits)
      correct[guide].append(guided_predictions(features, labels, test_features) == test_labels)
  return {guide: np.stack(rows) for guide, rows in correct.items()}


def _features(examples: Example, weights: np.ndarray, guide: Callable, rng: np.random.Generator, size: int) -> Any:
  """The weighted tokens of each output of all examples, a sparse array."""
  rows = []
  for source, mask, steps, example_weights in zip(
    examples.source, examples.mask, examples.target_mask, weights, strict=True
  ):
    rows.append(weighted_counts(source, guide(example_weights[steps], mask, rng), mask, size))
  return scipy.sparse.vstack(rows, 'csr')
