"""Rows of the tables of docs/claims/ from a finished sweep: by setting, bin, gradient distance and probe."""

import datetime
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.files import read_lines
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.specs import parse
from attention_jax.sweeps.bins import evaluate_bins
from attention_jax.sweeps.collect import FinishedRun, SettingRuns, collect_sweep
from attention_jax.sweeps.contrasts import Contrast, MetricColumn, contrast_all, correct_contrasts
from attention_jax.sweeps.ledger import FINISHED, SweepState, read_events, read_state
from attention_jax.sweeps.statistics import Interval
from attention_jax.systems.experiment import selectable_metrics
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import open_run
from lab.gradient_paths import (
  factor_per_step,
  recurrent_distances,
  rms_by_distance,
  source_gradients,
)
from lab.measured import summarize
from lab.probes import Sentence, one_hot_sentences, probe_accuracy
from lab.records import Row

MIN_PAIRS = 20  # distances with fewer pairs of positions are left out


class Factor(NamedTuple):
  """A factor of a sweep as a page names it.

  Attributes:
    field: the field that varies.
    name: its name on the page.
    show: a value of the field -> the value on the page.
  """

  field: str
  name: str
  show: Callable[[Any], Any] = str

  def of(self, setting: SettingRuns) -> Any:
    """Returns the value of a setting. Raises UserError if its sweep does not vary the field."""
    if self.field not in setting.factors:
      varied = ', '.join(setting.factors) or 'no field'
      raise UserError(f'the sweep varies {varied}; expected the sweep of the claim, which varies {self.field}')
    return self.show(setting.factors[self.field])


def finished_settings(folder: Path) -> list[SettingRuns]:
  """Returns the settings of a sweep; all of its units must have finished.

  Raises:
    UserError: if a unit has not finished.
  """
  state = read_state(folder)
  if unfinished := [entry.unit.id for entry in state.units.values() if entry.state != FINISHED]:
    raise UserError(f'{folder}: {len(unfinished)} units have not finished, such as {unfinished[0]}')
  return collect_sweep(folder, state)


def conditions(folder: Path, hardware: str) -> dict[str, Any]:
  """Returns the conditions under which a sweep was run, see records.Table.

  Their `seconds` are those of all processes together, divided by the largest number of processes at a time.
  """
  state = read_state(folder)
  last = max(event['time'] for event in read_events(folder)[0] if event['event'] == FINISHED)
  return {
    'runs': sum(len(entry.unit.seeds) for entry in state.units.values()),
    'commits': sorted({entry.commit or 'unknown' for entry in state.units.values()}),  # '' of adopted runs
    'processes': _processes(state),
    'hardware': hardware,
    'seconds': round(sum(entry.seconds for entry in state.units.values()) / _processes(state)),
    'date': datetime.date.fromtimestamp(last).isoformat(),
  }


def _processes(state: SweepState) -> int:
  return max((event.get('workers', 1) for event in state.opened), default=1)


