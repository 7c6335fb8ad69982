"""Trains a whole experiment from its config: data, model, training and test metrics."""

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from attention_jax.data.pipeline import first_of_each_shape, stream
from attention_jax.decoding.metrics import MetricSummary, MetricValue, aggregate_runs
from attention_jax.errors import UserError, choose
from attention_jax.systems.base import BatchSequence, Log, System
from attention_jax.systems.config import RunConfig, parse_config, read_run_config, to_dict
from attention_jax.systems.initial_run import (
  InitialRun,
  describe_start,
  open_initial_run,
  read_continued_state,
  save_initial,
  start_from,
  store_continued_state,
)
from attention_jax.systems.initial_vectors import check_initial_vectors, read_initial_vectors
from attention_jax.systems.loading import comparable_fields, load_once
from attention_jax.systems.plugins import check_added_rows, store_plugins
from attention_jax.systems.provenance import COMMITS, code_version, read_versions, store_version
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import (
  Run,
  check_run_files,
  evaluate_split,
  restore_params,
  seed_folder,
  write_json,
  write_lines,
)
from attention_jax.systems.size_checks import check_batch_memory, check_state_memory
from attention_jax.training import peers
from attention_jax.training.anneal import make_anneal
from attention_jax.training.checkpoint import BEST, Checkpoints, updates_made
from attention_jax.training.digests import (
  DATA_DIGESTS_FILE,
  add_file_digests,
  check_digests,
  compute_digests,
  drop_file_digests,
  store_digests,
)
from attention_jax.training.folder import CONFIG, check_folder, own_folder, prepare_folder
from attention_jax.training.interrupts import Interrupted, StopSignals
from attention_jax.training.optim import describe_warmup, make_optimizer, make_schedule
from attention_jax.training.partition import describe_placement, make_mesh
from attention_jax.training.paths import absolute, run_path
from attention_jax.training.run import InterruptReason
from attention_jax.training.state import TrainState, count_parameters, evaluation_params
from attention_jax.training.train import FitResult, fit_seeds
from attention_jax.training.watch import BatchProgress, Watch, watch_all
from attention_jax.training.writers import DEFAULT_TRACKERS, RunInfo, Writer, make_trackers

Arrays = Mapping[str, np.ndarray]

RESULTS = 'results.json'
HYPOTHESES_PREFIX = 'hypotheses.'  # of the names of the files with the hypotheses of a split
TEST_SPLITS = ('test', 'unseen')  # evaluated once, after training

Results = dict[str, dict[str, MetricValue]]  # split -> metric -> value
Summaries = dict[str, dict[str, MetricSummary]]


