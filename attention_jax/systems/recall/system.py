"""Recall: recurrent networks, with or without an external memory, that map a sequence of vectors to bits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from attention_jax.data.batching import Share
from attention_jax.data.text import format_count
from attention_jax.decoding.metrics import MetricValue
from attention_jax.errors import UserError, choose
from attention_jax.systems.base import System, check_parameter_options, check_setting, parse_rows, trace_loss
from attention_jax.systems.config import RunConfig
from attention_jax.systems.recall import tapes as memory_tapes
from attention_jax.systems.recall.config import RecallDataConfig, RecallEvaluationConfig
from attention_jax.systems.recall.data import (
  NUM_EPISODES,
  RecallBatch,
  RecallBatches,
  eval_episodes,
  eval_recall_batches,
)
from attention_jax.systems.recall.model import RECALL_CELLS, RecallConfig, Recaller, build_recaller
from attention_jax.systems.recall.tasks import Episode, RecallTask, make_recall_task
from attention_jax.training.compiling import jit_once
from attention_jax.training.loss import Loss
from attention_jax.training.partition import shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.watch import Watch, unwatched

# True: a higher value is better.
SELECTABLE_METRICS = {'loss': False, 'cost': False, 'error': False, 'exact_match': True}


class RecallPrediction(NamedTuple):
  """Prediction for one episode.

  Attributes:
    probabilities: the probability that each bit of the answer is 1, [vectors, bits].
    read: weights of the read heads over the memory in every step, [T, heads, slots].
    write: weights of the write heads over the memory in every step, [T, heads, slots].
  """

  probabilities: np.ndarray
  read: np.ndarray
  write: np.ndarray

  @property
  def bits(self) -> np.ndarray:
    """The predicted bits of the answer, bool [vectors, bits]."""
    return self.probabilities > 0.5


class RecallSystem(System):
  """Any cell on any recall task. Episodes are generated, so that there is nothing to download."""

  config_groups: Mapping[str, type] = {
    'data': RecallDataConfig,
    'model': RecallConfig,
    'evaluation': RecallEvaluationConfig,
  }
  plot_filename = 'memory.png'
  extra_metrics = ('cost_of_best_estimate',)
  mechanisms: Mapping[str, Mapping[str, type]] = {'model.cell': RECALL_CELLS}
  splits = ('train', *NUM_EPISODES)

  def __init__(self, config: RunConfig):
    self.config = config
    self.task = make_recall_task(config.data.task)
    self.model = build_recaller(config.model, self.task.output_features)

  @classmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'RecallSystem':
    return cls(config)

  @classmethod
  def open(cls, config: RunConfig, folder: str) -> 'RecallSystem':
    return cls(config)

  def with_config(self, config: RunConfig) -> 'RecallSystem':
    return RecallSystem(config)

  @classmethod
  def check(cls, config: RunConfig) -> None:
    training = config.training
    check_setting(training, 'objective', 'likelihood', 'recall')
    check_setting(training, 'auxiliary', '', 'recall')
    check_setting(training, 'label_smoothing', 0.0, 'recall')
    system = cls(config)
    params = jax.eval_shape(lambda: system.initializer()(0))
    check_parameter_options(training, params)
    trace_loss(system.loss, params, _dummy_batch(system.task))

  @classmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def loss(self) -> Loss:
    return Loss(lambda params, batch, rngs, running, update: _sums(self.model, params, batch)[0])

  @property
  def report(self) -> list[str]:
    lines = ['train: new episodes in every batch']
    for split, rows in NUM_EPISODES.items():
      longest = max(episode.num_steps for episode in eval_episodes(self.task, split))
      lines.append(f'{split}: {format_count(rows, "episode")} of up to {longest} steps')
    return lines

  @property
  def implementation(self) -> str:
    if not self.model.cell.attends:
      return 'no attention'
    return f'{self.config.model.score} and {self.config.model.alignment}, step by step'

  def initializer(self) -> Callable[[int], Any]:
    inputs = jnp.asarray(_dummy_batch(self.task).inputs)

    @jit_once
    def init(rng: jax.Array) -> Any:
      return self.model.init(rng, inputs)['params']

    return lambda seed: init(jax.random.key(seed))

  def batches(self, seed: int, share: Share | None = None) -> RecallBatches:
    size = self.config.data.batch_size
    return RecallBatches(self.task, size, seed, share or self.share)

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], list[RecallPrediction]]:
    episodes = eval_episodes(self.task, choose(split, NUM_EPISODES, 'split'))
    predictions, sums = self._predict(params, split, len(episodes), watch)
    wrong_bits = [p.bits != episode.target for p, episode in zip(predictions, episodes, strict=True)]
    per_episode = f'episodes:{len(episodes)}'
    per_bit = f'bits:{int(sums["tokens"])}|{per_episode}'
    error = float(np.concatenate([wrong.ravel() for wrong in wrong_bits]).mean())
    exact = float(np.mean([not wrong.any() for wrong in wrong_bits]))
    metrics = {
      'loss': MetricValue(sums['loss'] / sums['tokens'], 'nat/bit', per_bit),
      'cost': MetricValue(sums['loss'] / np.log(2) / len(episodes), 'bit/sequence', per_episode),
      'error': MetricValue(100 * error, '%', per_bit),
      'exact_match': MetricValue(100 * exact, '%', per_episode),
    }
    if self.task.estimate:
      metrics['cost_of_best_estimate'] = MetricValue(self._best_cost(episodes), 'bit/sequence', per_episode)
    return metrics, predictions

  def _best_cost(self, episodes: Sequence[Episode]) -> float:
    """Returns the mean cost of an answer, in bits, with the best possible predictions, see RecallTask.estimate."""
    estimates = map(self.task.estimate, episodes)
    likelihoods = [np.where(e.target > 0, p, 1 - p) for e, p in zip(episodes, estimates, strict=True)]
    return -float(np.mean([np.log2(probabilities).sum() for probabilities in likelihoods]))

  def format_predictions(self, predictions: Sequence[RecallPrediction]) -> list[str]:
    """Returns the predicted vectors of each episode, such as '011 100'."""
    return [' '.join(''.join(str(int(bit)) for bit in vector) for vector in p.bits) for p in predictions]

  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes inputs, targets and predictions of episodes, and the weights of the heads in every step.

    Arguments: see `System.plot`.

    Raises:
      UserError: for inputs, and as `System.plot`.
    """
    if inputs:
      raise UserError('--text: this run reads vectors, not text; expected --split and --rows')
    episodes = eval_episodes(self.task, choose(split, NUM_EPISODES, 'split'))
    predictions, _ = self._predict(params, split, len(episodes))
    items = []
    for row in parse_rows(rows, split, len(episodes)):
      episode = episodes[row]
      prediction = predictions[row]
      heads = {'write': prediction.write, 'read': prediction.read}
      title = f'{split} {row}'
      items.append(
        memory_tapes.MemoryTape(
          episode.inputs, episode.target, prediction.probabilities, heads, episode.answer_start, title
        )
      )
    memory_tapes.write(items, path)

  @functools.cached_property
  def _apply(self) -> Callable:
    return jax.jit(functools.partial(_sums, self.model))

  def _predict(
    self, params: Any, split: str, rows: int, watch: Watch = unwatched
  ) -> tuple[list[RecallPrediction], dict[str, float]]:
    """Returns one prediction per episode of a split, and sums over its bits."""
    params = self.place_params(params)
    predictions = [None] * rows
    totals = {'loss': 0.0, 'tokens': 0.0}
    batches = eval_recall_batches(self.task, split, self.evaluation_rows)
    for batch, (sums, outputs) in map_batches(
      lambda x: self._apply(params, shard_rows(x, self.mesh)), batches, watch, self.mesh
    ):
      totals = {name: total + float(sums[name]) for name, total in totals.items()}
      for i in np.flatnonzero(batch.index >= 0):
        is_answer = batch.target_mask[i]
        num_steps = np.flatnonzero(is_answer)[-1] + 1
        probabilities = (1 + np.tanh(outputs.logits[i, is_answer] / 2)) / 2  # a sigmoid that cannot overflow
        predictions[batch.index[i]] = RecallPrediction(
          probabilities, outputs.read[i, :num_steps], outputs.write[i, :num_steps]
        )
    return predictions, totals


def _dummy_batch(task: RecallTask) -> RecallBatch:
  """One episode of two steps, for tracing and initialisation."""
  return RecallBatch(
    np.zeros((1, 2, task.input_features), np.float32),
    np.zeros((1, 2, task.output_features), np.int32),
    np.ones((1, 2), bool),
    np.zeros(1, np.int32),
  )


def _sums(model: Recaller, params: Any, batch: RecallBatch):
  """Returns sums over the bits of the answers (−log p(bit), correct bits, bits), and the outputs of the model."""
  outputs = model.apply({'params': params}, batch.inputs)
  mask = jnp.broadcast_to(batch.target_mask[..., None], outputs.logits.shape)
  signed = jnp.where(batch.target > 0, outputs.logits, -outputs.logits)

  def total(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32)

  sums = {'loss': total(jax.nn.softplus(-signed)), 'accuracy': total(signed > 0), 'tokens': total(mask)}
  return sums, outputs