def setting_rows(
  settings: Sequence[SettingRuns],
  split: str,
  metrics: Sequence[str],
  factors: Sequence[Factor],
  baseline: Mapping[str, Any],
  within: Sequence[str] = (),
) -> list[Row]:
  """Returns a row for each setting, with its differences from the baseline.

  Differences are those of runs with the same seed, or of two single runs, with the interval of the t distribution; the
  p of a paired t-test is corrected for the number of comparisons in its metric, those of all groups (Benjamini &
  Hochberg). The difference is empty if neither direction of a metric is better, and if a setting has no seed in common
  with its baseline.

  Args:
    settings: the settings.
    split: the split of the metrics.
    metrics: names of metrics.
    factors: the factors of the rows; 'parameters' is added.
    baseline: name of a factor -> its value in the baseline.
    within: names of factors; a setting is compared with the baseline that has the same values of these.

  Raises:
    UserError: unless each group of settings has one baseline and every run has all metrics, such as for the sweep of
      another claim.
  """
  for setting, metric in itertools.product(settings, metrics):
    if (count := len(setting.values(split, metric))) < len(setting.runs):
      raise UserError(
        f'{setting.label}: {count} of {len(setting.runs)} runs have the metric {split}/{metric}; expected the sweep of '
        'the claim, whose runs all have it'
      )
  groups: dict[tuple[Any, ...], list[SettingRuns]] = {}
  for setting in settings:
    groups.setdefault(tuple(factor.of(setting) for factor in factors if factor.name in within), []).append(setting)
  directions = selectable_metrics(settings[0].config)
  columns = [MetricColumn(split, metric, '', directions.get(metric)) for metric in metrics]
  contrasts: list[Contrast] = []
  baselines = set()
  for group in groups.values():
    group_baseline = _baseline(group, factors, baseline)
    baselines.add(group_baseline.id)
    contrasts += contrast_all(group, group_baseline, columns, 't', False, _discard)
  differences = {
    (contrast.setting.id, contrast.column.metric): _difference_entry(contrast.difference, contrast.corrected_p)
    for column in columns
    for contrast in correct_contrasts([contrast for contrast in contrasts if contrast.column == column])
  }
  rows = []
  for setting in settings:
    entries = {}
    for metric in metrics:
      # Of the baseline there is no entry 'difference'; an empty one is a difference that could not be computed.
      difference = {} if setting.id in baselines else {'difference': differences.get((setting.id, metric), {})}
      entries[f'{split}/{metric}'] = summarize(list(setting.values(split, metric).values())) | difference
    parameters = {'parameters': f'{setting.runs[0].parameters:,}'}
    rows.append(claim_row(setting, factors, parameters, entries))
  return rows


def _difference_entry(difference: Interval, p: float) -> dict[str, float]:
  """The entry of a difference, without an interval or p that `statistics.compare` cannot compute and returns as NaN."""
  return {name: value for name, value in (*difference._asdict().items(), ('p', p)) if not math.isnan(value)}


def _baseline(group: Sequence[SettingRuns], factors: Sequence[Factor], baseline: Mapping[str, Any]) -> SettingRuns:
  named = {factor.name: factor for factor in factors}
  matches = [setting for setting in group if all(named[name].of(setting) == value for name, value in baseline.items())]
  if len(matches) != 1:
    labels = '; '.join(setting.label for setting in group)
    raise UserError(f'{len(matches)} settings have {dict(baseline)}; expected exactly one of: {labels}')
  return matches[0]


def claim_row(
  setting: SettingRuns,
  factors: Sequence[Factor],
  extra_factors: Mapping[str, Any],
  metrics: Mapping[str, Mapping[str, Any]],
) -> Row:
  """Returns a row of a table.

  Args:
    setting: the setting.
    factors: its factors that the row shows.
    extra_factors: values of factors that the setting does not have, by name.
    metrics: entries of records.Table.
  """
  values = {factor.name: factor.of(setting) for factor in factors} | dict(extra_factors)
  return {'factors': values, 'seeds': [run.seed for run in setting.runs], 'metrics': dict(metrics)}


def bin_rows(
  settings: Sequence[SettingRuns], split: str, factors: Sequence[Factor], bins: int = 5, by: str = 'source_length'
) -> list[Row]:
  """Returns a row for each setting and each bin of a property, with the text metrics of config.evaluation.

  Args:
    settings: the settings; all have the same data and evaluation.
    split: the split.
    factors: the factors of the rows; one with the name of the property is added, such as 'source length'.
    bins: number of bins with about equally many rows.
    by: the property, a key of bins.PROPERTIES.
  """
  config = settings[0].config
  system = SYSTEMS[config.system].open(config, str(settings[0].runs[0].folder))
  corpora = system.corpus(split), system.corpus('train')

  def evaluate(run: FinishedRun) -> Any:
    lines = read_lines(str(run.folder / f'hypotheses.{split}.txt'))
    return evaluate_bins(*corpora, lines, config.evaluation, by, bins)

  rows = []
  for setting in settings:
    tables = [evaluate(run) for run in setting.runs]
    for i, bin in enumerate(tables[0].bins):
      names = [parse(spec, 'metric')[0] for spec in config.evaluation.metrics]
      entries = {f'{split}/{name}': summarize([table.metrics[name][i].value for table in tables]) for name in names}
      rows.append(claim_row(setting, factors, {by.replace('_', ' '): bin.name}, entries))
  return rows


