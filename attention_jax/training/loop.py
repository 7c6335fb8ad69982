"""The training loop, and `fit`, which adds checkpoints, exact resume, logging, evaluation and early stopping."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from attention_jax.errors import UserError, choose
from attention_jax.specs import Count, Fraction, NonNegative, Size, check_fields
from attention_jax.training.ahead import CompileAhead
from attention_jax.training.anneal import apply_schedules, make_anneal
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.clock import COMPILATION, TrainingClock
from attention_jax.training.compiling import compiler_options
from attention_jax.training.frozen import check_frozen, freeze_loss
from attention_jax.training.hooks import (
  BestEvaluation,
  CheckpointSaver,
  Evaluator,
  FiniteGuard,
  Hook,
  InterruptHandler,
  MetricsLogger,
  Writer,
)
from attention_jax.training.incidents import BatchRecorder
from attention_jax.training.initializer import StateInitializer
from attention_jax.training.interrupts import StopSignals
from attention_jax.training.loss import Loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, process_share
from attention_jax.training.state import TrainState, count_parameters, init_state
from attention_jax.training.step import TrainStep, make_train_step
from attention_jax.training.writers import JsonLines, Progress, TensorBoard

ON_NONFINITE = ('stop', 'skip')


@dataclasses.dataclass(frozen=True)
class Training:
  """Options of training; the fields of `config.training`.

  Attributes:
    steps: total number of updates. May be raised when a run is resumed. On a CPU, the updates of a run of at most 50
      steps, or fewer for a model of more than a million parameters, are compiled with few optimisations
      (compiling.FEW_RUNS) and are therefore rounded differently: raising `steps` past this limit changes the numbers.
    seed: seed of all randomness of training: initial parameters, order of batches, dropout.
    optimizer: spec of a row of optim.OPTIMIZERS.
    schedule: spec of a row of optim.SCHEDULES: the learning rate by the number of the update.
    clip: bound of the gradients' global norm; 0 does not clip.
    label_smoothing: probability mass that is spread uniformly over all tokens that the model can emit, or all labels.
    accumulate: number of parts in which a batch is processed, for less memory. The update is the same, except for
      rounding and random numbers, such as those of dropout.
    average: decay of the moving average of the parameters, which evaluation and prediction then use; 0 disables it.
    objective: spec of a row of objectives.OBJECTIVES, which is minimised: 'r_drop(alpha=5.0)'.
    auxiliary: specs of rows of auxiliary.LOSSES, added to the objective: 'guided(weight=0.5) + coverage'. The loss
      that an alignment requires is added automatically.
    anneal: schedules of scalar parameters: 'temperature: linear(peak=2.0, end=0.5); beta: cosine'.
    log_every: updates between two records of metrics; 0 means only after the last update.
    evaluate_every: updates between two evaluations; 0 means only after the last update.
    checkpoint_every: updates between two checkpoints; 0 means only after the last update.
    keep: number of the regular checkpoints to keep. The best one, and one after the last update, are kept as well.
    patience: number of evaluations without improvement after which training stops; 0 never stops.
    frozen: dotted names of arrays and modules whose parameters keep their initial values: 'encoder, embedding.table'.
      Parameters of `anneal` follow their schedules nevertheless.
    select: metric of the evaluation that decides which state is best.
    on_nonfinite: effect of an update whose loss or gradient is not finite, found at the next record of metrics,
      evaluation or checkpoint: 'stop' ends the run; 'skip' counts the update, but changes neither moments of the
      optimiser nor parameters, except annealed ones, and ends the run after 100 in a row. Batches are stored for
      `replay`, of several in a row the first 5.
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
  frozen: str = ''
  log_every: Count = 100
  evaluate_every: Count = 1000
  checkpoint_every: Count = 1000
  keep: Size = 2
  patience: Count = 0
  select: str = 'loss'
  on_nonfinite: str = 'stop'

  def __post_init__(self):
    check_fields(self, 'config.training')
    choose(self.on_nonfinite, ON_NONFINITE, 'training.on_nonfinite')

  @property
  def evaluations(self) -> int:
    """Number of evaluations of a run that is not stopped before its last step."""
    return -(-self.steps // self.evaluate_every) if self.evaluate_every else 1


class FitResult(NamedTuple):
  """Result of `fit`.

  Attributes:
    state: the state after the last update.
    reason: why training stopped.
    best: the best evaluation.
    compilations: number of batch shapes of the updates that this call of `fit` made.
  """

  state: TrainState
  reason: str
  best: BestEvaluation
  compilations: int


def no_batches(start: int, stop: int) -> Iterable:
  """Returns no batches, so that no shape is compiled ahead."""
  return ()


def finished_reason(steps: int) -> str:
  """Returns the reason why a run stopped after its last update."""
  return f'all {steps} steps are done'


def train_loop(
  train_step: Callable,
  state: TrainState,
  stream: Callable[[int, int], Iterable],
  hooks: Sequence[Hook],
  start: int,
  stop: int,
) -> tuple[TrainState, str]:
  """Makes the updates `start` + 1 to `stop`, or fewer if a hook stops training.

  Args:
    train_step: (state, batch) -> (state, metrics).
    state: the state after `start` updates.
    stream: (i, j) -> the batches of updates i + 1 to j, which are the steps i to j - 1 of the data.
    hooks: called in this order after each update, see hooks.py.
    start: number of updates made before.
    stop: number of the last update.

  Returns:
    The last state, and why training stopped. A stream that ends before that is a UserError.
  """
  reason = finished_reason(stop)
  for step, batch in enumerate(stream(start, stop), start + 1):
    state, metrics = train_step(state, batch)
    last = step == stop
    for hook in hooks:
      if stop_reason := hook(step, state, metrics, last):
        reason = stop_reason
        last = True
    if last:
      return state, reason
  raise UserError(f'stream({start}, {stop}) has yielded fewer than {stop - start} batches; expected one per update')


def fit(
  folder: str | Path,
  training: Training,
  *,
  loss: Loss,
  init_params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  first_of_each_shape: Callable[[int, int], Iterable] = no_batches,
  evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
  compile_evaluation: Callable[[TrainState, Callable[[], bool]], None] | None = None,
  direction: str = 'min',
  mesh: Mesh | None = None,
  after_save: Callable[[], None] | None = None,
  shared: bool = True,
) -> FitResult:
  """Trains a model in a run folder, from its latest checkpoint if there is one.

  The same call on the same folder resumes a run that was killed at any moment, exactly: batches and random numbers are
  functions of the step. The folder may be new. `training.folder.prepare_folder`, not `fit`, stores the config.

  Args:
    folder: the run folder.
    training: options of training. The loss implements `label_smoothing`, `objective` and `auxiliary`.
    loss: the loss to minimise.
    init_params: seed -> initial parameters; called for values only if there is no checkpoint.
    stream: (start, stop) -> the batches of steps `start` to `stop` - 1, a pure function of the step.
    first_of_each_shape: (start, stop) -> the first batch of each shape among those batches, in their order. The later
      shapes are compiled ahead of their use, see ahead.CompileAhead.
    evaluate: state -> metrics by name, among them `training.select`; `training.state.evaluation_params` returns the
      parameters to evaluate. A signal stops it where it calls `training.interrupts.check_stop`; it is then called again
      when the run is resumed.
    compile_evaluation: (shapes of a state, is_stopped) -> None; compiles the programs of `evaluate` ahead of its first
      call, and returns soon after `is_stopped()` becomes true. None leaves that to the first evaluation.
    direction: 'min' if a lower value of `training.select` is better, 'max' if a higher one is.
    mesh: the mesh of the devices; by default all.
    after_save: called when a checkpoint of the latest state is on disk, see hooks.CheckpointSaver.
    shared: whether all processes use the same folder, see checkpoint.Checkpoints.

  Returns:
    The last state, why training stopped, the best evaluation, and the number of batch shapes.

  Raises:
    UserError: for an invalid option of training, if `stream` ends early, if a checkpoint cannot be read or written, and
      if the loss or the gradient is not finite (with on_nonfinite='skip': in over hooks.MAX_SKIPPED updates in a row).
  """
  mesh = mesh or make_mesh()
  train_step, initializer = prepare_training(training, loss, init_params, mesh, training.seed)
  with contextlib.ExitStack() as stack:
    checkpoints = Checkpoints(folder, training.keep, training.checkpoint_every, shared=shared)
    stack.enter_context(contextlib.closing(checkpoints))
    best = BestEvaluation()
    start = 0
    if restored := checkpoints.resume(lambda: initializer.shapes):
      state, host = restored
      best = BestEvaluation(**host['best'])
      start = int(state.step)
      reason = best.stop_reason(training.patience) or (finished_reason(start) if start >= training.steps else None)
      if reason and not host.get('awaits_evaluation'):
        return FitResult(state, reason, best, 0)

    state_shapes = initializer.shapes
    ahead = CompileAhead(
      functools.partial(train_step.compile_for, state_shapes),
      first_of_each_shape(start, training.steps),
      functools.partial(compile_evaluation, state_shapes) if compile_evaluation else None,
      None if restored else initializer,
    )
    stack.enter_context(ahead)
    awaits_evaluation = bool(restored and host.get('awaits_evaluation'))
    writers = _open_writers(Path(folder), start, training.steps, ahead.describe, stack, awaits_evaluation)
    clock = TrainingClock()
    interrupts = stack.enter_context(InterruptHandler())
    evaluator = None
    if evaluate:
      evaluate = ahead.wrap_evaluation(evaluate)
      evaluator = make_evaluator(
        training,
        evaluate,
        direction,
        checkpoints=checkpoints,
        writers=writers,
        clock=clock,
        best=best,
        signals=interrupts,
      )

    def best_so_far() -> BestEvaluation:
      return evaluator.best if evaluator else best

    def host_values() -> dict[str, Any]:
      return {'best': best_so_far()._asdict(), 'awaits_evaluation': bool(evaluator and evaluator.is_interrupted)}

    # The order makes resuming exact. Records are written before the checkpoint that covers them, and an evaluation
    # precedes the checkpoint that stores its result. An interruption follows both, so that it neither logs nor
    # evaluates where an uninterrupted run would not; the updates before it are checked, as they are not repeated. An
    # evaluation that it stops is made when the run is resumed, before the next update.
    recorder = BatchRecorder(folder, stream, process_share(mesh)[0])
    guard = make_guard(training, evaluate, checkpoints, recorder, [writers[1:]])
    hooks = [
      guard,
      MetricsLogger(training.log_every, writers, clock, train_step.compilations),
      *([evaluator] if evaluator else []),
      interrupts,
      guard.check_rest,
      CheckpointSaver(training.checkpoint_every, checkpoints, clock, host_values, after_save=after_save),
    ]

    def compile_and_step(state, batch):
      with clock.paused(COMPILATION):
        ahead.prepare(batch)
      return train_step(state, batch)

    if not restored:
      with clock.paused(COMPILATION):
        state = ahead.first_state()
    reason = finished_reason(start) if start >= training.steps else None
    if awaits_evaluation and evaluator:
      # Due, even if it followed the last step and `steps` was raised.
      reason = evaluator(start, state, {}, True) or reason
    if not reason:
      state, reason = train_loop(compile_and_step, state, clock.timed_stream(stream), hooks, start, training.steps)
    if jax.process_index() == 0:
      print(clock.describe())
    return FitResult(state, interrupts.after_training() or reason, best_so_far(), train_step.compilations())


def prepare_training(
  training: Training, loss: Loss, init_params: Callable[[int], Any], mesh: Mesh, seed: int | Sequence[int]
) -> tuple[TrainStep, StateInitializer]:
  """Builds the training step and the initialiser of the state.

  Args:
    training: options of training.
    loss: the loss to minimise.
    init_params: seed -> initial parameters.
    mesh: the mesh of the devices.
    seed: the seed of one run, or the seeds of several side by side, see step.make_train_step.

  Returns:
    The training step, and the initialiser of the state.
  """
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip, training.frozen)
  shapes = jax.eval_shape(lambda: init_params(training.seed))
  check_frozen(training.frozen, shapes)
  anneal = make_anneal(training.anneal, shapes, training.steps)
  train_step = make_train_step(
    freeze_loss(loss, training.frozen),
    optimizer,
    schedule,
    mesh,
    seed=seed,
    accumulate=training.accumulate,
    average_decay=training.average,
    anneal=anneal,
    options=compiler_options(training.steps, count_parameters(shapes), mesh.devices.flat[0].platform),
    skip_nonfinite=training.on_nonfinite == 'skip',
  )

  def init(run_params: Any) -> TrainState:
    return init_state(apply_schedules(run_params, anneal, 1), optimizer, training.average, loss.running)

  return train_step, StateInitializer(init_params, init, mesh, seed)


