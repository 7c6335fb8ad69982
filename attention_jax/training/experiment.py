"""A whole experiment from its config: data, model, training, test metrics. And how to open one that was run."""

import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from attention_jax.data.batching import Together
from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError, choose
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.config import complete
from attention_jax.training.evaluation import measured
from attention_jax.training.fingerprint import check_digests, digests, store_digests
from attention_jax.training.folder import check_folder, held, prepare_folder, read_config
from attention_jax.training.loop import Training, fit
from attention_jax.training.metrics import Result as Measured
from attention_jax.training.metrics import Spread, over_runs
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import check_rows, make_mesh, sharding
from attention_jax.training.seeds import Results, fit_seeds
from attention_jax.training.state import TrainState, evaluation_params, init_state
from attention_jax.training.system import Config, Stepwise, System
from attention_jax.training.systems import SYSTEMS

RESULTS = 'results.json'
NOTHING: Mapping[str, Any] = MappingProxyType({})
TESTED = ('test', 'unseen')  # splits that are measured once, at the end


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained run: its folder and system, the parameters to predict with, and the steps they are from.

  There are several steps of a mean of checkpoints and of an ensemble.
  """

  folder: Path
  system: System
  params: Any
  steps: tuple[int, ...]

  @property
  def step(self) -> int:
    """The last of the steps."""
    return self.steps[-1]

  @property
  def config(self) -> Config:
    return self.system.config

  @property
  def model(self) -> Any:
    return self.system.model

  @functools.cached_property
  def predictor(self) -> Any:
    """What translates lines. Raises: UserError where the run does something else."""
    return self.able('predictor').predictor(self.params)

  def able(self, method: str) -> System:
    """The system, if it has this method. Raises: UserError naming those that have it."""
    if not hasattr(self.system, method):
      possible = ', '.join(name for name, cls in SYSTEMS.items() if hasattr(cls, method))
      raise UserError(f'{self.folder} is a run of system {self.config["system"]!r}; possible here: {possible}')
    return self.system


def train(config: Config, folder: str | Path, say=print) -> dict[str, dict[str, Measured | Spread]] | None:
  """Trains in `folder`, or goes on where a run of the same config was interrupted; then measures the tested splits.

  With config['seeds'] of several, so many runs are trained side by side, each in a folder seed_N below, and what is
  returned are means over them.

  Args:
    config: as `training.config.default_config` lays it out.
    folder: of the run; what is in it afterwards is listed by `say`.
    say: is told what a person should read.

  Returns: split -> metric -> what was measured, of the best parameters by validation, also written to results.json;
    None where a signal stopped it before its end.
  Raises: UserError for anything wrong with the config, the data or the folder, before anything is overwritten.
  """
  config, folder = complete(config, 'the config'), Path(folder).expanduser()
  _check_config(config)
  resumed = check_folder(folder, config, _completed)
  say = say if jax.process_index() == 0 else lambda line: None
  system = SYSTEMS[config['system']].load(config, str(folder) if resumed else None)
  for line in system.report:
    say(line)
  seeds = _seeds(config)
  params = system.initializer()
  say(_describe(system, jax.eval_shape(lambda: params(seeds[0]))))
  batches = [system.batches(seed) for seed in seeds]
  say(f'{len(batches[0])} batches an epoch, of shapes ({batches[0].sides}) {sorted(set(batches[0].shapes))}')
  _check_data(system, batches[0], say)
  found = digests(system.arrays)
  if resumed:
    check_digests(folder, found, say)
  with held(folder.absolute(), say):
    folder = prepare_folder(folder, config, _completed)
    system.save(str(folder))  # of a resumed run too: it may have been killed before it had all
    store_digests(folder, found)
    return _train(config, folder, system, params, batches, say)


def _train(
  config: Config, folder: Path, system: System, params: Callable[[int], Any], batches: Sequence[Stepwise],
  say: Callable[[str], None],
) -> dict[str, dict[str, Measured | Spread]] | None:  # fmt: skip
  """What is left of `train` once everything is known to be well. Args: batches, of each seed."""
  training = Training(**config['training'])
  began, direction = time.monotonic(), 'max' if _selectable(config)[training.select] else 'min'
  given = {'loss': system.loss, 'evaluate': _validation(system), 'direction': direction}
  members = _members(config, folder, system)
  step, reasons, compilations = _fit(folder, [own for _, own in members], training, params, batches, given)
  for reason in dict.fromkeys(reasons):
    say(f'{reason} ({time.monotonic() - began:.0f} s, {compilations} shapes compiled)')
  if any(reason.startswith('stopped by') for reason in reasons):
    say(f'the same command goes on from step {step}')
    return None
  found = [_finish(own_config, own, system, say) for own_config, own in members]
  return found[0] if len(batches) == 1 else _summary(folder, _seeds(config), found, say)


def _fit(
  folder: Path, folders: Sequence[Path], training: Training, params: Callable[[int], Any],
  batches: Sequence[Stepwise], given: Mapping[str, Any],
) -> Results:  # fmt: skip
  """One run by itself, several side by side. `folders` and `batches`: of each run; `given`: for either."""
  if len(batches) > 1:
    together = lambda start, stop: stream(Together(batches), start, stop)
    return fit_seeds(folder, folders, training, params=params, stream=together, **given)
  alone = lambda start, stop: stream(batches[0], start, stop)
  result = fit(folder, training, params=params, stream=alone, **given)
  return Results(int(result.state.step), [result.reason], result.compilations)


def open_runs(
  folders: str, checkpoints: str = 'best', evaluation: Mapping[str, Any] = NOTHING, dtype: str = ''
) -> Run:
  """As open_run; folders with commas between them are an ensemble, with the config of the first.

  So are checkpoints with commas between them: of each folder, each of them.
  Raises: UserError besides where runs cannot be one.
  """
  every = itertools.product(_each(folders, 'workdir'), _each(checkpoints, 'checkpoint'))
  first, *others = runs = [open_run(folder, checkpoint, evaluation, dtype) for folder, checkpoint in every]
  if not others:
    return first
  for run in runs:
    if not hasattr(run.system, 'together'):
      raise UserError(f'{run.folder}: runs of system {run.config["system"]!r} cannot be an ensemble')
  try:
    system = first.system.together([run.system for run in others])
  except UserError as error:
    raise UserError(f'{folders}: {error}') from error
  steps = tuple(itertools.chain.from_iterable(run.steps for run in runs))
  return dataclasses.replace(first, system=system, params=tuple(run.params for run in runs), steps=steps)


def _each(given: str, what: str) -> list[str]:
  """What stands between commas."""
  parts = [part.strip() for part in given.split(',')]
  if not all(parts):
    raise UserError(f'{what} {given!r}: nothing before or behind a comma; possible: one, or several with commas')
  return parts


def open_run(
  folder: str | Path, checkpoint: str = 'best', evaluation: Mapping[str, Any] = NOTHING, dtype: str = ''
) -> Run:
  """A run that was trained, ready to predict, without its data.

  Args:
    checkpoint: 'best', 'latest', 'average' (the mean of the parameters of the last training.keep), or a step that is
      kept.
    evaluation: fields of config.evaluation that are to be others than the run was trained with.
    dtype: to compute in, in place of config.model.dtype.

  Raises: UserError when the folder holds no run, its checkpoint cannot be read, or its system has no such field.
  """
  folder = Path(folder).expanduser()
  config = complete(read_config(folder), f'{folder}/config.json')
  for field in evaluation:
    choose(field, config['evaluation'], f'field of config.evaluation of {folder}:')
  config['evaluation'] |= evaluation
  config['model'] |= {'dtype': dtype} if dtype else {}
  if config['seeds'] > 1:
    possible = ', '.join(str(_own(folder, seed)) for seed in _seeds(config))
    raise UserError(f'{folder} holds {config["seeds"]} runs, one for each seed; possible: {possible}')
  system = SYSTEMS[config['system']].open(config, str(folder))
  return Run(folder, system, *_restore(folder, system, checkpoint))


def evaluate_split(run: Run, split: str):
  """(metrics, predictions) of one split of a run's task. Raises: UserError naming the splits there are."""
  choose(split, run.system.splits, 'split')
  return run.system.measure(run.params, split)


