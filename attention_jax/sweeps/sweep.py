"""Runs a sweep from its settings to the last result; continues it after any interruption."""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax.errors import UserError
from attention_jax.sweeps import halving
from attention_jax.sweeps.adopt import plan_adoption
from attention_jax.sweeps.cluster import make_executor, parse_cluster
from attention_jax.sweeps.driver import Driver
from attention_jax.sweeps.estimate import (
  Costs,
  costs_event,
  estimate_seconds,
  format_seconds,
  matmul_rate,
  measure_costs,
)
from attention_jax.sweeps.ledger import (
  FAILED,
  FINISHED,
  INTERRUPTED,
  OPENED,
  PLANNED,
  RUNG,
  Ledger,
  SweepState,
  Unit,
  fold,
  open_ledger,
  planned_event,
  read_events,
)
from attention_jax.sweeps.plan import (
  command,
  format_command,
  plan_units,
  removed_units,
  requested_units,
  run_folders,
  trains_seeds_together,
  without_removed,
)
from attention_jax.sweeps.progress import SweepProgress
from attention_jax.sweeps.resolve import Base, Resolved, resolve_settings
from attention_jax.sweeps.space import Setting, label
from attention_jax.sweeps.workers import LocalExecutor, detect_devices, divide_resources
from attention_jax.systems.base import Log
from attention_jax.systems.experiment import selectable_metrics
from attention_jax.systems.provenance import code_version
from attention_jax.training.interrupts import StopRequest


class SweepRequest(NamedTuple):
  """Arguments of a sweep.

  Attributes:
    folder: the folder of the sweep.
    base: the config that all settings change.
    settings: the settings.
    seeds: number of seeds of each setting, counted from config.training.seed.
    train: the training program, ('python', '-m', 'experiments.train').
    variants: the file of --variants, or ''.
    workers: processes at a time on this machine.
    cluster: a spec of cluster.CLUSTERS, or '' for this machine.
    together: see plan.trains_seeds_together.
    retry: whether to rerun the failed units, and run no others.
    adopted: folders of finished runs that become part of the sweep.
    halving: a spec as halving.parse_halving reads it, or ''.
  """

  folder: Path
  base: Base
  settings: Sequence[Setting]
  seeds: int
  train: Sequence[str]
  variants: str = ''
  workers: int = 1
  cluster: str = ''
  together: str = 'auto'
  retry: bool = False
  adopted: Sequence[Path] = ()
  halving: str = ''


class Outcome(NamedTuple):
  """Numbers of units by their state at the end of a sweep.

  Attributes:
    finished, failed, unfinished: their numbers.
  """

  finished: int
  failed: int
  unfinished: int


def check_request(request: SweepRequest) -> list[Resolved]:
  """Resolves and checks every setting; reads no data and writes nothing.

  Raises:
    UserError: for seeds, a cluster or a spec of halving that is not valid.
    UserErrors: as `resolve_settings`.
  """
  if request.seeds < 1:
    raise UserError(f'--seeds must be at least 1, got {request.seeds}')
  if 'seeds' in request.base.overrides:
    raise UserError('config.seeds is set by --seeds; config.training.seed is the first of them')
  if request.cluster:
    parse_cluster(request.cluster)  # for its errors
  resolved = resolve_settings(request.base, request.settings)
  if not request.halving:
    return resolved
  first, _ = halving.parse_halving(request.halving)
  total = max(setting.config['training']['steps'] for setting in resolved)
  if first >= total:
    raise UserError(f'--halving: first must be below training.steps={total}, got {first}; no setting would be dropped')
  _check_select(resolved, read_events(request.folder)[0])
  fixed: dict[str, Resolved] = {}  # by id: two settings may differ only in whether their schedules are fixed already
  for before in resolved:
    (after,) = resolve_settings(request.base, [_with_fixed_schedules(before)])
    fixed.setdefault(after.id, after._replace(setting=before.setting))
  return list(fixed.values())


def _check_select(resolved: Sequence[Resolved], events: Sequence[Mapping[str, Any]]) -> None:
  """Raises UserError unless all settings, those of earlier rungs included, are compared by one metric."""
  earlier = fold(events).select
  names = sorted({setting.config['training']['select'] for setting in resolved} | ({earlier} - {''}))
  if len(names) > 1:
    raise UserError(f'--halving compares all settings of a sweep by one training.select, got {", ".join(names)}')