class GradientNorms(NamedTuple):
  """Norms of the gradients of one model by distance, see analysis.gradient_paths.

  Attributes:
    linked: distance -> root mean square over the pairs of positions with a gold link.
    all: the same over all pairs of positions.
  """

  linked: dict[int, float]
  all: dict[int, float]


def gradient_rows(
  settings: Sequence[SettingRuns], split: str, factors: Sequence[Factor], count: int
) -> tuple[list[Row], list[Row]]:
  """Measures the gradients of each run before and after its training.

  Args:
    settings: the settings, all of a bidirectional encoder of one layer and with the same data, which has gold links.
    split: the split.
    factors: the factors of the rows; 'training' is added and, in the rows by distance, 'distance'.
    count: the number of sentences.

  Returns:
    Rows of the change of the norm per step of distance, see `factor_per_step`, and rows of the norm by distance.
  """
  summaries = []
  curves = []
  for setting in settings:
    measured: dict[str, list[GradientNorms]] = {'before': [], 'after': []}
    for run in setting.runs:
      trained = open_run(run.folder)
      system = trained.system
      for training, params in (('before', system.initializer()(run.seed)), ('after', trained.params)):
        measured[training].append(measure_gradient_norms(system.model, params, system.data.encoded[split], count))
    for training, norms in measured.items():
      summaries.append(claim_row(setting, factors, {'training': training}, _summarize_change_per_step(norms)))
      for distance in sorted(set.intersection(*(set(x.all) for x in norms))):
        extra_factors = {'training': training, 'distance': distance}
        curves.append(claim_row(setting, factors, extra_factors, _summarize_distance(norms, distance)))
  return summaries, curves


def _summarize_change_per_step(norms: Sequence[GradientNorms]) -> dict[str, Any]:
  return {
    f'{pairs}/factor': summarize([factor_per_step(getattr(x, pairs)) for x in norms]) for pairs in GradientNorms._fields
  }


def _summarize_distance(norms: Sequence[GradientNorms], distance: int) -> dict[str, Any]:
  entries = {}
  for pairs in GradientNorms._fields:
    values = [getattr(x, pairs).get(distance) for x in norms]
    if None not in values:
      entries[f'{pairs}/norm'] = summarize(values)
  return entries


def measure_gradient_norms(model: EncoderDecoder, params: Any, encoded: EncodedCorpus, count: int) -> GradientNorms:
  """Measures the norms of the gradients for rows of a split.

  Args:
    model: a model with a bidirectional encoder of one layer.
    params: its parameters.
    encoded: the split, with links.
    count: the number of rows.
  """
  compute_norms = jax.jit(functools.partial(source_gradients, model))
  rows = spread_rows(encoded.rows, count)
  source_size, target_size = (int(lengths[rows].max()) for lengths in encoded.lengths)  # one shape is compiled
  distances = []
  norms = []
  is_linked = []
  for row in rows:
    source = encoded.source[encoded.source_offsets[row] : encoded.source_offsets[row + 1]]
    target = encoded.target[encoded.target_offsets[row] : encoded.target_offsets[row + 1]]
    mask = np.arange(source_size) < len(source)
    padded = np.pad(source, (0, source_size - len(source))), mask, np.pad(target, (0, target_size - len(target)))
    matrix = np.asarray(compute_norms(params, *padded))[: len(target), : len(source)]
    linked = np.zeros(matrix.shape, bool)
    linked[tuple(encoded.row_links(row).T[::-1])] = True
    distances.append(recurrent_distances(len(source), len(target)).ravel())
    norms.append(matrix.ravel())
    is_linked.append(linked.ravel())
  distance, norm, linked = map(np.concatenate, (distances, norms, is_linked))
  return GradientNorms(
    linked=rms_by_distance(distance[linked], norm[linked], MIN_PAIRS),
    all=rms_by_distance(distance, norm, MIN_PAIRS),
  )