def train(
  config: ConfigDict | Mapping[str, Any],
  folder: epath.PathLike,
  log: Log = print,
  trackers: Sequence[str] = DEFAULT_TRACKERS,
  group: str = '',
) -> Results | Summaries | None:
  """Trains in `folder`, or resumes an interrupted run of the same config; then evaluates the test splits.

  Without a test split, the validation split is evaluated.

  With config.seeds above 1, that many runs are trained side by side, each in a folder seed_N below `folder`. In a
  multi-process run, process 0 alone logs and writes files, except for checkpoints in a folder that all processes share.

  Args:
    config: a config with the fields of `systems.config.default_config`.
    folder: the run folder, which is created if it does not exist.
    log: called with each line of progress.
    trackers: keys of training.writers.TRACKERS.
    group: the name of a group of runs for trackers; '' for none.

  Returns:
    split -> metric -> value, or for several seeds its summary over the runs; also written to results.json. The
    parameters are the best by validation, or the last without a validation split. None if a signal stopped training
    or the evaluation of the test splits.

  Raises:
    UserError: for mistakes in the config, the data, the folder or the trackers, and for rows of --plugins that break
      the contract of masks, before any file of the folder is overwritten; during training, as `fit`.
  """
  code_version()  # cached now, because another commit may be checked out while this one runs
  peers.check_agreement(peers.package_versions())
  log = log if jax.process_index() == 0 else _discard
  with peers.fail_together():  # also a barrier: no config is stored before all processes have checked theirs
    config = parse_config(config)
    folder = run_path(folder)
    is_resumed = _check_before_loading(config, folder)
    writers = _make_writers(config, folder, trackers, group)
  peers.check_agreement(comparable_fields(config) | {'a run in the folder': 'present' if is_resumed else 'absent'})
  with peers.fail_together():
    initial = open_initial_run(config, folder)
    check_initial_vectors(config, folder)
  system = load_once(config, str(folder) if is_resumed else None, initial and initial.system)
  with peers.fail_together():
    plan = _make_plan(config, folder, is_resumed, system, initial, log)
    for check in PREFLIGHT:
      check(plan, log)
  peers.check_agreement(plan.digests_by_name())
  with contextlib.ExitStack() as stack:
    with peers.fail_together():
      check_owner = stack.enter_context(own_folder(absolute(folder), log))  # creates the folder
    state = read_continued_state(config, system, plan.initializer) if config.initial_state and not plan.made else None
    if state is not None:
      log(f'continues the optimiser of {plan.origin} at step {state.step}')
    folder = _prepare_run_folder(folder, config, system, plan.arrays, log)
    runs = _prepare_runs(config, folder, system, plan.arrays, log)
    with peers.fail_together():
      if jax.process_index() == 0:
        for path in dict.fromkeys([folder, *(path for _, path in runs)]):
          store_digests(path, plan.digests)
          add_file_digests(path, [DATA_DIGESTS_FILE])
    if state is not None:
      for _, path in runs:
        store_continued_state(path, state)
    return _train_and_evaluate(config, folder, runs, system, plan.initializer, plan.batches, writers, check_owner, log)


class RunPlan(NamedTuple):
  """What a run is going to do, before any file is written; PREFLIGHT checks it.

  Attributes:
    config: the whole config.
    folder: the run folder.
    is_resumed: whether the folder holds this run already.
    made: the number of updates that it has made.
    system: the system with its data.
    initializer: seed -> initial parameters.
    params: their shapes.
    arrays: the parameters to start from by name; None for random ones.
    origin: the config field that names their source, with its value; '' for random ones.
    batches: the batches of each seed.
    digests: digests of the splits by name.
  """

  config: RunConfig
  folder: epath.Path
  is_resumed: bool
  made: int
  system: System
  initializer: Callable[[int], Any]
  params: Any
  arrays: Arrays | None
  origin: str
  batches: Sequence[BatchSequence]
  digests: Mapping[str, str]

  def digests_by_name(self) -> dict[str, str]:
    """Returns the digests of the data and of the parameters to start from, as peers.check_agreement compares them."""
    data = {f"split '{split}' of the data": f'digest {digest}' for split, digest in self.digests.items()}
    if self.arrays:
      data[f'the content of {self.origin}'] = f'digest {compute_digests({"": self.arrays})[""]}'
    return data


def _check_before_loading(config: RunConfig, folder: epath.Path) -> bool:
  """Checks the config, the plug-ins and the folder, which needs no data; returns whether the folder holds this run."""
  check_config(config)
  check_added_rows()
  make_mesh(seeds=config.seeds, sizes=config.mesh)  # for its errors
  check_run_files(folder)
  return check_folder(folder, to_dict(config), _make_completion(folder))


def _make_writers(config: RunConfig, folder: epath.Path, trackers: Sequence[str], group: str) -> list[Sequence[Writer]]:
  """Returns the trackers of each run; none except in the first process."""
  runs = _split_seeds(config, folder)
  if jax.process_index() > 0:
    return [()] * len(runs)
  return [make_trackers(trackers, RunInfo(path, to_dict(run_config), group)) for run_config, path in runs]