def _with_fixed_schedules(resolved: Resolved) -> Setting:
  """A setting whose schedules have the full length, so that they are the same in every rung."""
  training = resolved.config['training']
  return dict(resolved.setting) | {
    'training.schedule': halving.fix_schedule_length(training['schedule'], training['steps']),
    'training.anneal': halving.fix_anneal_length(training['anneal'], training['steps']),
  }


def run_sweep(request: SweepRequest, resolved: Sequence[Resolved], log: Log) -> Outcome:
  """Runs every unit that has neither finished nor failed; with `request.retry`, those that failed.

  Args:
    request: the arguments of the sweep.
    resolved: the settings, as `check_request` returns them.
    log: called with each line before and after the runs; meanwhile SweepProgress prints to standard output.

  Returns:
    The numbers of units of these settings and seeds.

  Raises:
    UserError: if jax cannot list its devices, if the cluster cannot be used, if the ledger cannot be opened, see
      `open_ledger`, for a run that cannot be adopted, and for an invalid number of workers or value of --together.
  """
  executor, backend = _make_executor(request)
  seeds = requested_seeds(request, resolved)
  with contextlib.ExitStack() as stack:
    ledger = stack.enter_context(open_ledger(request.folder.absolute()))
    for line in ledger.report:
      log(line)
    for folder in request.adopted:
      events, line = plan_adoption(ledger.state, ledger.folder, folder, resolved)
      for event in events:
        ledger.append(**event)
      log(line)
    for unit in removed_units(ledger.state, ledger.folder):
      ledger.append(INTERRUPTED, unit=unit.id)
      log(_describe_removed(unit))
    together = trains_seeds_together(request.together, backend, len(resolved), len(seeds), executor.slots)
    for unit in _missing_units(request, ledger.state, resolved, seeds, together):
      ledger.append(PLANNED, **planned_event(unit))
    ledger.append(OPENED, command=format_command(sys.argv), commit=code_version(), workers=executor.slots)
    progress = stack.enter_context(contextlib.closing(SweepProgress(ledger.folder, executor.slots)))
    stop = stack.enter_context(StopRequest())
    make_command = functools.partial(_unit_command, request, resolved, ledger.folder)
    driver = Driver(ledger, executor, make_command, progress, stop)
    if request.halving:
      _run_rungs(request, resolved, seeds, ledger, driver, stop, progress.log)
    else:
      steps = {setting.id: setting.config['training']['steps'] for setting in resolved}
      driver.run(_pending(ledger.state, resolved, seeds, request.retry, steps), lambda unit: steps[unit.setting_id])
    outcome = _summarize(request, ledger.state, resolved, seeds, log)
    if outcome.finished and not stop.reason:
      _store_costs(ledger, resolved, log)
    return outcome


def _describe_removed(unit: Unit) -> str:
  return f'{unit.folder}: the folder of this finished run is missing, so that it counts as unfinished'


def _unit_command(
  request: SweepRequest, resolved: Sequence[Resolved], folder: Path, unit: Unit, steps: int | None = None
) -> list[str]:
  """Returns the command of a unit, with the config path, overrides and --variants of this request.

  Those in the ledger may be outdated, or relative to another working directory: a setting is identified by its config
  alone.
  """
  setting = next(setting for setting in resolved if setting.id == unit.setting_id)
  if steps is not None:
    steps = halving.reachable_steps([folder / unit.folder, *run_folders(unit, folder).values()], steps)
  current = dataclasses.replace(unit, path=setting.path, overrides=setting.overrides, variants=request.variants)
  return command(current, folder, request.train, steps)


def _store_costs(ledger: Ledger, resolved: Sequence[Resolved], log: Log) -> None:
  """Stores the number of parameters and the FLOP of each setting for the report."""
  configs = [(setting.id, setting.config) for setting in resolved if setting.id not in ledger.state.costs]
  try:
    for setting_id, costs in measure_costs(configs, {}):
      ledger.append(**costs_event(setting_id, costs))
  except UserError as error:
    log(f'FLOP are not counted: {error}')


def requested_seeds(request: SweepRequest, resolved: Sequence[Resolved]) -> list[int]:
  """Returns the seeds of every setting."""
  first = resolved[0].config['training']['seed']
  return [first + i for i in range(request.seeds)]


def _make_executor(request: SweepRequest):
  """Returns the executor and the backend of jax where it runs."""
  if request.cluster:
    return make_executor(request.folder.absolute(), request.cluster), _cluster_backend(request.cluster)
  backend, ids = detect_devices()
  return LocalExecutor(divide_resources(request.workers, backend, ids)), backend