def probe_rows(
  settings: Sequence[SettingRuns], split: str, factors: Sequence[Factor], offsets: Sequence[int], count: int
) -> list[Row]:
  """Probes the encoder of each run, before and after its training, for the tokens near each state.

  Args:
    settings: the settings, all with the same data.
    split: the split whose sentences are probed; the probes are fitted on training sentences.
    factors: the factors of the rows; 'states' and 'offset' are added.
    offsets: relative positions of the tokens.
    count: the number of sentences of each split.

  Returns:
    A row for each setting, each kind of states and each offset; the last rows are those of the control, one-hot vectors
    of the tokens.
  """
  rows = []
  for setting in settings:
    probed: dict[str, list[list[list[Sentence]]]] = {'before training': [], 'after training': []}
    for run in setting.runs:
      trained = open_run(run.folder)
      system = trained.system
      for states, params in (
        ('before training', system.initializer()(run.seed)),
        ('after training', trained.params),
      ):
        splits = [system.data.encoded[name] for name in ('train', split)]
        probed[states].append([encode_sentences(system.model, params, encoded, count) for encoded in splits])
    rows += _probe(setting, factors, probed, offsets)
  size = len(system.source_vocab)
  control = [one_hot_sentences(sentences, size) for sentences in probed['after training'][0]]
  values = {factor.name: 'token alone' for factor in factors}
  for row in _probe(settings[0], factors, {'one-hot': [control]}, offsets):
    rows.append(dict(row, factors=row['factors'] | values, seeds=[]))
  return rows


def _probe(
  setting: SettingRuns,
  factors: Sequence[Factor],
  probed: Mapping[str, Sequence[Sequence[Sequence[Sentence]]]],
  offsets: Sequence[int],
) -> list[Row]:
  """Rows of a setting; `probed` maps the kind of states to the training and test sentences of each run."""
  rows = []
  for states, runs in probed.items():
    for offset in offsets:
      accuracies = [100 * probe_accuracy(train, test, offset) for train, test in runs]
      extra_factors = {'states': states, 'offset': offset}
      rows.append(claim_row(setting, factors, extra_factors, {'probe/accuracy': summarize(accuracies)}))
  return rows


def encode_sentences(model: EncoderDecoder, params: Any, encoded: EncodedCorpus, count: int) -> list[Sentence]:
  """Returns the states of the encoder for sources of a split, without those of EOS.

  Args:
    model: the model.
    params: its parameters.
    encoded: the split.
    count: the number of sources.
  """
  rows = spread_rows(encoded.rows, count)
  lengths = encoded.lengths[0][rows]
  sources = [encoded.source[encoded.source_offsets[row] : encoded.source_offsets[row + 1]] for row in rows]
  ids = np.stack([np.pad(source, (0, int(lengths.max()) - len(source))) for source in sources])
  mask = np.arange(ids.shape[1]) < lengths[:, None]
  encode = jax.jit(
    lambda params, *x: model.apply({'params': params}, *x, method=lambda model, *x: model.encoder(*x, True))
  )
  memory = np.asarray(encode(params, ids, mask).memory)
  return [
    Sentence(states[: n - 1], source[: n - 1]) for states, source, n in zip(memory, sources, lengths, strict=True)
  ]


def spread_rows(rows: int, count: int) -> np.ndarray:
  """Returns `count` row numbers at equal distances, because a data set may be sorted; all if there are fewer."""
  return np.linspace(0, rows - 1, min(count, rows)).round().astype(int)


def _discard(line: str) -> None:
  """Logs nothing: the difference of a setting without a seed of its baseline is empty in the table."""