def make_evaluator(
  training: Training,
  evaluate: Callable[[TrainState], Mapping[str, Any]],
  direction: str,
  *,
  checkpoints: Checkpoints,
  writers: Sequence[Writer],
  clock: TrainingClock,
  best: BestEvaluation,
  signals: StopSignals,
) -> Evaluator:
  """Builds the evaluation hook of a run from the options of training; see hooks.Evaluator for the arguments."""
  return Evaluator(
    training.evaluate_every,
    evaluate,
    select=training.select,
    direction=direction,
    patience=training.patience,
    checkpoints=checkpoints,
    writers=writers,
    clock=clock,
    best=best,
    signals=signals,
  )


def make_guard(
  training: Training,
  evaluate: Callable | None,
  checkpoints: Checkpoints,
  recorder: BatchRecorder,
  file_writers: Sequence[Sequence[Writer]],
  seeds: Sequence[int] = (),
) -> FiniteGuard:
  """Builds the hook that checks losses and gradients, whenever another hook is due; see hooks.FiniteGuard.

  Args:
    training: the options of training.
    evaluate: the function that evaluates a state; None if the run is not evaluated.
    checkpoints, recorder, file_writers, seeds: as in hooks.FiniteGuard.
  """
  intervals = (training.log_every, training.evaluate_every if evaluate else 0, training.checkpoint_every)
  skips = training.on_nonfinite == 'skip'
  return FiniteGuard(intervals, checkpoints, seeds, recorder=recorder, file_writers=file_writers, skips=skips)


def _open_writers(
  folder: Path,
  start: int,
  stop: int,
  activity: Callable[[], str],
  stack: contextlib.ExitStack,
  awaits_evaluation: bool,
) -> list[Writer]:
  """The writers of a run, that of progress first, which `stack` closes; only the first process writes."""
  if jax.process_index() > 0:
    return []
  writers = [
    Progress(start, stop, activity),
    JsonLines(folder, start, awaits_evaluation),
    TensorBoard(folder, start),
  ]
  return [stack.enter_context(contextlib.closing(writer)) for writer in writers]