def _cluster_backend(spec: str) -> str:
  """Returns the backend of jax in the jobs of a cluster."""
  cluster, _, parameters = parse_cluster(spec)
  if cluster == 'local':
    return detect_devices()[0]
  return 'gpu' if parameters.get('gpus_per_node') else 'cpu'


def _missing_units(
  request: SweepRequest, state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int], together: bool
) -> list[Unit]:
  """Returns the units that the ledger does not have yet, without those of settings that halving has dropped."""
  dropped = _dropped_settings(request, state)
  units = plan_units(state, resolved, seeds, together, request.variants)
  return [unit for unit in units if unit.setting_id not in dropped]


def _dropped_settings(request: SweepRequest, state: SweepState) -> Set[str]:
  """Returns the ids of the settings that are not trained further; a sweep without --halving trains all of them."""
  return state.dropped.keys() if request.halving else frozenset()


def _pending(
  state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int], retry: bool, steps: dict[str, int]
) -> list[str]:
  """Returns the ids of the units to run: those that have neither failed nor finished all their updates.

  With `retry`, those that failed. `steps` maps the id of a setting to its number of updates.
  """
  pending = []
  for entry in requested_units(state, resolved, seeds):
    has_failed = entry.state == FAILED
    is_finished = entry.state == FINISHED and entry.steps >= steps[entry.unit.setting_id]
    is_pending = has_failed if retry else not (has_failed or is_finished)
    if is_pending:
      pending.append(entry.unit.id)
  return pending


def _run_rungs(
  request: SweepRequest,
  resolved: Sequence[Resolved],
  seeds: Sequence[int],
  ledger: Ledger,
  driver: Driver,
  stop: StopRequest,
  log: Log,
) -> None:
  """Trains all settings up to the first rung, the best of them up to the second, and so on.

  Settings that are added to a sweep later start at the first rung too, and are compared with the values recorded there.
  """
  first, factor = halving.parse_halving(request.halving)
  total = max(setting.config['training']['steps'] for setting in resolved)
  alive = [setting for setting in resolved if setting.id not in ledger.state.dropped]
  for rung in halving.rungs(total, first, factor):
    compared = ledger.state.compared.get(rung, {})
    uncompared = [setting for setting in alive if setting.id not in compared]
    if not uncompared:
      continue
    steps = {setting.id: min(rung, setting.config['training']['steps']) for setting in uncompared}
    pending = _pending(ledger.state, uncompared, seeds, request.retry, steps)
    driver.run(pending, lambda unit: steps[unit.setting_id])  # noqa: B023
    # Settings are compared when every run of the rung has ended; with `retry`, or after an interruption, some have not.
    if stop.reason or rung == total or _pending(ledger.state, uncompared, seeds, False, steps):
      return
    _drop_settings(uncompared, seeds, ledger, rung, factor, log)
    alive = [setting for setting in alive if setting.id not in ledger.state.dropped]


def _drop_settings(
  uncompared: Sequence[Resolved], seeds: Sequence[int], ledger: Ledger, rung: int, factor: int, log: Log
) -> None:
  """Records the values of `uncompared` settings after a rung, and which of these settings are not trained further."""
  select = uncompared[0].config['training']['select']
  higher_is_better = selectable_metrics(uncompared[0].config)[select]
  values = {}
  for setting in uncompared:
    entries = requested_units(ledger.state, [setting], seeds)
    folders = [path for entry in entries for path in run_folders(entry.unit, ledger.folder).values()]
    # The validation of a run before it failed does not count: its setting would displace settings that can be trained.
    has_failed = any(entry.state == FAILED for entry in entries)
    values[setting.id] = math.nan if has_failed else halving.best_validation(folders, select, rung, higher_is_better)
  earlier = ledger.state.compared.get(rung, {})
  surviving = halving.survivors({**earlier, **values}, factor, higher_is_better)
  dropped = [setting.id for setting in uncompared if setting.id not in surviving]
  ledger.append(RUNG, steps=rung, select=select, values=values, dropped=dropped)
  for setting in uncompared:
    if setting.id in dropped:
      steps = min(rung, setting.config['training']['steps'])
      log(
        f'not continued after {steps} updates: {label(setting.setting)}, validation {select} {values[setting.id]:.4g}'
      )


