"""Options of training: the group `training` of a config."""

import dataclasses

from attention_jax.errors import choose
from attention_jax.specs import Count, Fraction, NonNegative, Size, check_fields

ON_NONFINITE = ('stop', 'skip')


@dataclasses.dataclass(frozen=True)
class Training:
  """Options of training; the fields of `config.training`.

  Attributes:
    steps: total number of updates. May be raised when a run is resumed.
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
      optimiser nor parameters, except annealed ones, and ends the run after 100 in a row. The checkpoint before the
      first such update is kept, for `replay`.
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
