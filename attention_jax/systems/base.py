"""What is trained: a system is a model with the data that it learns from, and says how good it is.

The table of systems is in systems.py; experiment.py trains any of them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import flax.linen as nn

from attention_jax.errors import UserError
from attention_jax.inference.metrics import MetricValue
from attention_jax.training.loop import Training
from attention_jax.training.loss import Loss

Config = Mapping[str, Any]


class BatchSequence(Protocol):
  """Training batches without end: `batches[step]`, NamedTuples of arrays whose first axis is rows; None for nothing.

  Attributes: shapes, the (rows, ...) that occur, each one compilation; shape_names, what they count.
  """

  shapes: Sequence[tuple[int, ...]]
  shape_names: str

  def __len__(self) -> int:
    """Batches in an epoch."""

  def __getitem__(self, step: int) -> Any: ...


class System(Protocol):
  """A row of systems.SYSTEMS is a class of these.

  Attributes:
    config_groups: of the config, the dataclass that says what there is in each of its groups; those within others come later.
    plot_filename: the name of the file that `plot` writes by default.
    config: the whole config of the run.
    model: a flax module.
    loss: what it minimises, a function of the batches.
    report: lines for a person, of the data.
    splits: the names of the splits of the data.
    arrays: the splits as trees of arrays, which a run that goes on must find as they were; none where nothing is read.
    implementation: what computes attention, with what 'auto' chooses.

  Some do more, which experiment.Run.system_with asks for: `predictor` (what translates lines), `predict_lines` (what is said of new
  lines, and all there is to know of it), `corpus` (the rows of a split), `plot_layers`, `ensemble` (an ensemble).
  """

  config_groups: ClassVar[Mapping[str, type]]
  plot_filename: ClassVar[str]
  config: Config
  model: nn.Module
  loss: Loss
  report: Sequence[str]
  splits: Sequence[str]
  arrays: Mapping[str, Any]
  implementation: str

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    """Raises UserError for everything that can be wrong with a config whatever its data hold."""

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    """The metrics a validation may have, and whether more of each is better."""

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'System':
    """With its data; what a run stored of them (vocabularies) is taken from its folder, where there is one."""

  @classmethod
  def open(cls, config: Config, folder: str) -> 'System':
    """As a run in this folder has it; its data are read when they are asked for."""

  def save(self, folder: str) -> None:
    """Stores what `open` needs."""

  def initializer(self) -> Callable[[int], Any]:
    """seed -> initial parameters, a function of the seed alone."""

  def batches(self, seed: int) -> BatchSequence:
    """The training batches of one run, of this process."""

  def check_data(self, log: Callable[[str], None]) -> None:
    """Raises UserError for what the data alone can tell to be wrong with the config, and says what is odd."""

  def evaluate(self, params: Any, split: str, *, beams: int | None = None) -> tuple[dict[str, MetricValue], Any]:
    """Everything that is measured on a split, and the predictions it was measured on; None: beams of the config."""

  def format_predictions(self, predictions: Any) -> list[str]:
    """Predictions of a split as lines of text, one a row."""

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes a picture of what the model attends to in some rows of a split, or in what is given instead."""


def parse_rows(rows: Sequence[str], split: str, size: int) -> list[int]:
  """Numbers of rows as a person wrote them. Raises: UserError for those that a split of this size has not."""
  if bad := [row for row in rows or [''] if not row.strip().isdecimal() or int(row) >= size]:
    raise UserError(f"row '{bad[0]}' is not in split '{split}'; possible: 0 to {size - 1}")
  return [int(row) for row in rows]
