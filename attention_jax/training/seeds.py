"""Runs that differ in their seed alone, trained side by side: one compiled update makes a step of each.

Each has a folder of its own with what a run alone would leave there. What is needed to go on exactly, the states of all
in one, is kept in the folder above: there is one moment of which all of them are known.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.hooks import (
  BestEvaluation,
  CheckpointSaver,
  Evaluator,
  FiniteGuard,
  InterruptHandler,
  MetricsLogger,
  TrainingClock,
  Writer,
  is_due,
)
from attention_jax.training.loop import Training, prepare_training, train_loop
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh, sharding
from attention_jax.training.state import TrainState
from attention_jax.training.writers import JsonLines, Progress, TensorBoard


class SeedResults(NamedTuple):
  """The step that was reached, why each run stopped, and how many shapes were compiled."""

  step: int
  reasons: list[str]
  compilations: int


class SeedRuns:
  """What the runs have each for itself: checkpoints, writers, the best evaluation, and why one has stopped.

  Args:
    folders, seeds: one of each per run.
    best: how the evaluations went so far. stopped: why runs have stopped, by their number. start: the step that all go
      on from.
    pick: (states, i) -> the state of run i.
    evaluate: a hook made for each run from (its checkpoints, its writers, its best), or None.
  """

  def __init__(
    self,
    folders: Sequence[Path],
    seeds: Sequence[int],
    training: Training,
    best: Sequence[BestEvaluation],
    stopped: Mapping[int, str],
    start: int,
    pick: Callable[[TrainState, int], TrainState],
    evaluate: Callable[..., Evaluator] | None,
    stack: contextlib.ExitStack,
  ):
    close = lambda thing: stack.enter_context(contextlib.closing(thing))
    self._seeds, self._training, self._pick, self._best = seeds, training, pick, list(best)
    kept = (training.keep, training.checkpoint_every)
    self._checkpoints = [close(Checkpoints(folder, *kept)) for folder in folders]
    self._writers = [[close(JsonLines(folder)), close(TensorBoard(folder, start))] for folder in folders]
    self._progress = close(Progress(start, training.steps))
    self.stopped = dict(stopped)
    self._evaluations = (
      [
        evaluate(checkpoints=checkpoints, writers=[*writers, self._named(seed)], best=one)
        for checkpoints, writers, seed, one in zip(self._checkpoints, self._writers, seeds, best, strict=True)
      ]
      if evaluate
      else []
    )

  @property
  def best(self) -> list[BestEvaluation]:
    """How the evaluations of each went."""
    return [one.best for one in self._evaluations] or self._best

  def write(self, step: int, record: Mapping[str, Any]) -> None:
    """A writer: a line for a person with the means of those that go on, and the record of each to its own writers."""
    own = lambda of: {name: of(value) if isinstance(value, list) else value for name, value in record.items()}
    self._progress(step, own(lambda value: float(np.mean(value, where=self.live))))
    for i in np.flatnonzero(self.live):
      for write in self._writers[i]:
        write(step, own(lambda value, i=i: value[i]))

  @property
  def live(self) -> np.ndarray:
    """Which runs go on, [seeds] bool."""
    return np.array([i not in self.stopped for i in range(len(self._seeds))])

  def __call__(self, step: int, states: TrainState, metrics: Mapping[str, jax.Array], last: bool) -> str | None:
    """A hook: evaluates each run that goes on, and saves its states."""
    evaluated = is_due(step, self._training.evaluate_every if self._evaluations else 0, last)
    saved = is_due(step, self._training.checkpoint_every, last)
    for i in np.flatnonzero(self.live) if evaluated or saved else ():
      state = self._pick(states, i)
      reason = self._evaluations[i](step, state, metrics, last) if self._evaluations else None
      if reason:
        self.stopped[int(i)] = reason
      if reason or saved:
        self._checkpoints[i].save(state, {'best': self.best[i]._asdict()})
    return 'every run has stopped' if len(self.stopped) == len(self._seeds) else None

  def remember(self) -> dict[str, Any]:
    """What is kept beside the states."""
    return {'best': [best._asdict() for best in self.best], 'stopped': self.stopped}

  def _named(self, seed: int) -> Writer:
    return lambda step, record: self._progress(step, {'seed': seed, **record})


def fit_seeds(
  folder: str | Path,
  folders: Sequence[Path],
  training: Training,
  *,
  loss: Loss,
  params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
  direction: str = 'min',
  mesh: Mesh | None = None,
) -> SeedResults:
  """`loop.fit` for the seeds training.seed, training.seed + 1, ..., as many as there are `folders`, all at once.

  A run that stops early stays as it is, also where training.patience is raised later.

  Args:
    folder: of them all. folders: of each run; see folder.prepare_folder.
    params: seed -> initial parameters, made only where there is no checkpoint.
    stream: (start, stop) -> batches with a first axis of runs; see batching.StackedBatches.
    evaluate: as for fit, of one run at a time.
  Raises: UserError when a loss is no longer finite, naming the seed, or a checkpoint cannot be used.
  """
  seeds = [training.seed + i for i in range(len(folders))]
  mesh = mesh or make_mesh(seeds=len(seeds))
  train_step, first = prepare_training(training, loss, params, mesh, seeds)
  # A run that is looked at alone is on every device, as one that is trained alone.
  pick = jax.jit(lambda states, i: jax.tree.map(lambda x: x[i], states), out_shardings=sharding(mesh, 'state'))
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, training.keep, training.checkpoint_every)))
    best, stopped = [BestEvaluation()] * len(seeds), {}
    if checkpoints.latest() is None:
      states = first()
    else:
      states, host = checkpoints.restore(first.shapes())
      best, stopped = (
        [BestEvaluation(**one) for one in host['best']],
        {int(i): why for i, why in host['stopped'].items()},
      )
    start, clock = int(states.step[0]), TrainingClock()
    over = f'all {training.steps} steps are done'
    if len(stopped) == len(seeds) or start >= training.steps:
      return SeedResults(start, [stopped.get(i, over) for i in range(len(seeds))], 0)

    def make(**own):
      return Evaluator(
        training.evaluate_every,
        evaluate,
        select=training.select,
        direction=direction,
        patience=training.patience,
        clock=clock,
        **own,
      )

    runs = SeedRuns(folders, seeds, training, best, stopped, start, pick, make if evaluate else None, stack)
    cadences = (training.log_every, training.evaluate_every if evaluate else 0, training.checkpoint_every)
    hooks = [
      FiniteGuard(cadences, checkpoints, seeds),
      MetricsLogger(training.log_every, [runs.write], clock, train_step.compilations),
      runs,
      stack.enter_context(InterruptHandler()),
      CheckpointSaver(training.checkpoint_every, checkpoints, clock, runs.remember),
    ]
    states, reason = train_loop(
      lambda *given: train_step(*given, runs.live), states, stream, hooks, start, training.steps
    )
    ends = [runs.stopped.get(i, reason) for i in range(len(seeds))]
    return SeedResults(int(states.step[0]), ends, train_step.compilations())