def _make_plan(
  config: RunConfig, folder: epath.Path, is_resumed: bool, system: System, initial: InitialRun | None, log: Log
) -> RunPlan:
  """Returns the plan of a run whose config and folder have been checked, and logs where its parameters come from."""
  seeds = config.run_seeds
  initializer = system.initializer()
  params = jax.eval_shape(lambda: initializer(seeds[0]))
  arrays = initial.arrays if initial else read_initial_vectors(config, system, folder, params, log)
  origin = ''
  if arrays:
    field = 'initial_run' if initial else 'initial_vectors'
    origin = f'config.{field}={getattr(config, field)!r}'
    describe_start(arrays, params, origin, log)
    initializer = start_from(initializer, arrays)
  made = max(updates_made(path) for path in [folder, *(seed_folder(folder, seed) for seed in seeds)])
  batches = [system.batches(seed) for seed in seeds]
  digests = compute_digests(system.arrays)
  return RunPlan(config, folder, is_resumed, made, system, initializer, params, arrays, origin, batches, digests)


def _train_and_evaluate(
  config: RunConfig,
  folder: epath.Path,
  runs: Sequence[tuple[RunConfig, epath.Path]],
  system: System,
  initializer: Callable[[int], Any],
  batches: Sequence[BatchSequence],
  writers: Sequence[Sequence[Writer]],
  check_owner: Callable[[], None],
  log: Log,
) -> Results | Summaries | None:
  """Trains and evaluates after all checks have passed; `runs`, `batches` and `writers` are those of each seed."""
  start = time.monotonic()
  fitted = _fit(config, [path for _, path in runs], system, initializer, batches, writers, check_owner, log)
  seconds = time.monotonic() - start
  for reason in dict.fromkeys(result.reason for result in fitted):
    log(f'{reason} ({seconds:.0f} s, {fitted[0].compilations} shapes compiled)')
  if any(isinstance(result.reason, InterruptReason) for result in fitted):
    log(f'run the same command again to resume from step {max(int(result.state.step) for result in fitted)}')
    return None
  try:
    with StopSignals() as signals:
      evaluated = [_evaluate_and_store(run_config, path, system, signals, log) for run_config, path in runs]
  except Interrupted as signal:
    log(f'stopped by {signal} while evaluating; run the same command again to repeat the evaluation')
    return None
  for (run, results), writers_of_run, result in zip(evaluated, writers, fitted, strict=True):
    _write_to_trackers(writers_of_run, int(result.state.step), run, results, log)
  results = [results for _, results in evaluated]
  if len(runs) == 1:
    return results[0]
  return _summarize(folder, config.run_seeds, results, log)


def _fit(
  config: RunConfig,
  folders: Sequence[epath.Path],
  system: System,
  initializer: Callable[[int], Any],
  batches: Sequence[BatchSequence],
  writers: Sequence[Sequence[Writer]],
  check_owner: Callable[[], None],
  log: Log,
) -> list[FitResult]:
  """Trains one run, or several side by side."""
  training = config.training

  def stream_of_all(start: int, stop: int) -> Iterator[tuple]:
    return zip(*(stream(run_batches, start, stop) for run_batches in batches), strict=True)

  return fit_seeds(
    folders,
    config.run_seeds,
    training,
    loss=system.loss,
    init_params=initializer,
    stream=stream_of_all,
    first_of_each_shape=lambda start, stop: first_of_each_shape(batches[0], start, stop),
    evaluate=_make_validation(system),
    direction='max' if selectable_metrics(config)[training.select] else 'min',
    mesh=system.training_mesh,
    epoch=len(batches[0]),
    before_save=check_owner,
    log=log,
    writers=writers,
  )


def _prepare_run_folder(
  folder: epath.Path, config: RunConfig, system: System, arrays: Arrays | None, log: Log
) -> epath.Path:
  """Stores the files of a run, and their digests; a resumed run may have been killed before it had stored them."""
  with peers.fail_together():
    if jax.process_index() == 0:
      drop_file_digests(folder)
  folder = prepare_folder(folder, to_dict(config), _make_completion(folder))
  with peers.fail_together():
    if jax.process_index() == 0:
      store_version(folder, log)
      names = [CONFIG, COMMITS, *system.save(str(folder)), *store_plugins(folder)]
      if arrays:
        names.append(save_initial(folder, arrays))
      add_file_digests(folder, names)
  return folder


