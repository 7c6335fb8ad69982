"""Base class of systems. A system bundles a model with its data, loss and metrics.

registry.py holds the table of systems. experiment.py trains any of them, and runs.py opens a trained one. An
ability of only some systems is a Protocol (SupportsTranslation, ...); `runs.Run.system_with` checks for it.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from attention_jax.data.batching import Batch, Share
from attention_jax.data.preparing import Preparation
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.metrics import MetricValue
from attention_jax.decoding.predictor import Predictor
from attention_jax.errors import UserError
from attention_jax.kernels import auto
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.modules.attention import Attention
from attention_jax.systems.config import RunConfig
from attention_jax.training.anneal import make_anneal
from attention_jax.training.compiling import jit_once
from attention_jax.training.config import Training
from attention_jax.training.frozen import check_frozen
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh, place_parameters, process_share, row_devices, shards_parameters
from attention_jax.training.step import step_rngs
from attention_jax.training.watch import Watch, unwatched

Log = Callable[[str], None]
LinePrediction = tuple[str, dict[str, Any]]  # one line of output, and the same with scores and weights for JSON
FIRST_ROWS = 4  # rows of a split that a plot shows by default


class BatchSequence(Protocol):
  """Endless sequence of training batches: `batches[step]` is a NamedTuple of arrays with rows on the first axis.

  Attributes:
    shapes: every shape (rows, *lengths) that occurs; each is one compilation.
    shape_names: names of the axes of a shape.
    min_row_positions: lengths of a shape -> a lower bound of the number of positions (tokens, pixels or steps) of a
      row, from which `systems.size_checks` estimates the size of a batch.
  """

  shapes: Sequence[tuple[int, ...]]
  shape_names: str
  min_row_positions: Callable[[Sequence[int]], int]

  def __len__(self) -> int:
    """Returns the number of batches in an epoch."""

  def shape(self, step: int) -> tuple[int, ...]:
    """Returns the shape of the batch of a step, without making it."""

  def __getitem__(self, step: int) -> Any: ...


class System(abc.ABC):
  """A model with its data, loss and metrics. Each row of registry.SYSTEMS is a subclass.

  Attributes:
    config_groups: the dataclasses of the groups `data`, `model` and `evaluation` of the config.
    plot_filename: default file name of `plot`.
    extra_plot_suffixes: suffixes of the files that `plot` writes beside that file.
    extra_metrics: names of the metrics that `evaluate` may return in addition to `selectable_metrics`.
    mechanisms: tables of modules that only this system has, by the field of the config that names a row.
    config: the whole config of the run.
    model: the flax module.
  """

  config_groups: ClassVar[Mapping[str, type]]
  plot_filename: ClassVar[str]
  extra_plot_suffixes: ClassVar[Sequence[str]] = ()
  extra_metrics: ClassVar[Sequence[str]] = ()
  mechanisms: ClassVar[Mapping[str, Mapping[str, type]]] = {}
  config: RunConfig
  model: nn.Module

  @classmethod
  @abc.abstractmethod
  def check(cls, config: RunConfig) -> None:
    """Raises UserError for mistakes in a config that can be found without its data."""

  @classmethod
  @abc.abstractmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    """Returns name -> whether a higher value is better, of the validation metrics that training.select may name."""

  @classmethod
  @abc.abstractmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'System':
    """Returns the system with its data, for training. Writes nothing into `folder`.

    Args:
      config: the whole config of the run.
      folder: a run folder whose stored vocabularies and labels are used where they exist; None for a new run.
    """

  @classmethod
  @abc.abstractmethod
  def open(cls, config: RunConfig, folder: str) -> 'System':
    """Returns the system of the run in `folder`. Data are read on first use.

    Args:
      config: the whole config of the run.
      folder: the run folder.

    Raises:
      UserError: if a file that `save` writes is missing or cannot be read.
    """

  @abc.abstractmethod
  def with_config(self, config: RunConfig) -> 'System':
    """Returns the system of another config with the same group `data`, without reading the data again."""

  @classmethod
  def preparation(cls, config: RunConfig) -> Preparation:
    """Returns the data of a config as a data set to write to disk, see data.preparing.

    Raises:
      UserError: if the system has no such data, and for mistakes in the config or the data.
    """
    raise UserError(f'only pairs, documents and captions can be prepared, got a config of system {config.system!r}')

  @property
  @abc.abstractmethod
  def loss(self) -> Loss:
    """The training loss, a function of batches."""

  @property
  @abc.abstractmethod
  def report(self) -> Sequence[str]:
    """Lines that describe the data, for the log."""

  @property
  @abc.abstractmethod
  def splits(self) -> Sequence[str]:
    """Names of the splits of the data."""

  @property
  @abc.abstractmethod
  def implementation(self) -> str:
    """Description of how attention is computed: the kernel, with the choices of 'auto', or the kind of attention."""

  @property
  def arrays(self) -> Mapping[str, Any]:
    """The splits as trees of arrays, which must be unchanged when a run resumes.

    It is empty if the training split is generated anew for each batch.
    """
    return {}

  @abc.abstractmethod
  def initializer(self) -> Callable[[int], Any]:
    """Returns seed -> initial parameters, which depend on the seed alone."""

  @abc.abstractmethod
  def batches(self, seed: int, share: Share | None = None) -> BatchSequence:
    """Returns the training batches of one run.

    Args:
      seed: the seed of the run.
      share: the rows of each batch; by default those of this process.
    """

  @abc.abstractmethod
  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], Any]:
    """Evaluates parameters on a split.

    Args:
      params: the parameters of `model`.
      split: one of `splits`.
      beams: beam size; None for config.evaluation.beams. Ignored by systems that do not search.
      watch: called before each batch.

    Returns:
      Every metric, and the predictions that were measured, one per row.

    Raises:
      UserError: for an unknown split, and for a training split whose examples are generated anew for each batch.
    """

  @abc.abstractmethod
  def format_predictions(self, predictions: Any) -> list[str]:
    """Returns the predictions of a split as text, one line per row."""

  @abc.abstractmethod
  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes a plot of the attention weights.

    Args:
      params: the parameters of `model`.
      path: the file to write.
      split, rows: rows of a split, see `parse_rows`.
      inputs: new inputs to plot instead, unless empty.

    Raises:
      UserError: for an unknown split, a row that is not in it, and inputs that the system cannot read.
    """

  def save(self, folder: str) -> list[str]:
    """Writes the files that `open` needs besides the config, and returns their names.

    In a multi-process run, only process 0 calls it for the run folder.
    """
    return []

  def check_data(self, log: Log) -> None:  # noqa: B027 - optional
    """Raises UserError for mistakes in the config that only the data reveal; logs what is unusual."""

  @functools.cached_property
  def mesh(self) -> Mesh:
    """Mesh of evaluations: this process's devices, as every process computes its batches by itself.

    If `config.mesh` shards the parameters of a single run, it is that of training: one process may not hold them.
    """
    is_sharded = self.config.seeds == 1 and shards_parameters(self.training_mesh)
    return self.training_mesh if is_sharded else make_mesh(jax.local_devices())

  @functools.cached_property
  def training_mesh(self) -> Mesh:
    """Mesh of all devices of all processes."""
    return make_mesh(seeds=self.config.seeds, sizes=self.config.mesh)

  @property
  def share(self) -> Share:
    """The rows of training batches that this process reads.

    Filler rows pad each batch to a multiple of the number of its shards times config.training.accumulate.
    """
    index, count = process_share(self.training_mesh)
    return Share(index, count, row_devices(self.training_mesh) * self.config.training.accumulate)

  @property
  def evaluation_rows(self) -> int:
    """Rows of an evaluation batch: config.evaluation.batch_size, rounded up to a multiple of the number of devices."""
    devices = self.mesh.devices.size
    return -(-self.config.evaluation.batch_size // devices) * devices

  def place_params(self, params: Any) -> Any:
    """Returns parameters as evaluations on `mesh` need them."""
    return place_parameters(params, self.mesh)


@runtime_checkable
class SupportsTranslation(Protocol):
  """A system that translates lines of text."""

  def predictor(self, params: Any) -> Predictor:
    """Returns the function that translates lines with these parameters."""


@runtime_checkable
class SupportsLinePrediction(Protocol):
  """A system that predicts one label or caption for each line of an input file."""

  def predict_lines(self, params: Any, lines: Sequence[str], name: str, first: int = 1) -> list[LinePrediction]:
    """Predicts an output for each line.

    Args:
      params: the parameters of the model.
      lines: the input, such as texts or file names of images.
      name: name of the input, for error messages.
      first: number of the first line, for error messages.
    """


@runtime_checkable
class SupportsCorpus(Protocol):
  """A system whose references are texts."""

  def corpus(self, split: str) -> Corpus:
    """Returns the sources and references of a split."""


@runtime_checkable
class SupportsWordVectors(Protocol):
  """A system whose embeddings can start from word vectors."""

  def embedding_tables(self) -> Mapping[str, Vocabulary]:
    """Returns the vocabulary of each embedding table by name in `model`, source first; a model may lack some tables."""


@runtime_checkable
class SupportsEnsembles(Protocol):
  """A system of which several runs can predict together."""

  def ensemble(self, others: Sequence[Any]) -> System:
    """Returns the ensemble of this system and others; its parameters are a tuple with those of each."""


def parse_rows(rows: Sequence[str], split: str, size: int) -> list[int]:
  """Returns row numbers that were written as text.

  Args:
    rows: numbers from 0 as text; if there are none, the first FIRST_ROWS.
    split: name of the split, for the error message.
    size: number of rows of the split.

  Raises:
    UserError: for anything but a row number of a split of this size.
  """
  if not rows:
    return list(range(min(FIRST_ROWS, size)))
  if invalid := [row for row in rows if not row.strip().isdecimal() or int(row) >= size]:
    raise UserError(f"row '{invalid[0]}' is not in split '{split}'; expected 0 to {size - 1}")
  return [int(row) for row in rows]


def check_setting(training: Training, field: str, expected: Any, system: str) -> None:
  """Checks a field of config.training of which a system supports one value only.

  Args:
    training: the options of training.
    field: name of the field.
    expected: the supported value.
    system: name of the system, for the error message.

  Raises:
    UserError: for any other value.
  """
  value = getattr(training, field)
  if value != expected:
    raise UserError(f'training.{field} must be {expected!r} for system {system!r}, got {value!r}')


def check_parameter_options(training: Training, params: Any) -> None:
  """Raises UserError if training.anneal or training.frozen does not suit the parameters of a model.

  Args:
    training: the options of training.
    params: parameters of the model, or their shapes.
  """
  make_anneal(training.anneal, params, training.steps)
  check_frozen(training.frozen, params)


def trace_loss(loss: Loss, params: Any, batch: Any, *, deterministic: bool = False) -> None:
  """Traces a loss at the shapes of a batch, without computing it, to raise what training would raise.

  Args:
    loss: the loss.
    params: parameters of the model, or their shapes.
    batch: a batch of training, or its shapes.
    deterministic: whether the loss gets no rngs, as in evaluation.
  """
  rngs = None if deterministic else step_rngs(jax.random.key(0))
  jax.eval_shape(loss, params, batch, rngs, dict.fromkeys(loss.running, 0.0))


def describe_implementation(attention: Attention, auto_choice: str = '') -> str:
  """Returns the name of the implementation of an attention module, with what 'auto' chooses.

  Args:
    attention: the module.
    auto_choice: what 'auto' chooses; by default what it chooses when all queries are computed at once.
  """
  if attention.implementation != 'auto':
    return attention.implementation
  choice = auto_choice or auto.describe_choice(attention.resolved_score, attention.resolved_alignment)
  return f'{attention.implementation} ({choice})'


def describe_decoder_implementation(decoder: Any) -> str:
  """Returns the name of the implementation of a decoder's attention; in a recurrence 'auto' computes single queries."""
  in_recurrence = decoder.traits.attends_in_recurrence
  return describe_implementation(decoder.attention, 'xla, one query at a time' if in_recurrence else '')


def initializer_for_batch(model: EncoderDecoder, batch: Batch) -> Callable[[int], Any]:
  """Returns seed -> initial parameters of a model for batches like this one, compiled once for all seeds."""

  @jit_once
  def init(rng: jax.Array) -> Any:
    source, source_mask, target = map(jnp.asarray, (batch.source, batch.source_mask, batch.target))
    return model.init(rng, source, source_mask, target)['params']

  return lambda seed: init(jax.random.key(seed))
