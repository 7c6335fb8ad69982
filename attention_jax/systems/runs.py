"""Trained runs: open, restore, average and ensemble them, and evaluate them on a split."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from attention_jax.errors import UserError, choose
from attention_jax.inference.evaluation import text_metrics
from attention_jax.inference.metrics import MetricValue
from attention_jax.systems.base import Config, System
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.folder import read_config
from attention_jax.training.loop import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, sharding
from attention_jax.training.state import evaluation_params, init_state

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


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
    return self.system_with('predictor').predictor(self.params)

  def system_with(self, method: str) -> System:
    """The system, if it has this method. Raises: UserError naming those that have it."""
    if not hasattr(self.system, method):
      possible = ', '.join(name for name, cls in SYSTEMS.items() if hasattr(cls, method))
      raise UserError(f'{self.folder} is a run of system {self.config["system"]!r}; possible here: {possible}')
    return self.system


def open_run_or_ensemble(
  folders: str, checkpoints: str = 'best', evaluation: Mapping[str, Any] = NO_OVERRIDES, dtype: str = ''
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
    if not hasattr(run.system, 'ensemble'):
      raise UserError(f'{run.folder}: runs of system {run.config["system"]!r} cannot be an ensemble')
  try:
    system = first.system.ensemble([run.system for run in others])
  except UserError as error:
    raise UserError(f'{folders}: {error}') from error
  steps = tuple(itertools.chain.from_iterable(run.steps for run in runs))
  return dataclasses.replace(first, system=system, params=tuple(run.params for run in runs), steps=steps)


def open_run(
  folder: str | Path, checkpoint: str = 'best', evaluation: Mapping[str, Any] = NO_OVERRIDES, dtype: str = ''
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
  config = fill_defaults(read_config(folder), f'{folder}/config.json')
  for field in evaluation:
    choose(field, config['evaluation'], f'field of config.evaluation of {folder}:')
  config['evaluation'] |= evaluation
  config['model'] |= {'dtype': dtype} if dtype else {}
  if config['seeds'] > 1:
    possible = ', '.join(str(seed_folder(folder, seed)) for seed in run_seeds(config))
    raise UserError(f'{folder} holds {config["seeds"]} runs, one for each seed; possible: {possible}')
  system = SYSTEMS[config['system']].open(config, str(folder))
  return Run(folder, system, *restore_params(folder, system, checkpoint))


def evaluate_split(run: Run, split: str):
  """(metrics, predictions) of one split of a run's task. Raises: UserError naming the splits there are."""
  choose(split, run.system.splits, 'split')
  return run.system.evaluate(run.params, split)


def evaluate_hypotheses(run: Run, split: str, lines: Sequence[str]) -> dict[str, MetricValue]:
  """The metrics of texts of a run's task for what somebody else says of a split, one line a row.

  Raises: UserError where there are not as many, and for a run that says no texts.
  """
  choose(split, run.system.splits, 'split')
  corpus = run.system_with('corpus').corpus(split)
  if len(lines) != len(corpus.source):
    raise UserError(f'{len(lines)} hypotheses for the {len(corpus.source)} rows of {split}; possible: one for each')
  return text_metrics(corpus, lines, run.config['evaluation'])


def run_seeds(config: Config) -> list[int]:
  """The seeds of the runs of a config."""
  return [config['training']['seed'] + i for i in range(config['seeds'])]


def seed_folder(folder: Path, seed: int) -> Path:
  """The folder of one of several runs."""
  return folder / f'seed_{seed}'


def restore_params(folder: Path, system: System, checkpoint: str) -> tuple[Any, tuple[int, ...]]:
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


def _each(given: str, what: str) -> list[str]:
  """What stands between commas."""
  parts = [part.strip() for part in given.split(',')]
  if not all(parts):
    raise UserError(f'{what} {given!r}: nothing before or behind a comma; possible: one, or several with commas')
  return parts


def write_lines(path: Path, lines: Sequence[str]) -> None:
  """One line for each row of a split, in order."""
  write_text(path, ''.join(f'{line}\n' for line in lines))


def write_text(path: Path, text: str) -> None:
  if jax.process_index() == 0:
    partial = path.with_name(f'.{path.name}.part')
    partial.write_text(text, 'utf-8')
    os.replace(partial, path)