def _make_completion(folder: epath.PathLike) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
  """Returns stored config of `folder` -> the same config with every field."""
  return lambda stored: to_dict(parse_config(stored, f'{folder}/{CONFIG}'))


def _prepare_runs(
  config: RunConfig, folder: epath.Path, system: System, arrays: Arrays | None, log: Log
) -> list[tuple[RunConfig, epath.Path]]:
  """Prepares the folder of each run, and returns their configs and folders."""
  if config.seeds == 1:
    return [(config, folder)]
  runs = []
  for run_config, path in _split_seeds(config, folder):
    with peers.fail_together():
      check_run_files(path)
    runs.append((run_config, _prepare_run_folder(path, run_config, system, arrays, log)))
  return runs


def _split_seeds(config: RunConfig, folder: epath.Path) -> list[tuple[RunConfig, epath.Path]]:
  """Returns the config and the folder of each run. For several seeds, each config is that of a single run."""
  if config.seeds == 1:
    return [(config, folder)]
  return [
    (
      dataclasses.replace(config, seeds=1, training=dataclasses.replace(config.training, seed=seed)),
      seed_folder(folder, seed),
    )
    for seed in config.run_seeds
  ]


def check_config(config: RunConfig) -> None:
  """Checks a config without its data.

  Args:
    config: a config with every field.

  Raises:
    UserError: for mistakes that can be found from the config alone.
  """
  training = config.training
  make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  SYSTEMS[config.system].check(config)
  choose(training.select, selectable_metrics(config), 'metric in training.select:')


def selectable_metrics(config: RunConfig) -> dict[str, bool]:
  """Returns name -> whether a higher value is better, of the metrics that training.select of a config may name."""
  return SYSTEMS[config.system].selectable_metrics(config)


def measurable_metrics(config: RunConfig) -> set[str]:
  """Returns the names of all metrics that runs of a config may have; some of them depend on the data."""
  return {*selectable_metrics(config), *SYSTEMS[config.system].extra_metrics}


def _check_data(plan: RunPlan, log: Log) -> None:
  """Raises UserError for mistakes in the config that only the data reveal."""
  if 'validation' not in plan.system.splits:
    log('no validation split: training.select and training.patience have no effect, the last step counts as the best')
  plan.system.check_data(log)


def _check_memory(plan: RunPlan, log: Log) -> None:
  """Raises UserError if the state or the largest batch does not fit into memory."""
  check_state_memory(plan.config, plan.params)
  check_batch_memory(plan.config, plan.batches[0])


def _check_resumed(plan: RunPlan, log: Log) -> None:
  """Raises UserError if a run to be resumed has other data, or has made more updates than its results would state."""
  steps = plan.config.training.steps
  if not plan.is_resumed:
    return
  check_digests(plan.folder, plan.digests, log)
  if plan.made > steps:
    raise UserError(
      f'config.training.steps is {steps}, but the run in {plan.folder} has made {plan.made} updates; '
      f'expected at least {plan.made}, or another folder'
    )
  for line in _describe_raised_steps(read_run_config(plan.folder), plan.config, plan.params, plan.made):
    log(line)


def _describe_raised_steps(stored: RunConfig, config: RunConfig, params: Any, made: int) -> list[str]:
  """Lines about schedules that another number of steps changes, for a run that has made some updates.

  `stored` is the config that the run had before, `params` are parameters or their shapes.
  """
  training = config.training
  lengths = (stored.training.steps, training.steps)
  before, after = (
    {'learning rate': make_schedule(training.schedule, steps)} | make_anneal(training.anneal, params, steps)
    for steps in lengths
  )
  lines = []
  for name, schedule in after.items():
    if made and schedule(made) != before[name](made):
      lines.append(
        f'training.steps was {lengths[0]} and is now {lengths[1]}, on which the schedule of the {name} depends: it was '
        f'{float(before[name](made)):.4g} at step {made}, and is {float(schedule(made + 1)):.4g} at step {made + 1}'
      )
  return lines


