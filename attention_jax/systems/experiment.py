"""A whole experiment from its config: data, model, training, test metrics. And how to open one that was run."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from attention_jax.data.batching import StackedBatches
from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError, choose
from attention_jax.inference.metrics import MetricSummary, MetricValue, aggregate_runs
from attention_jax.systems.base import BatchSequence, Config, System
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import (
  Run,
  evaluate_split,
  restore_params,
  run_seeds,
  seed_folder,
  write_lines,
  write_text,
)
from attention_jax.training.checkpoint import BEST, Checkpoints
from attention_jax.training.fingerprint import check_digests, compute_digests, store_digests
from attention_jax.training.folder import check_folder, lock_folder, prepare_folder
from attention_jax.training.loop import Training, fit
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import check_rows, make_mesh
from attention_jax.training.seeds import SeedResults, fit_seeds
from attention_jax.training.state import TrainState, evaluation_params

RESULTS = 'results.json'
TEST_SPLITS = ('test', 'unseen')  # splits that are measured once, at the end


def train(config: Config, folder: str | Path, log=print) -> dict[str, dict[str, MetricValue | MetricSummary]] | None:
  """Trains in `folder`, or goes on where a run of the same config was interrupted; then measures the tested splits.

  With config['seeds'] of several, so many runs are trained side by side, each in a folder seed_N below, and what is
  returned are means over them.

  Args:
    config: as `systems.config.default_config` lays it out.
    folder: of the run; what is in it afterwards is listed by `log`.
    log: is told what a person should read.

  Returns: split -> metric -> what was measured, of the best parameters by validation, also written to results.json;
    None where a signal stopped it before its end.
  Raises: UserError for anything wrong with the config, the data or the folder, before anything is overwritten.
  """
  config, folder = fill_defaults(config, 'the config'), Path(folder).expanduser()
  _check_config(config)
  resumed = check_folder(folder, config, _completed)
  log = log if jax.process_index() == 0 else lambda line: None
  system = SYSTEMS[config['system']].load(config, str(folder) if resumed else None)
  for line in system.report:
    log(line)
  seeds = run_seeds(config)
  params = system.initializer()
  log(_describe(system, jax.eval_shape(lambda: params(seeds[0]))))
  batches = [system.batches(seed) for seed in seeds]
  log(f'{len(batches[0])} batches an epoch, of shapes ({batches[0].shape_names}) {sorted(set(batches[0].shapes))}')
  _check_data(system, batches[0], log)
  found = compute_digests(system.arrays)
  if resumed:
    check_digests(folder, found, log)
  with lock_folder(folder.absolute(), log):
    folder = prepare_folder(folder, config, _completed)
    system.save(str(folder))  # of a resumed run too: it may have been killed before it had all
    store_digests(folder, found)
    return _train(config, folder, system, params, batches, log)


def _train(
  config: Config,
  folder: Path,
  system: System,
  params: Callable[[int], Any],
  batches: Sequence[BatchSequence],
  log: Callable[[str], None],
) -> dict[str, dict[str, MetricValue | MetricSummary]] | None:
  """What is left of `train` once everything is known to be well. Args: batches, of each seed."""
  training = Training(**config['training'])
  began, direction = time.monotonic(), 'max' if _selectable(config)[training.select] else 'min'
  given = {'loss': system.loss, 'evaluate': _validation(system), 'direction': direction}
  members = _members(config, folder, system)
  step, reasons, compilations = _fit(folder, [own for _, own in members], training, params, batches, given)
  for reason in dict.fromkeys(reasons):
    log(f'{reason} ({time.monotonic() - began:.0f} s, {compilations} shapes compiled)')
  if any(reason.startswith('stopped by') for reason in reasons):
    log(f'the same command goes on from step {step}')
    return None
  found = [_finish(own_config, own, system, log) for own_config, own in members]
  return found[0] if len(batches) == 1 else _summary(folder, run_seeds(config), found, log)


def _fit(
  folder: Path,
  folders: Sequence[Path],
  training: Training,
  params: Callable[[int], Any],
  batches: Sequence[BatchSequence],
  given: Mapping[str, Any],
) -> SeedResults:
  """One run by itself, several side by side. `folders` and `batches`: of each run; `given`: for either."""
  if len(batches) > 1:
    together = lambda start, stop: stream(StackedBatches(batches), start, stop)
    return fit_seeds(folder, folders, training, params=params, stream=together, **given)
  alone = lambda start, stop: stream(batches[0], start, stop)
  result = fit(folder, training, params=params, stream=alone, **given)
  return SeedResults(int(result.state.step), [result.reason], result.compilations)


def _completed(stored: Config) -> Config:
  return fill_defaults(stored, 'the config of that folder')


def _members(config: Config, folder: Path, system: System) -> list[tuple[Config, Path]]:
  """The config and the folder of each run; of several, those that it would have if it were trained alone."""
  if config['seeds'] == 1:
    return [(config, folder)]
  configs = [dict(config, seeds=1, training=config['training'] | {'seed': seed}) for seed in run_seeds(config)]
  members = [(own, prepare_folder(seed_folder(folder, own['training']['seed']), own, _completed)) for own in configs]
  for _, path in members:
    system.save(str(path))
  return members


def _check_config(config: Config) -> None:
  """Everything in a config that can be wrong without its data, said before the folder belongs to it."""
  if config['seeds'] < 1 or (config['seeds'] > 1 and jax.process_count() > 1):
    possible = '1 in several processes' if jax.process_count() > 1 else '1 or more'
    raise UserError(f'config.seeds is {config["seeds"]}; possible: {possible}')
  training = Training(**config['training'])
  make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  SYSTEMS[config['system']].check(config, training)
  choose(training.select, _selectable(config), 'metric in training.select:')


def _selectable(config: Config) -> dict[str, bool]:
  return SYSTEMS[config['system']].selectable_metrics(config)


def _check_data(system: System, batches: BatchSequence, log: Callable[[str], None]) -> None:
  """What only the data can tell to be wrong with a config."""
  if 'validation' not in system.splits:
    log('no validation split: training.select and training.patience have nothing to look at, the last step is measured')
  mesh = make_mesh(seeds=system.config['seeds'])
  for rows, *_ in batches.shapes:
    check_rows(rows * jax.process_count(), mesh, system.config['training']['accumulate'])
  system.check_data(log)


def _describe(system: System, params: Any) -> str:
  size = sum(x.size for x in jax.tree.leaves(params))
  devices = jax.devices()
  where = f'{len(devices)} x {devices[0].device_kind}'
  return f'{size:,} parameters; attention implementation {system.implementation}; {where}'


def _validation(system: System) -> Callable[[TrainState], dict[str, float]] | None:
  """state -> metrics of the validation split by greedy search; None where the task has no validation split."""
  if 'validation' not in system.splits:
    return None

  def validate(state: TrainState) -> dict[str, float]:
    found, _ = system.evaluate(evaluation_params(state), 'validation', beams=1)
    if not math.isfinite(loss := found['loss'].value):
      raise UserError(f'validation loss is {loss} after step {state.step}; possible: a lower learning rate, clipping')
    return {name: result.value for name, result in found.items()}

  return validate


def _finish(config: Config, folder: Path, system: System, log) -> dict[str, dict[str, MetricValue]]:
  """Measures the tested splits with the best parameters and writes results and hypotheses."""
  run = Run(folder, system, *restore_params(folder, system, 'best'))
  results = {}
  for split in _measured(system):
    results[split], predictions = evaluate_split(run, split)
    write_lines(folder / f'hypotheses.{split}.txt', system.format_predictions(predictions))
  chosen = _chosen(folder, system, config['training']['select'])
  what = ' and '.join(results) or 'nothing, as the task has only a training split'
  log(f'measured: {what}; parameters: step {run.step}, {chosen}')
  record = {'step': run.step, 'implementation': system.implementation, 'evaluation': config['evaluation']}
  record['results'] = {s: {n: m._asdict() for n, m in found.items()} for s, found in results.items()}
  write_text(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  log(f'written to {folder}: {", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.glob("[!.]*")))}')
  return results


def _chosen(folder: Path, system: System, select: str) -> str:
  """Which parameters `best` stands for."""
  if 'validation' not in system.splits:
    return 'the last'
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    return f'the best by validation {select}' if checkpoints.steps(BEST) else f'the last, as {BEST}/ holds none'
  finally:
    checkpoints.close()


def _summary(folder: Path, seeds: list[int], found: list[dict[str, dict[str, MetricValue]]], log):
  """Mean and spread over runs of what was measured in each; written to results.json as well."""
  results = {split: {} for split in found[0]}
  for split, means in results.items():
    for name in dict.fromkeys(name for run in found for name in run[split]):
      lack = [seed for seed, run in zip(seeds, found, strict=True) if name not in run[split]]
      if lack:
        log(f'{split}: no {name} of seed {", ".join(map(str, lack))}, and so no mean of it')
      else:
        means[name] = aggregate_runs([run[split][name] for run in found])
  record = {'seeds': seeds, 'results': {s: {n: m._asdict() for n, m in some.items()} for s, some in results.items()}}
  write_text(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  log(f'written to {folder}: the means over {len(seeds)} seeds in {RESULTS}')
  return results


def _measured(system: System) -> list[str]:
  """The tested splits; of a task that has none (it comes without a test set) the one that chose the parameters."""
  splits = system.splits
  return [split for split in TEST_SPLITS if split in splits] or [split for split in ('validation',) if split in splits]