def evaluate_lines(run: Run, split: str, lines: Sequence[str]) -> dict[str, Measured]:
  """The metrics of texts of a run's task for what somebody else says of a split, one line a row.

  Raises: UserError where there are not as many, and for a run that says no texts.
  """
  choose(split, run.system.splits, 'split')
  corpus = run.able('texts').texts(split)
  if len(lines) != len(corpus.source):
    raise UserError(f'{len(lines)} hypotheses for the {len(corpus.source)} rows of {split}; possible: one for each')
  return measured(corpus, lines, run.config['evaluation'])


def _seeds(config: Config) -> list[int]:
  """The seeds of the runs of a config."""
  return [config['training']['seed'] + i for i in range(config['seeds'])]


def _completed(stored: Config) -> Config:
  return complete(stored, 'the config of that folder')


def _own(folder: Path, seed: int) -> Path:
  """The folder of one of several runs."""
  return folder / f'seed_{seed}'


def _members(config: Config, folder: Path, system: System) -> list[tuple[Config, Path]]:
  """The config and the folder of each run; of several, those that it would have if it were trained alone."""
  if config['seeds'] == 1:
    return [(config, folder)]
  configs = [dict(config, seeds=1, training=config['training'] | {'seed': seed}) for seed in _seeds(config)]
  members = [(own, prepare_folder(_own(folder, own['training']['seed']), own, _completed)) for own in configs]
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
  return SYSTEMS[config['system']].selectable(config)