def _describe(plan: RunPlan, log: Log) -> None:
  """Logs the data, the schedule, the model's attention, its devices and its batches.

  Raises:
    UserError: for a mesh over which the parameters cannot be sharded.
  """
  config, system, batches = plan.config, plan.system, plan.batches[0]
  devices = jax.devices()
  lines = [
    *system.report,
    _describe_memory(system),
    describe_warmup(config.training.schedule, config.training.steps),
    f'attention implementation {system.implementation}; {len(devices)} x {devices[0].device_kind}',
    _describe_precision(config),
    describe_placement(plan.params, system.training_mesh),
    f'batches of shapes ({batches.shape_names}) {sorted(set(batches.shapes))}',
  ]
  for line in filter(None, lines):
    log(line)


def _describe_memory(system: System) -> str:
  """A line with the size of the arrays of the data, such as ids and pictures; '' for data that are generated."""
  sizes = {
    split: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree)) for split, tree in system.arrays.items()
  }
  splits = ', '.join(f'{split} {size / 1e6:.1f} MB' for split, size in sizes.items())
  return f'arrays of the data in memory: {sum(sizes.values()) / 1e6:.1f} MB ({splits})' if sizes else ''


# The checks of a run that need its data, in their order. They change nothing.
PREFLIGHT: Sequence[Callable[[RunPlan, Log], None]] = (_describe, _check_memory, _check_data, _check_resumed)


def _describe_precision(config: RunConfig, cpu_info: str = '/proc/cpuinfo') -> str:
  """Returns a line about a 16-bit run on a CPU without AMX, whose products are slower than in float32; '' otherwise."""
  dtype = config.model.dtype
  if dtype == 'float32' or jax.devices()[0].platform != 'cpu':
    return ''
  if os.path.exists(cpu_info) and 'amx_bf16' in epath.Path(cpu_info).read_text().split():
    return ''
  return (
    f'config.model.dtype={dtype!r} is usually slower than float32 on this CPU, which has no AMX (amx_bf16 in lscpu)'
  )


def _make_validation(system: System) -> Callable[[TrainState, Watch], dict[str, float]] | None:
  """Returns (state, watch) -> metrics of the validation split with greedy search; None without a validation split."""
  if 'validation' not in system.splits:
    return None

  def validate(state: TrainState, watch: Watch) -> dict[str, float]:
    metrics, _ = system.evaluate(evaluation_params(state), 'validation', beams=1, watch=watch)
    loss = metrics['loss'].value
    if not math.isfinite(loss):
      raise UserError(
        f'validation loss must be finite, got {loss} after step {state.step}; try a lower learning rate or clipping'
      )
    return {name: result.value for name, result in metrics.items()}

  return validate


