"""From a sequence of vectors of bits to its answer: the system of networks with a memory of their own."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import memory_tapes
from attention_jax.data.recall import (
  NUM_EPISODES,
  RecallBatch,
  RecallBatches,
  RecallTask,
  eval_episodes,
  eval_recall_batches,
  make_recall_task,
)
from attention_jax.data.text import format_count
from attention_jax.errors import UserError, choose
from attention_jax.inference.metrics import MetricValue
from attention_jax.models.turing import RecallConfig, Recaller, build_recaller
from attention_jax.specs import Size, check_fields
from attention_jax.systems.base import Config, parse_rows
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh, replicate, shard_batch
from attention_jax.training.step import step_rngs

SELECTABLE_METRICS = {'loss': False, 'cost': False, 'error': False, 'exact_match': True}


@dataclasses.dataclass(frozen=True)
class RecallData:
  """The fields of `config.data`: a spec of data.recall.RECALL, and episodes of a batch."""

  task: str = 'copy'
  batch_size: Size = 32

  def __post_init__(self):
    check_fields(self, 'config.data')


@dataclasses.dataclass(frozen=True)
class RecallEvaluation:
  """The fields of `config.evaluation`: episodes at once."""

  batch_size: Size = 64

  def __post_init__(self):
    check_fields(self, 'config.evaluation')


class RecallPrediction(NamedTuple):
  """What is said of an episode.

  Attributes:
    probabilities: [A, O], of each bit of the answer.
    read, write: weights [T, R, N] and [T, W, N] in all steps.
  """

  probabilities: np.ndarray
  read: np.ndarray
  write: np.ndarray

  @property
  def bits(self) -> np.ndarray:
    return self.probabilities > 0.5


class RecallSystem:
  """Any cell on any task of remembering. Episodes are generated; there is nothing to download."""

  config_groups: Mapping[str, type] = {'data': RecallData, 'model': RecallConfig, 'evaluation': RecallEvaluation}
  plot_filename = 'memory.png'

  def __init__(self, config: Config):
    self.config, self.task = config, make_recall_task(config['data']['task'])
    self.model = build_recaller(config['model'], self.task.output_features)
    self.splits = ['train', *NUM_EPISODES]

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'RecallSystem':
    return cls(config)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'RecallSystem':
    return cls(config)

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    RecallData(**config['data'])
    RecallEvaluation(**config['evaluation'])
    for name, possible in (('objective', 'likelihood'), ('auxiliary', '')):
      if getattr(training, name) != possible:
        raise UserError(f'training.{name} is {getattr(training, name)!r}; possible for recall: {possible!r}')
    if training.label_smoothing:
      raise UserError('training.label_smoothing smooths words; possible for bits: 0.0')
    system = cls(config)
    params = jax.eval_shape(lambda: system.initializer()(0))
    make_anneal(training.anneal, params, training.steps)
    jax.eval_shape(system.loss, params, _smallest(system.task), step_rngs(jax.random.key(0)), {})

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def loss(self) -> Loss:
    return Loss(lambda params, batch, rngs, running, update: _sums(self.model, params, batch)[0])

  @property
  def report(self) -> list[str]:
    longest = lambda split: max(len(e.inputs) + len(e.target) for e in eval_episodes(self.task, split))
    return [
      'train: new episodes in every batch',
      *(
        f'{split}: {format_count(rows, "episode")} of up to {longest(split)} steps'
        for split, rows in NUM_EPISODES.items()
      ),
    ]

  @property
  def arrays(self) -> Mapping[str, Any]:
    return {}

  @property
  def implementation(self) -> str:
    heads = f'{self.config["model"]["score"]} and {self.config["model"]["alignment"]}, step by step'
    return heads if self.model.cell.attends else 'nothing is attended to'

  def save(self, folder: str) -> None:
    """Nothing but the config is needed to open a run."""

  def initializer(self) -> Callable[[int], Any]:
    inputs = jnp.asarray(_smallest(self.task).inputs)
    return jax.jit(lambda seed: self.model.init(jax.random.key(seed), inputs)['params'])

  def batches(self, seed: int) -> RecallBatches:
    size = self.config['data']['batch_size']
    return RecallBatches(self.task, size, seed, jax.process_index(), jax.process_count())

  def check_data(self, log: Callable[[str], None]) -> None:
    """Nothing is left that the task has not told."""

  def evaluate(self, params: Any, split: str, *, beams: int | None = None):
    given = eval_episodes(self.task, choose(split, NUM_EPISODES, 'split'))
    said, sums = self._say(params, eval_recall_batches(self.task, split, self._rows), len(given))
    wrong = [(recollection.bits != episode.target) for recollection, episode in zip(said, given, strict=True)]
    how = f'episodes:{len(given)}'
    of_bits = lambda value, unit: MetricValue(value, unit, f'bits:{int(sums["tokens"])}|{how}')
    return {
      'loss': of_bits(sums['loss'] / sums['tokens'], 'nat/bit'),
      'cost': MetricValue(sums['loss'] / np.log(2) / len(given), 'bit/sequence', how),
      'error': of_bits(100 * float(np.concatenate([w.ravel() for w in wrong]).mean()), '%'),
      'exact_match': MetricValue(100 * float(np.mean([not w.any() for w in wrong])), '%', how),
    }, said

  def format_predictions(self, predictions: Sequence[RecallPrediction]) -> list[str]:
    """The vectors of an answer with spaces between them."""
    return [' '.join(''.join(str(int(bit)) for bit in vector) for vector in said.bits) for said in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes what episodes show and ask, what was said, and where heads wrote and read, step by step."""
    if inputs:
      raise UserError('--text is not bits; possible: --split and --rows')
    drawn = eval_episodes(self.task, choose(split, NUM_EPISODES, 'split'))
    said, _ = self._say(params, eval_recall_batches(self.task, split, self._rows), len(drawn))
    items = []
    for row in parse_rows(rows, split, len(drawn)):
      episode, heads = drawn[row], {'write': said[row].write, 'read': said[row].read}
      items.append(
        memory_tapes.MemoryTape(episode.inputs, episode.target, said[row].probabilities, heads, f'{split} {row}')
      )
    memory_tapes.write(items, path)

  @property
  def _rows(self) -> int:
    devices = len(jax.local_devices())
    return -(-self.config['evaluation']['batch_size'] // devices) * devices

  @functools.cached_property
  def _run(self) -> Callable:
    return jax.jit(functools.partial(_sums, self.model))

  def _say(
    self, params: Any, batches: Sequence[RecallBatch], rows: int
  ) -> tuple[list[RecallPrediction], dict[str, float]]:
    mesh, found, totals = make_mesh(jax.local_devices()), [None] * rows, {'loss': 0.0, 'tokens': 0.0}
    params = replicate(jax.device_get(params), mesh)
    for batch in batches:
      sums, told = jax.device_get(self._run(params, shard_batch(batch, mesh)))
      totals = {name: total + float(sums[name]) for name, total in totals.items()}
      for i in np.flatnonzero(batch.index >= 0):
        asked, last = batch.target_mask[i], np.flatnonzero(batch.target_mask[i])[-1] + 1
        probabilities = (1 + np.tanh(told.logits[i, asked] / 2)) / 2  # no exponential overflows
        found[batch.index[i]] = RecallPrediction(probabilities, told.read[i, :last], told.write[i, :last])
    return found, totals


def _smallest(task: RecallTask) -> RecallBatch:
  return RecallBatch(
    np.zeros((1, 2, task.input_features), np.float32),
    np.zeros((1, 2, task.output_features), np.int32),
    np.ones((1, 2), bool),
    np.zeros(1, np.int32),
  )


def _sums(model: Recaller, params: Any, batch: RecallBatch):
  """Sums over the bits that are asked for: −Σ log p(bit), those that are right, how many; and what the model told."""
  told = model.apply({'params': params}, batch.inputs)
  real = jnp.broadcast_to(batch.target_mask[..., None], told.logits.shape)
  signed = jnp.where(batch.target > 0, told.logits, -told.logits)
  total = lambda x: jnp.sum(jnp.where(real, x, 0), dtype=jnp.float32)
  sums = {'loss': total(jax.nn.softplus(-signed)), 'accuracy': total(signed > 0), 'tokens': total(real)}
  return sums, told
