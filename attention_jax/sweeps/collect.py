"""Reads finished runs: their configs, results, learning curves and versions of the code, by setting."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from attention_jax.atomic import null_as_nan
from attention_jax.errors import UserError
from attention_jax.specs import parse
from attention_jax.sweeps.ledger import SweepState
from attention_jax.sweeps.plan import run_folders
from attention_jax.sweeps.resolve import IRRELEVANT_FIELDS, config_id
from attention_jax.sweeps.space import PRESET, label, short_names
from attention_jax.systems.config import RunConfig, flatten_config, read_run_config
from attention_jax.systems.experiment import RESULTS
from attention_jax.systems.runs import seed_folder
from attention_jax.training.digests import check_file_digests, digested_files
from attention_jax.training.folder import CONFIG
from attention_jax.training.paths import absolute, run_path
from attention_jax.training.writers import RATE, read_metrics

UNREPORTED_FIELDS = IRRELEVANT_FIELDS | {'data.folder'}  # not reported as differences between runs


class FinishedRun(NamedTuple):
  """One run with one seed.

  Attributes:
    seed: its seed.
    folder: its folder.
    config: its config.
    results: split -> metric -> {'value', 'unit', 'signature'}.
    step: the step of the evaluated parameters; 0 if the run did not store it.
    parameters: number of parameters; 0 if the run did not store it.
    commit: the version of the code; '' if the run did not store it.
    records: the metrics, merged by step.
    runs_in_process: number of runs that were trained side by side in its process, itself included.
  """

  seed: int
  folder: epath.Path
  config: RunConfig
  results: Mapping[str, Mapping[str, Mapping[str, Any]]]
  step: int
  parameters: int
  commit: str
  records: Sequence[Mapping[str, Any]]
  runs_in_process: int = 1

  def value(self, split: str, metric: str) -> float | None:
    """Returns the value of a metric, or None if the run lacks it."""
    entry = self.results.get(split, {}).get(metric)
    return None if entry is None else entry['value']

  @property
  def training_seconds(self) -> float:
    """Seconds of updates, without compiling, evaluating and saving. Runs trained side by side share them equally."""
    seconds = 0.0
    previous = 0
    for record in self.records:
      if RATE in record:
        seconds += (record['step'] - previous) / record[RATE]
        previous = record['step']
    return seconds / self.runs_in_process


class SettingRuns(NamedTuple):
  """The finished runs of one setting.

  Attributes:
    id: hash of the config, see resolve.config_id.
    label: its name in reports: the fields that vary, or the shortened path of its folder, see collect_folders.
    factors: the fields that vary, with its values.
    config: the config of its first run.
    runs: in the order of their seeds.
  """

  id: str
  label: str
  factors: Mapping[str, Any]
  config: RunConfig
  runs: Sequence[FinishedRun]

  def values(self, split: str, metric: str) -> dict[int, float]:
    """Returns seed -> value of the runs that have a metric."""
    values = {run.seed: run.value(split, metric) for run in self.runs}
    return {seed: value for seed, value in values.items() if value is not None}


def check_finished(folder: epath.Path) -> None:
  """Checks that a run with one seed has finished, and has not been continued since.

  Raises:
    UserError: if it has not finished, or has been continued.
  """
  path = folder / RESULTS
  if not path.exists():
    raise UserError(f'{folder} has no {RESULTS}; expected a finished run')
  digested = digested_files(folder)
  if CONFIG in digested and RESULTS not in digested:  # a starting run drops this digest
    raise UserError(f'{folder} has been continued since its {RESULTS}, and has not finished; expected a finished run')


def read_run(folder: epath.Path) -> FinishedRun:
  """Reads a finished run with one seed.

  Args:
    folder: its folder.

  Raises:
    UserError: if it has not finished, or if its files have changed or cannot be read.
  """
  check_file_digests(folder)
  config = read_run_config(folder)
  check_finished(folder)
  try:
    record = json.loads((folder / RESULTS).read_text(), object_hook=null_as_nan)
    records = read_metrics(folder)
  except (OSError, ValueError) as error:
    raise UserError(f'cannot read the results of {folder}: {" ".join(str(error).split())}') from error
  return FinishedRun(
    seed=config.training.seed,
    folder=folder,
    config=config,
    results=record['results'],
    step=record.get('step', 0),
    parameters=record.get('parameters', 0),
    commit=record.get('commit', ''),
    records=records,
    runs_in_process=_runs_beside(folder, config.training.seed),
  )


def read_runs(folder: epath.Path) -> list[FinishedRun]:
  """Reads a run folder of one seed, or of several side by side.

  Raises:
    UserError: as `read_run`, for any of the runs.
  """
  folder = run_path(folder)
  config = read_run_config(folder)
  if config.seeds == 1:
    return [read_run(folder)]
  return [read_run(seed_folder(folder, seed)) for seed in config.run_seeds]


def _runs_beside(folder: epath.Path, seed: int) -> int:
  """The number of runs in the process of a run: of several side by side, if its folder is that of one of them."""
  parent = absolute(folder).parent
  if absolute(folder) != seed_folder(parent, seed) or not (parent / CONFIG).exists():
    return 1
  seeds = read_run_config(parent).run_seeds
  return len(seeds) if seed in seeds else 1


def collect_sweep(folder: epath.Path, state: SweepState) -> list[SettingRuns]:
  """Returns the settings of a sweep that have finished runs, in the order in which they were planned.

  Factors are the fields that any setting sets and, if several settings agree in all of these, the other config fields
  in which they differ.

  Args:
    folder: the folder of the sweep.
    state: its state.

  Raises:
    UserError: as `read_run`, for a run that finished according to `state`.
  """
  runs: dict[str, list[FinishedRun]] = {}
  settings: dict[str, Mapping[str, Any]] = {}
  presets: dict[str, str] = {}
  for entry in state.units.values():
    settings.setdefault(entry.unit.setting_id, entry.unit.setting)
    presets.setdefault(entry.unit.setting_id, entry.unit.path.partition(':')[2])
  for entry in state.finished:
    unit = entry.unit
    runs.setdefault(unit.setting_id, []).extend(map(read_run, run_folders(unit, folder).values()))
  runs = {
    setting_id: sorted(runs[setting_id], key=lambda run: run.seed) for setting_id in settings if setting_id in runs
  }
  configs = {setting_id: flatten_config(members[0].config) for setting_id, members in runs.items()}

  def factors_of(setting_id, fields):
    # If a setting was planned before a field was varied, the value of the field is read from its config.
    config = configs[setting_id] | {PRESET: presets[setting_id]}
    return {field: settings[setting_id].get(field, _read_field(config, field)) for field in fields}

  fields = list(dict.fromkeys(field for setting in settings.values() for field in setting))
  fields += _distinguishing_fields([(factors_of(setting_id, fields), config) for setting_id, config in configs.items()])
  names = short_names(fields)
  collected = []
  for setting_id, members in runs.items():
    factors = factors_of(setting_id, fields)
    collected.append(SettingRuns(setting_id, label(factors, names), factors, members[0].config, members))
  return collected


def _read_field(config: Mapping[str, Any], field: str) -> Any:
  """The value of a field, or of an option of its spec; '' if the config does not set it."""
  parent, _, option = field.rpartition('.')
  if field in config or not config.get(parent):
    return config.get(field, '')
  return parse(config[parent], f'config.{parent}')[1].get(option, '')


def _distinguishing_fields(settings: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
  """Returns the fields whose values differ between settings with equal factors, as in a sweep that was extended.

  Args:
    settings: factors and config of each setting, by dotted path.
  """
  groups: dict[str, list[Mapping[str, Any]]] = {}
  for factors, config in settings:
    groups.setdefault(json.dumps(factors), []).append(config)
  fields = dict.fromkeys(field for _, config in settings for field in config if field not in IRRELEVANT_FIELDS)
  return [
    field
    for field in fields
    if any(len({json.dumps(config.get(field)) for config in group}) > 1 for group in groups.values())
  ]


def collect_folders(folders: Sequence[epath.Path]) -> list[SettingRuns]:
  """Returns finished runs by folder, for a comparison of any runs.

  Args:
    folders: run folders, of one seed or of several.

  Raises:
    UserError: as `read_runs`, and for the same folder twice.
  """
  resolved = [folder.expanduser().resolve() for folder in folders]
  if repeated := [folder for i, folder in enumerate(folders) if resolved[i] in resolved[:i]]:
    raise UserError(f'expected different run folders, got {repeated[0]} twice')
  groups = [(folder, read_runs(folder)) for folder in folders]
  flat = [flatten_config(runs[0].config) for _, runs in groups]
  fields = [
    field
    for field in flat[0]
    if field not in UNREPORTED_FIELDS and len({json.dumps(config.get(field)) for config in flat}) > 1
  ]
  names = _short_paths(folders)
  return [
    SettingRuns(config_id(config), names[folder], {field: config.get(field) for field in fields}, runs[0].config, runs)
    for (folder, runs), config in zip(groups, flat, strict=True)
  ]


def _short_paths(folders: Sequence[epath.Path]) -> dict[epath.Path, str]:
  """Paths without the folders that all of them have in common."""
  paths = {folder: str(absolute(run_path(folder))) for folder in folders}
  common = os.path.commonpath([os.path.dirname(path) for path in paths.values()])
  return {folder: path.removeprefix(common).lstrip('/') for folder, path in paths.items()}
