"""Runs a sweep from its settings to the last result; continues it after any interruption."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath

from attention_jax.errors import UserError
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
  Ledger,
  SweepState,
  Unit,
  fold,
  open_ledger,
  planned_event,
  read_events,
)
from attention_jax.sweeps.plan import (
  collected_units,
  command,
  format_command,
  observed_state,
  plan_units,
  removed_units,
  requested_units,
  trains_seeds_together,
)
from attention_jax.sweeps.progress import SweepProgress
from attention_jax.sweeps.resolve import Base, Resolved, resolve_settings
from attention_jax.sweeps.space import Setting, label
from attention_jax.sweeps.submit import check_template, submit_units
from attention_jax.sweeps.workers import LocalExecutor, detect_devices, divide_resources
from attention_jax.systems.base import Log
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
    plugins: the value of --plugins, or ''.
    workers: processes at a time on this machine.
    cluster: a spec of cluster.CLUSTERS, or '' for this machine.
    submit: a command of the shell that puts {command} into a queue, see submit.fill_template; '' for this machine.
    runs: see plan.plan_units.
    together: see plan.trains_seeds_together.
    retry: whether to rerun the failed units, and run no others.
    adopted: folders of finished runs that become part of the sweep.
  """

  folder: Path
  base: Base
  settings: Sequence[Setting]
  seeds: int
  train: Sequence[str]
  plugins: str = ''
  workers: int = 1
  cluster: str = ''
  submit: str = ''
  runs: str = ''
  together: str = 'auto'
  retry: bool = False
  adopted: Sequence[epath.PathLike] = ()


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
    UserError: for seeds, a cluster or a template of --submit that are not valid.
    UserErrors: as `resolve_settings`.
  """
  if request.seeds < 1:
    raise UserError(f'--seeds must be at least 1, got {request.seeds}')
  if 'seeds' in request.base.overrides:
    raise UserError('config.seeds is set by --seeds; config.training.seed is the first of them')
  if request.cluster:
    parse_cluster(request.cluster)  # for its errors
  if request.submit:
    check_template(request.submit)
  return resolve_settings(request.base, request.settings)


def run_sweep(request: SweepRequest, resolved: Sequence[Resolved], log: Log) -> Outcome:
  """Runs every unit that has neither finished nor failed; with `request.retry`, those that failed.

  With `request.submit`, puts them into a queue; units that are in one already count as failed, until they have results.

  Args:
    request: the arguments of the sweep.
    resolved: the settings, as `check_request` returns them.
    log: called with each line before and after the runs; meanwhile SweepProgress prints to standard output.

  Returns:
    The numbers of units of these settings and seeds.

  Raises:
    UserError: if jax cannot list its devices, if the cluster cannot be used, if the ledger cannot be opened, see
      `open_ledger`, for a run that cannot be adopted, for a command of --submit that fails, and for an invalid number
      of workers or value of --together.
  """
  seeds = requested_seeds(request, resolved)
  executor, backend, slots = _make_executor(request, len(resolved) * len(seeds))
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
    for unit in collected_units(ledger.state, ledger.folder):
      ledger.append(FINISHED, unit=unit.id)
      log(f'finished {unit.id}')
    together = trains_seeds_together(request.together, backend, len(resolved), len(seeds), slots)
    for unit in plan_units(ledger.state, resolved, seeds, together, request.plugins, request.runs):
      ledger.append(PLANNED, **planned_event(unit))
    ledger.append(OPENED, command=format_command(sys.argv), commit=code_version(), workers=slots)
    stop = stack.enter_context(StopRequest())
    make_command = functools.partial(_unit_command, request, resolved, ledger.folder)
    pending = _pending(ledger.state, resolved, seeds, request.retry)
    if executor is None:
      submit_units(ledger, pending, make_command, request.submit, stop, log)
    else:
      progress = stack.enter_context(contextlib.closing(SweepProgress(ledger.folder, slots)))
      Driver(ledger, executor, make_command, progress, stop).run(pending)
    outcome = _summarize(request, ledger.state, resolved, seeds, log)
    if outcome.finished and not stop.reason:
      _store_costs(ledger, resolved, log)
    return outcome


def _describe_removed(unit: Unit) -> str:
  return f'{unit.folder}: the folder of this finished run is missing, so that it counts as unfinished'


def _unit_command(request: SweepRequest, resolved: Sequence[Resolved], folder: Path, unit: Unit) -> list[str]:
  """Returns the command of a unit, with the config path, overrides and --plugins of this request.

  Those in the ledger may be outdated, or relative to another working directory: a setting is identified by its config
  alone.
  """
  setting = next(setting for setting in resolved if setting.id == unit.setting_id)
  current = dataclasses.replace(unit, path=setting.path, overrides=setting.overrides, plugins=request.plugins)
  return command(current, folder, request.train)


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
  first = resolved[0].config.training.seed
  return [first + i for i in range(request.seeds)]


def _make_executor(request: SweepRequest, runs: int):
  """Returns the executor, None for --submit, the backend of jax where it runs, and the number of its processes."""
  if request.submit:
    return None, 'cpu', runs  # the backend is not known; --together decides
  if request.cluster:
    executor = make_executor(request.folder.absolute(), request.cluster)
    return executor, _cluster_backend(request.cluster), executor.slots
  backend, ids = detect_devices()
  executor = LocalExecutor(divide_resources(request.workers, backend, ids))
  return executor, backend, executor.slots


def _cluster_backend(spec: str) -> str:
  """Returns the backend of jax in the jobs of a cluster."""
  cluster, _, parameters = parse_cluster(spec)
  if cluster == 'local':
    return detect_devices()[0]
  return 'gpu' if parameters.get('gpus_per_node') else 'cpu'


def _pending(state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int], retry: bool) -> list[str]:
  """Returns the ids of the units to run: those that have neither finished nor failed nor been put into a queue.

  With `retry`, those that failed, and those in a queue.
  """
  return [
    entry.unit.id
    for entry in requested_units(state, resolved, seeds)
    if entry.state != FINISHED and (entry.state == FAILED or entry.is_submitted) == retry
  ]


def _summarize(
  request: SweepRequest, state: SweepState, resolved: Sequence[Resolved], seeds: Sequence[int], log: Log
) -> Outcome:
  """Logs every failed unit with its error, then the numbers of units by state; returns these numbers."""
  entries = requested_units(state, resolved, seeds)
  failed = [entry for entry in entries if entry.state == FAILED]
  for entry in failed:
    log(f'failed: {entry.unit.id}: {entry.error}; output in {entry.log}')
  finished = sum(entry.state == FINISHED for entry in entries)
  outcome = Outcome(finished, len(failed), len(entries) - finished - len(failed))
  hint = '; --retry runs the failed ones again' if failed else ''
  if outcome.unfinished:
    hint += f'; the same command{" without --retry" if request.retry else ""} continues'
  if submitted := sum(entry.is_submitted for entry in entries):
    hint += f', and finds the results of the {submitted} in the queue, which --retry submits again'
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
  state = observed_state(state, folder)
  seeds = requested_seeds(request, resolved)
  costs = dict(measure_costs([(setting.id, setting.config) for setting in resolved], state.costs))
  if request.submit:
    _, backend, slots = _make_executor(request, len(resolved) * len(seeds))
  elif request.cluster:
    backend = _cluster_backend(request.cluster)
    _, slots, _ = parse_cluster(request.cluster)
  else:
    backend, ids = detect_devices()
    slots = len(divide_resources(request.workers, backend, ids))
  together = trains_seeds_together(request.together, backend, len(resolved), len(seeds), slots)
  missing = plan_units(state, resolved, seeds, together, request.plugins, request.runs)
  units = [*(entry.unit for entry in requested_units(state, resolved, seeds)), *missing]
  trains_on_this_cpu = backend == 'cpu' and not (request.cluster or request.submit)
  estimate = estimate_seconds(state, resolved, costs, matmul_rate if trains_on_this_cpu else None)
  for unit in units:
    log(_describe_unit(unit, state, costs[unit.setting_id]))
    log(f'  {format_command(_unit_command(request, resolved, request.folder, unit))}')
  runs = sum(len(unit.seeds) for unit in units)
  log(f'{runs} runs in {len(units)} processes: {len(resolved)} settings x {len(seeds)} seeds; {slots} at a time')
  pending = {*_pending(state, resolved, seeds, request.retry), *(unit.id for unit in missing if not request.retry)}
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