def _check_data(system: System, batches: Stepwise, say: Callable[[str], None]) -> None:
  """What only the data can tell to be wrong with a config."""
  if 'validation' not in system.splits:
    say('no validation split: training.select and training.patience have nothing to look at, the last step is measured')
  mesh = make_mesh(seeds=system.config['seeds'])
  for rows, *_ in batches.shapes:
    check_rows(rows * jax.process_count(), mesh, system.config['training']['accumulate'])
  system.check_data(say)


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
    found, _ = system.measure(evaluation_params(state), 'validation', beams=1)
    if not math.isfinite(loss := found['loss'].value):
      raise UserError(f'validation loss is {loss} after step {state.step}; possible: a lower learning rate, clipping')
    return {name: result.value for name, result in found.items()}

  return validate


def _restore(folder: Path, system: System, checkpoint: str) -> tuple[Any, tuple[int, ...]]:
  """The parameters to predict with, and the steps they are from; `checkpoint` as for open_run."""
  training = Training(**system.config['training'])
  optimizer = make_optimizer(training.optimizer, make_schedule(training.schedule, training.steps), training.clip)
  # Shapes are enough: initial values would take seconds to compile.
  initial = lambda: init_state(system.initializer()(training.seed), optimizer, training.average, system.loss.running)
  place = sharding(make_mesh(jax.local_devices()), 'state')
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(initial))
    kind, steps = _which(checkpoints, checkpoint, training.keep)
    params = [evaluation_params(checkpoints.restore(like, kind, step)[0]) for step in steps or [None]]
    return jax.tree.map(lambda *x: sum(x) / len(x), *params) if len(params) > 1 else params[0], tuple(steps)
  finally:
    checkpoints.close()


def _which(checkpoints: Checkpoints, name: str, keep: int) -> tuple[str, list[int]]:
  """The kind of the checkpoints that a name says, and their steps; none where there are none."""
  if name.isdecimal():
    there = {step: kind for kind in (LATEST, BEST) for step in checkpoints.steps(kind)}
    step = choose(str(int(name)), map(str, sorted(there)), f'checkpoint of {checkpoints.folder}:')
    return there[int(step)], [int(step)]
  choose(name, ('best', 'latest', 'average'), 'checkpoint (or else a step)')
  kind = BEST if name == 'best' and checkpoints.steps(BEST) else LATEST
  return kind, checkpoints.steps(kind)[-keep if name == 'average' else -1 :]


def _finish(config: Config, folder: Path, system: System, say) -> dict[str, dict[str, Measured]]:
  """Measures the tested splits with the best parameters and writes results and hypotheses."""
  run = Run(folder, system, *_restore(folder, system, 'best'))
  results = {}
  for split in _measured(system):
    results[split], predictions = evaluate_split(run, split)
    write_lines(folder / f'hypotheses.{split}.txt', system.lines(predictions))
  chosen = _chosen(folder, system, config['training']['select'])
  what = ' and '.join(results) or 'nothing, as the task has only a training split'
  say(f'measured: {what}; parameters: step {run.step}, {chosen}')
  record = {'step': run.step, 'implementation': system.implementation, 'evaluation': config['evaluation']}
  record['results'] = {s: {n: m._asdict() for n, m in found.items()} for s, found in results.items()}
  _write(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  say(f'written to {folder}: {", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.glob("[!.]*")))}')
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


def _summary(folder: Path, seeds: list[int], found: list[dict[str, dict[str, Measured]]], say):
  """Mean and spread over runs of what was measured in each; written to results.json as well."""
  results = {split: {} for split in found[0]}
  for split, means in results.items():
    for name in dict.fromkeys(name for run in found for name in run[split]):
      lack = [seed for seed, run in zip(seeds, found, strict=True) if name not in run[split]]
      if lack:
        say(f'{split}: no {name} of seed {", ".join(map(str, lack))}, and so no mean of it')
      else:
        means[name] = over_runs([run[split][name] for run in found])
  record = {'seeds': seeds, 'results': {s: {n: m._asdict() for n, m in some.items()} for s, some in results.items()}}
  _write(folder / RESULTS, json.dumps(record, indent=2) + '\n')
  say(f'written to {folder}: the means over {len(seeds)} seeds in {RESULTS}')
  return results


def _measured(system: System) -> list[str]:
  """The tested splits; of a task that has none (it comes without a test set) the one that chose the parameters."""
  splits = system.splits
  return [split for split in TESTED if split in splits] or [split for split in ('validation',) if split in splits]


def write_lines(path: Path, lines: Sequence[str]) -> None:
  """One line for each row of a split, in order."""
  _write(path, ''.join(f'{line}\n' for line in lines))


def _write(path: Path, text: str) -> None:
  if jax.process_index() == 0:
    partial = path.with_name(f'.{path.name}.part')
    partial.write_text(text, 'utf-8')
    os.replace(partial, path)
