"""The training loop, and `fit`, which puts a whole run together: resumable, logged, evaluated, stopped in time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attention_jax.specs import Count, Fraction, NonNegative, Size, check_fields
from attention_jax.training.anneal import apply_schedules, make_anneal
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.hooks import (
  BestEvaluation,
  CheckpointSaver,
  Evaluator,
  FiniteGuard,
  Hook,
  InterruptHandler,
  MetricsLogger,
  TrainingClock,
  Writer,
)
from attention_jax.training.loss import Loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, sharding
from attention_jax.training.state import TrainState, init_state
from attention_jax.training.step import TrainStep, make_train_step
from attention_jax.training.writers import JsonLines, Progress, TensorBoard


@dataclasses.dataclass(frozen=True)
class Training:
  """How to train; the fields of `config.training`.

  Attributes:
    steps: updates in all. May be raised when a run is resumed.
    seed: of everything random: initial parameters, order of batches, dropout.
    optimizer, schedule: specs, see the tables in optim.py. Schedules count updates.
    clip: bound of the gradients' global norm; 0 leaves them as they are.
    label_smoothing: mass given to all words alike.
    accumulate: parts in which a batch is worked through, for less memory; the update stays the same
      but for what dropout draws.
    average: decay of the moving average of the parameters, which is then what is evaluated; 0 keeps none.
    objective: what is minimised, a spec of objectives.OBJECTIVES: 'r_drop(alpha=5.0)'.
    auxiliary: losses beside the cross entropy, specs of auxiliary.LOSSES: 'guided(weight=0.5) + coverage'. The one that
      the alignment learns nothing without is added by itself.
    anneal: schedules of parameters that are one number: 'temperature: linear(peak=2.0, end=0.5); beta: cosine'.
    log_every, evaluate_every, checkpoint_every: in updates; 0 means only after the last.
    keep: how many of the checkpoints of checkpoint_every stay (the best one, and one after the last update, stay beside
      them).
    patience: evaluations without improvement after which to stop; 0 never does.
    select: the metric of the evaluation that decides what is best.
  """

  steps: Size = 10_000
  seed: int = 0
  optimizer: str = 'adam'
  schedule: str = 'constant(rate=1e-3)'
  clip: NonNegative = 1.0
  label_smoothing: Fraction = 0.0
  accumulate: Size = 1
  average: Fraction = 0.0
  objective: str = 'likelihood'
  auxiliary: str = ''
  anneal: str = ''
  log_every: Count = 100
  evaluate_every: Count = 1000
  checkpoint_every: Count = 1000
  keep: Size = 2
  patience: Count = 0
  select: str = 'loss'

  def __post_init__(self):
    check_fields(self, 'config.training')


class FitResult(NamedTuple):
  """The state after the last update, why training stopped, the best evaluation, and how many shapes were compiled."""

  state: TrainState
  reason: str
  best: BestEvaluation
  compilations: int


def train_loop(
  train_step: Callable,
  state: TrainState,
  stream: Callable[[int, int], Iterable],
  hooks: Sequence[Hook],
  start: int,
  stop: int,
) -> tuple[TrainState, str]:
  """Makes the updates `start` + 1 to `stop`; returns the last state and why it stopped.

  stream(i, j) gives the batches of the updates i + 1 to j, which are the steps i to j - 1 of the data.
  """
  reason = f'all {stop} steps are done'
  if start >= stop:
    return state, reason
  for step, batch in enumerate(stream(start, stop), start + 1):
    state, metrics = train_step(state, batch)
    last = step == stop
    for hook in hooks:
      if found := hook(step, state, metrics, last):
        reason, last = found, True
    if last:
      break
  return state, reason


def fit(
  folder: str | Path,
  training: Training,
  *,
  loss: Loss,
  params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
  direction: str = 'min',
  mesh: Mesh | None = None,
) -> FitResult:
  """Trains in `folder` (see folder.prepare_folder), from its last checkpoint where there is one.

  The same call on the same folder resumes a run that was killed at any moment, exactly: the state is a function of its
  step, as the batches and all randomness are.

  Args:
    loss: see losses.py. params: seed -> the initial parameters, made only where there is no checkpoint.
    stream: (start, stop) -> the batches of those steps, a pure function of the step.
    evaluate: state -> metrics by name, among them `training.select`; see state.evaluation_params.
    direction: 'min' or 'max', whichever is the better end of `training.select`.
    mesh: by default all devices.
  Raises: UserError when the loss is no longer finite or a checkpoint cannot be used.
  """
  mesh = mesh or make_mesh()
  train_step, first = prepare_training(training, loss, params, mesh, training.seed)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, training.keep, training.checkpoint_every)))
    best = BestEvaluation()
    if checkpoints.latest() is None:
      state = first()
    else:
      state, host = checkpoints.restore(first.shapes())
      best = BestEvaluation(**host['best'])
    start = int(state.step)
    if reason := best.stop_reason(training.patience) or (start >= training.steps and f'all {start} steps are done'):
      return FitResult(state, reason, best, 0)
    writers = _writers(Path(folder), start, training.steps, stack)
    hooks, best = _hooks(training, checkpoints, writers, train_step, evaluate, direction, best, stack)
    state, reason = train_loop(train_step, state, stream, hooks, start, training.steps)
    return FitResult(state, reason, best(), train_step.compilations())


class InitialState:
  """The state before the first update, or those of several runs: called, it is made where training wants it.

  No device ever has it twice, and the values of parameters are not kept anywhere else.
  """

  def __init__(
    self, params: Callable[[int], Any], init: Callable[[Any], TrainState], mesh: Mesh, seed: int | Sequence[int]
  ):
    self._several = not isinstance(seed, int)
    self._params, self._seeds = params, seed if self._several else [seed]
    self._place = sharding(mesh, 'states' if self._several else 'state')
    self._init = init

  def __call__(self) -> TrainState:
    # Arrays of the host are the same in every process, wherever their copies go.
    own = [jax.device_get(self._params(seed)) for seed in self._seeds]
    return jax.jit(self._of, out_shardings=self._place)(own)

  def shapes(self) -> TrainState:
    """The same without values: what a checkpoint must hold."""
    like = jax.eval_shape(lambda: self._of([self._params(seed) for seed in self._seeds]))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), like)

  def _of(self, params: Sequence[Any]) -> TrainState:
    if not self._several:
      return self._init(params[0])
    return jax.vmap(self._init)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params))


def prepare_training(
  training: Training, loss: Loss, params: Callable[[int], Any], mesh: Mesh, seed: int | Sequence[int]
) -> tuple[TrainStep, InitialState]:
  """The update, and the state before the first one. `params`: seed -> initial parameters; `seed` as in step.py."""
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  shapes = jax.eval_shape(lambda: params(training.seed))
  anneal = make_anneal(training.anneal, shapes, training.steps)
  train_step = make_train_step(
    loss, optimizer, schedule, mesh, seed=seed, accumulate=training.accumulate, average=training.average, anneal=anneal
  )
  init = lambda own: init_state(apply_schedules(own, anneal, 1), optimizer, training.average, loss.running)
  return train_step, InitialState(params, init, mesh, seed)


def _writers(folder: Path, start: int, stop: int, stack: contextlib.ExitStack) -> list[Writer]:
  if jax.process_index() > 0:
    return []  # one process writes
  writers = [Progress(start, stop), JsonLines(folder), TensorBoard(folder, start)]
  return [stack.enter_context(contextlib.closing(writer)) for writer in writers]


def _hooks(
  training: Training,
  checkpoints: Checkpoints,
  writers: Sequence[Writer],
  train_step: TrainStep,
  evaluate: Callable | None,
  direction: str,
  best: BestEvaluation,
  stack: contextlib.ExitStack,
) -> tuple[list[Hook], Callable[[], BestEvaluation]]:
  """The hooks in the order that makes resuming exact, and how to ask for the best evaluation so far.

  Lines are written before the checkpoint that covers them; an evaluation comes before the checkpoint that remembers it;
  an interruption comes after both, so that it neither evaluates nor logs where an uninterrupted run would not.
  """
  t, clock = training, TrainingClock()
  cadences = (t.log_every, t.evaluate_every if evaluate else 0, t.checkpoint_every)
  hooks = [FiniteGuard(cadences, checkpoints), MetricsLogger(t.log_every, writers, clock, train_step.compilations)]
  current = lambda: best
  if evaluate:
    evaluation = Evaluator(
      t.evaluate_every,
      evaluate,
      select=t.select,
      direction=direction,
      patience=t.patience,
      checkpoints=checkpoints,
      writers=writers,
      clock=clock,
      best=best,
    )
    hooks.append(evaluation)
    current = lambda: evaluation.best
  hooks.append(stack.enter_context(InterruptHandler()))
  hooks.append(CheckpointSaver(t.checkpoint_every, checkpoints, clock, lambda: {'best': current()._asdict()}))
  return hooks, current