def _evaluate_and_store(
  config: RunConfig, folder: epath.Path, system: System, signals: StopSignals, log: Log
) -> tuple[Run, Results]:
  """Evaluates the splits of `_splits_to_evaluate` with the best parameters, and writes results and hypotheses."""
  params, steps = restore_params(folder, system, 'best')
  run = Run(folder, system, params, steps)
  hypothesis_files = {split: f'{HYPOTHESES_PREFIX}{split}.txt' for split in _splits_to_evaluate(system)}
  written = [RESULTS, *hypothesis_files.values()]
  if jax.process_index() == 0:
    drop_file_digests(folder, written)
  results = {}
  for split, name in hypothesis_files.items():
    log(f'evaluating {split} with the parameters of step {run.step}')
    watch = watch_all(signals.check, BatchProgress(f'evaluating {split}', log))
    results[split], predictions = evaluate_split(run, split, watch)
    write_lines(folder / name, system.format_predictions(predictions))
  splits = ' and '.join(results) or 'nothing, as the task has only a training split'
  selection = _describe_selection(folder, system, config.training.select)
  log(f'measured: {splits}; parameters: step {run.step}, {selection}')
  record = {
    'step': run.step,
    'parameters': count_parameters(params),
    'implementation': system.implementation,
    'commit': ', '.join(read_versions(folder)),
    'evaluation': to_dict(config.evaluation),
    'results': _as_json(results),
  }
  write_json(folder / RESULTS, record)
  if jax.process_index() == 0:
    add_file_digests(folder, written)
  _wait_for_all_processes('store_results')
  names = sorted(f'{path.name}/' if path.is_dir() else path.name for path in folder.iterdir() if path.name[0] != '.')
  log(f'written to {folder}: {", ".join(names)}')
  return run, results


def _write_to_trackers(writers: Sequence[Writer], step: int, run: Run, results: Results, log: Log) -> None:
  """Writes the results of a run to its trackers, and a picture of attention to those that take pictures."""
  record = {f'results/{split}/{name}': x.value for split, metrics in results.items() for name, x in metrics.items()}
  with contextlib.ExitStack() as stack:
    for writer in writers:
      writer.open(step)
      stack.callback(writer.close)
      writer.write(step, record)
    takers = [writer for writer in writers if writer.takes_pictures]
    if not (takers and results):
      return
    path = epath.Path(stack.enter_context(tempfile.TemporaryDirectory())) / run.system.plot_filename
    split = 'validation' if 'validation' in run.system.splits else next(iter(results))
    try:
      if jax.process_count() > 1:
        raise UserError('the run has several processes')  # they may share its parameters
      run.system.plot(run.params, path, split=split, rows=['0'], inputs=())
    except UserError as error:
      log(f'no picture of attention for the trackers: {error}')
      return
    for writer in takers:
      writer.picture(step, f'attention/{split}', path)


def _describe_selection(folder: epath.Path, system: System, select: str) -> str:
  """Describes which parameters the checkpoint name 'best' stands for."""
  if 'validation' not in system.splits:
    return 'the last'
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    return f'the best by validation {select}' if checkpoints.steps(BEST) else f'the last, as {BEST}/ is empty'


def _summarize(folder: epath.Path, seeds: list[int], runs: list[Results], log: Log) -> Summaries:
  """Aggregates the results of several runs, and writes them. A metric that a run lacks has no summary."""
  summaries = {split: {} for split in runs[0]}
  for split, metrics in summaries.items():
    for name in dict.fromkeys(name for run in runs for name in run[split]):
      missing = [seed for seed, run in zip(seeds, runs, strict=True) if name not in run[split]]
      if missing:
        log(f'{split}: no mean of {name}, which seed {", ".join(map(str, missing))} lacks')
      else:
        metrics[name] = aggregate_runs([run[split][name] for run in runs])
  commit = ', '.join(read_versions(folder))
  if jax.process_index() == 0:
    drop_file_digests(folder, [RESULTS])
  write_json(folder / RESULTS, {'seeds': seeds, 'commit': commit, 'results': _as_json(summaries)})
  if jax.process_index() == 0:
    add_file_digests(folder, [RESULTS])
  log(f'written to {folder}: the means over {len(seeds)} seeds in {RESULTS}')
  return summaries


def _as_json(results: Results | Summaries) -> dict[str, Any]:
  return {split: {name: result._asdict() for name, result in metrics.items()} for split, metrics in results.items()}


def _splits_to_evaluate(system: System) -> list[str]:
  """The test splits; the validation split of a task without any."""
  tests = [split for split in TEST_SPLITS if split in system.splits]
  return tests or [split for split in ('validation',) if split in system.splits]


def _wait_for_all_processes(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def _discard(line: str) -> None:
  """The log of all processes but the first."""