def _summarize(
  request: SweepRequest, state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int], log: Log
) -> Outcome:
  """Logs every failed unit with its error, then the numbers of units by state; returns these numbers.

  A unit that has finished a rung of halving, but neither the last rung nor in a dropped setting, is unfinished. A unit
  of a dropped setting that has neither finished nor failed is not counted, because it will not run.
  """
  dropped = _dropped_settings(request, state)
  entries = [
    entry
    for entry in requested_units(state, resolved, seeds)
    if entry.state in (FAILED, FINISHED) or entry.unit.setting_id not in dropped
  ]
  failed = [entry for entry in entries if entry.state == FAILED]
  for entry in failed:
    log(f'failed: {entry.unit.id}: {entry.error}; output in {entry.log}')
  live = [setting for setting in resolved if setting.id not in dropped]
  steps = {setting.id: setting.config['training']['steps'] for setting in live}
  unfinished = _pending(state, live, seeds, False, steps)
  outcome = Outcome(len(entries) - len(failed) - len(unfinished), len(failed), len(unfinished))
  hint = ''
  if retried := sum(entry.unit.setting_id not in dropped for entry in failed):
    hint = f'; --retry runs {"the" if retried == len(failed) else f"{retried} of the"} failed ones again'
  if outcome.unfinished:
    hint += f'; the same command{" without --retry" if request.retry else ""} continues'
  log(f'{outcome.finished} finished, {outcome.failed} failed, {outcome.unfinished} unfinished{hint}')
  return outcome


def describe_plan(request: SweepRequest, resolved: Sequence[Resolved], log: Log) -> None:
  """Logs the runs of a sweep, the number of parameters of each, and an estimate of the time; trains and writes nothing.

  Args:
    request: the arguments of the sweep.
    resolved: the settings.
    log: called with each line.
  """
  folder = request.folder.absolute()
  events, _ = read_events(folder)
  for adopted in request.adopted:
    new_events, line = plan_adoption(fold(events), folder, adopted, resolved)
    events += new_events
    log(line)
  state = fold(events)
  for unit in removed_units(state, folder):
    log(_describe_removed(unit))
  state = without_removed(state, folder)
  seeds = requested_seeds(request, resolved)
  costs = dict(measure_costs([(setting.id, setting.config) for setting in resolved], state.costs))
  if request.cluster:
    backend = _cluster_backend(request.cluster)
    _, slots, _ = parse_cluster(request.cluster)
  else:
    backend, ids = detect_devices()
    slots = len(divide_resources(request.workers, backend, ids))
  together = trains_seeds_together(request.together, backend, len(resolved), len(seeds), slots)
  missing = _missing_units(request, state, resolved, seeds, together)
  units = [*(entry.unit for entry in requested_units(state, resolved, seeds)), *missing]
  trains_on_this_cpu = backend == 'cpu' and not request.cluster
  estimate = estimate_seconds(state, resolved, costs, matmul_rate if trains_on_this_cpu else None)
  for unit in units:
    log(_describe_unit(unit, state, costs[unit.setting_id]))
    log(f'  {format_command(_unit_command(request, resolved, request.folder, unit))}')
  runs = sum(len(unit.seeds) for unit in units)
  log(f'{runs} runs in {len(units)} processes: {len(resolved)} settings x {len(seeds)} seeds; {slots} at a time')
  live = [setting for setting in resolved if setting.id not in _dropped_settings(request, state)]
  steps = {setting.id: setting.config['training']['steps'] for setting in live}
  pending = {*_pending(state, live, seeds, request.retry, steps), *(unit.id for unit in missing if not request.retry)}
  times = [estimate.seconds.get(unit.setting_id, 0.0) * len(unit.seeds) for unit in units if unit.id in pending]
  time = ''
  if estimate.seconds:
    seconds = max(sum(times) / slots, *times, 0.0)  # free slots do not shorten a process
    time = f'{format_seconds(seconds)} for the {len(times)} processes to be run, estimated from '
  log(f'time: {time}{estimate.source}')


def _describe_unit(unit: Unit, state: SweepState, costs: Costs) -> str:
  unit_state = f', {state.units[unit.id].state}' if unit.id in state.units else ''
  seeds = f'seed {unit.seeds[0]}' if len(unit.seeds) == 1 else f'seeds {unit.seeds[0]} to {unit.seeds[-1]}'
  return (
    f'{label(unit.setting)}: {seeds}, {costs.parameters:,} parameters, {costs.update_flop / 1e6:,.0f} MFLOP an '
    f'update{unit_state}'
  )
