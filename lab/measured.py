"""Rows of result tables from finished runs: a run folder, of one seed or several, or the settings of a sweep."""

import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_jax.decoding.metrics import mean_and_deviation
from attention_jax.errors import UserError
from attention_jax.sweeps.collect import UNREPORTED_FIELDS, SettingRuns, collect_sweep, read_runs
from attention_jax.sweeps.estimate import format_seconds
from attention_jax.sweeps.ledger import LEDGER, read_state
from attention_jax.systems.config import RunConfig, flatten_config, parse_config
from lab.records import Row, Table

MAX_DIGITS = 4  # decimal places that a record keeps


def measured_rows(
  folder: Path, table: Table, path: str, load: Callable[[str], Mapping[str, Any]], hardware: str
) -> list[Row]:
  """Returns a row for a run folder, or for each setting of a sweep that has finished runs.

  Args:
    folder: the folder.
    table: the table; the metrics of its columns are recorded, and its flags are not repeated in the rows.
    path: 'FILE:PRESET' with which configs are compared, for a run folder and for a sweep that was started without a
      preset; '' for any other sweep, which stores its own in the ledger.
    load: returns the config of such a path.
    hardware: where it was measured.

  Raises:
    UserError: if nothing has finished, if neither the ledger nor `path` has a preset, if `path` is set for a sweep that
      stores its own, for a setting without any metric of the table, or if only some of its seeds have a metric.
  """
  if (folder / LEDGER).exists():
    state = read_state(folder)
    units = [entry.unit for entry in state.units.values()]
    paths = {unit.setting_id: unit.path if ':' in unit.path else path for unit in units}
    if path and units and all(':' in unit.path for unit in units):
      raise UserError(f'{folder}: the sweep stores its config, {units[0].path}; leave out --config={path}')
    settings = collect_sweep(folder, state)
  else:
    runs = read_runs(folder)
    paths = {'': path}
    settings = [SettingRuns('', str(folder), {}, runs[0].config, runs)]
  if not settings:
    raise UserError(f'{folder}: no run of this sweep has finished; those of dropped settings do not count')
  if not all(':' in path for path in paths.values()):
    raise UserError(f'{folder} does not record its config file and preset; expected --config=FILE:PRESET')
  return [_measured_row(setting, table, paths[setting.id], load, hardware) for setting in settings]


def _measured_row(
  setting: SettingRuns, table: Table, path: str, load: Callable[[str], Mapping[str, Any]], hardware: str
) -> Row:
  file, _, preset = path.partition(':')
  flags = changed_flags(setting.config, parse_config(load(path), path), table.flags)
  metrics = {}
  for column in table.columns:
    split, _, metric = column.metric.partition('/')
    values = _metric_values(setting, split, metric)
    if values:
      _check_complete(setting, column.metric, values)
      metrics[column.metric] = summarize(list(values.values()))
  if not metrics:
    expected = ', '.join(column.metric for column in table.columns if column.metric)
    raise UserError(f'{setting.label} has none of the metrics of the table: {expected}')
  seconds = statistics.fmean(run.training_seconds for run in setting.runs)
  row = {'config': file, 'preset': preset, 'flags': flags, 'seeds': [run.seed for run in setting.runs]}
  num_runs = setting.runs[0].runs_in_process
  time = f'{format_seconds(seconds * num_runs)} of updates' + (f', {num_runs} seeds together' if num_runs > 1 else '')
  row |= {'time': time, 'hardware': hardware}
  row |= {'commits': sorted({run.commit or 'unknown' for run in setting.runs}), 'metrics': metrics}
  return {name: value for name, value in row.items() if value != ''}


def _metric_values(setting: SettingRuns, split: str, metric: str) -> Mapping[int, float]:
  """Seed -> value by the evaluation after training; for a split that it left out, by the validation at that step.

  The validation during training is greedy, whatever config.evaluation.beams.
  """
  if any(split in run.results for run in setting.runs):
    return setting.values(split, metric)
  name = f'{split}/{metric}'
  values = {run.seed: record.get(name) for run in setting.runs for record in run.records if record['step'] == run.step}
  return {seed: value for seed, value in values.items() if value is not None}


def _check_complete(setting: SettingRuns, metric: str, values: Mapping[int, float]) -> None:
  """Raises UserError if a seed of a setting lacks a metric: `values` of the row would belong to other seeds."""
  seeds = [run.seed for run in setting.runs]
  if missing := [seed for seed in seeds if seed not in values]:
    raise UserError(f'{setting.label}: {metric} is missing for seeds {missing} of {seeds}; expected all or none')


def summarize(values: Sequence[float]) -> dict[str, Any]:
  """Returns the entry of a metric: the mean; of several seeds also their values and standard deviation (n - 1).

  If a value is not finite, the entry is a text.
  """
  mean, deviation = mean_and_deviation(values)
  if not math.isfinite(mean):
    return {'text': str(mean)}
  entry: dict[str, Any] = {'value': round(mean, MAX_DIGITS)}
  if not math.isnan(deviation):
    entry['deviation'] = round(deviation, MAX_DIGITS)
  if len(values) > 1:
    entry['values'] = [round(value, MAX_DIGITS) for value in values]
  return entry


def changed_flags(config: RunConfig, base: RunConfig, common: str = '') -> str:
  """Returns the flags that turn `base` into `config`, quoted for a shell, without those of UNREPORTED_FIELDS.

  Args:
    config: the config of a run.
    base: the config that the flags start from.
    common: flags of all rows, which precede those of a row.
  """
  values, base_values = (flatten_config(x) for x in (config, base))
  before = {field: _as_text(value) for field, value in base_values.items()}
  before |= re.findall(r'^--config\.([\w.]+)=(.*)', '\n'.join(shlex.split(common)), re.MULTILINE)
  changed = {
    field: value
    for field, value in values.items()
    if field not in UNREPORTED_FIELDS and _as_text(value) != before.get(field)
  }
  return ' '.join(f'--config.{field}={_quote(_as_text(value))}' for field, value in changed.items())


def _quote(text: str) -> str:
  """Quotes a text for a shell: in double quotes if it has single ones, for which shlex writes five characters each."""
  return f'"{text}"' if "'" in text and not set('"$`\\!') & set(text) else shlex.quote(text)


def _as_text(value: Any) -> str:
  """The text of a value in a flag; lists, which JSON has instead of tuples, count as tuples."""
  return str(_as_tuple(value))


def _as_tuple(value: Any) -> Any:
  return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value
