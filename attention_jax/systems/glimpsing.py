"""Glimpsing: the system of recurrent models of visual attention, from pictures to labels by a few glimpses."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import glimpse_paths
from attention_jax.data.digits import (
  DIGITS,
  DigitBatch,
  DigitBatches,
  Digits,
  eval_digit_batches,
  gather_digits,
  load_digit_splits,
  render_digit,
)
from attention_jax.data.text import format_count
from attention_jax.errors import UserError, choose
from attention_jax.functional import latent
from attention_jax.inference.metrics import MetricValue
from attention_jax.losses.sequence import cross_entropy
from attention_jax.models.encoder_decoder import DTYPES
from attention_jax.models.glimpses import GlimpseConfig, GlimpseNetwork
from attention_jax.specs import Size, bind, check_fields
from attention_jax.systems.base import Config, System, check_setting, parse_rows, trace_loss
from attention_jax.training.anneal import make_anneal
from attention_jax.training.compiling import jit_once
from attention_jax.training.loop import Training
from attention_jax.training.loss import OBJECTIVE_RNG, Loss
from attention_jax.training.partition import shard_batch
from attention_jax.training.peers import map_batches

SELECTABLE_METRICS = {'loss': False, 'error': False, 'error_of_one': False, 'error_of_means': False}
MIN_PROBABILITY = 1e-30  # bounds the loss of a sampled mean that is 0 in float32


@dataclasses.dataclass(frozen=True)
class GlimpsingDataConfig:
  """Fields of `config.data`.

  Attributes:
    task: a spec of data.digits.DIGITS.
    folder: folder that relative paths of the task start from.
    batch_size: pictures of a batch.
  """

  task: str = 'digits'
  folder: str = 'data'
  batch_size: Size = 32


@dataclasses.dataclass(frozen=True)
class GlimpsingEvaluationConfig:
  """Fields of `config.evaluation`.

  Attributes:
    samples: glimpse paths sampled for each picture; their probabilities are averaged.
    batch_size: number of pictures that are classified at once.
  """

  samples: Size = 10
  batch_size: Size = 128

  def __post_init__(self):
    check_fields(self, 'config.evaluation')


class GlimpsePrediction(NamedTuple):
  """Prediction for one picture.

  Attributes:
    label: the most probable label.
    probabilities: [L], the mean over the sampled paths.
    locations: [T, 2], the first sampled path.
    labels: [N], the label predicted from each sampled path alone.
    means: [N], the label predicted with each sample's first location and the means of all later locations.
  """

  label: int
  probabilities: np.ndarray
  locations: np.ndarray
  labels: np.ndarray
  means: np.ndarray


class GlimpsingSystem(System):
  """Glimpses of digits, or of any labelled pictures of one size.

  Args:
    config: the whole config of the run.
    load_data: returns the splits; called on first use.
  """

  config_groups: Mapping[str, type] = {
    'data': GlimpsingDataConfig,
    'model': GlimpseConfig,
    'evaluation': GlimpsingEvaluationConfig,
  }
  plot_filename = 'glimpses.png'
  implementation = 'hard, by glimpses'

  def __init__(self, config: Config, load_data: Callable[[], Mapping[str, Digits]]):
    self.config = config
    self._load_data = load_data

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'GlimpsingSystem':
    splits = load_digit_splits(config['data'])
    return cls(config, lambda: splits)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'GlimpsingSystem':
    return cls(config, lambda: load_digit_splits(config['data']))

  def with_config(self, config: Config) -> 'GlimpsingSystem':
    return GlimpsingSystem(config, self._load_data)

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    bind(config['data']['task'], DIGITS, 'task')
    GlimpsingEvaluationConfig(**config['evaluation'])
    check_setting(training, 'objective', 'likelihood', 'glimpsing')
    check_setting(training, 'auxiliary', '', 'glimpsing')
    model = _build(config['model'], classes=2)
    params = jax.eval_shape(lambda: _init_params(model, jax.random.key(0)))
    make_anneal(training.anneal, params, training.steps)
    trace_loss(_loss(model, config, training), params, _dummy_batch())

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def digits(self) -> Mapping[str, Digits]:
    """The splits."""
    return self._load_data()

  @functools.cached_property
  def model(self) -> GlimpseNetwork:
    """The network, whose size depends on the number of classes in the data."""
    return _build(self.config['model'], self.digits['train'].classes)

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config, Training(**self.config['training']))

  @property
  def report(self) -> list[str]:
    train = self.digits['train']
    height, width, channels = render_digit(train, 0, np.random.default_rng(0)).shape
    sizes = [height, width] if channels == 1 else [height, width, channels]
    shape = ' x '.join(map(str, sizes))
    clutter = f', with {format_count(train.clutter, "piece")} of other pictures' if train.clutter else ''
    return [
      f'{name}: {format_count(len(split.labels), "picture")} ({shape}{clutter})' for name, split in self.digits.items()
    ]

  @property
  def splits(self) -> list[str]:
    return list(self.digits)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.digits

  def initializer(self) -> Callable[[int], Any]:
    init = functools.partial(_init_params, self.model, channels=self.digits['train'].pictures.shape[-1])
    compiled = jit_once(init)
    return lambda seed: compiled(jax.random.key(seed))

  def batches(self, seed: int) -> DigitBatches:
    size = self.config['data']['batch_size']
    return DigitBatches(self.digits['train'], size, seed, self.share)

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None
  ) -> tuple[dict[str, MetricValue], list[GlimpsePrediction]]:
    digits = self.digits[choose(split, self.digits, 'split')]
    predictions, losses = self._predict(params, eval_digit_batches(digits, self.evaluation_rows), len(digits.labels))
    samples = self.config['evaluation']['samples']
    rows = f'rows:{len(digits.labels)}'
    ensemble = f'samples:{samples}|{rows}'
    single = f'mean of {samples}, each by itself|{rows}'

    def single_error(labels: Sequence[np.ndarray]) -> MetricValue:
      wrong = np.array(labels) != digits.labels[:, None]
      return MetricValue(100 * float(np.mean(wrong)), '%', single)

    wrong = [p.label != label for p, label in zip(predictions, digits.labels, strict=True)]
    metrics = {
      'loss': MetricValue(float(np.mean(losses)), 'nat/picture', ensemble),
      'error': MetricValue(100 * float(np.mean(wrong)), '%', ensemble),
      'error_of_one': single_error([p.labels for p in predictions]),
      'error_of_means': single_error([p.means for p in predictions]),
    }
    return metrics, predictions

  def format_predictions(self, predictions: Sequence[GlimpsePrediction]) -> list[str]:
    return [str(prediction.label) for prediction in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes pictures of a split with the sampled path of glimpses, and what the retina sees at each."""
    if inputs:
      raise UserError('--text: this run reads pictures, not text; expected --split and --rows')
    digits = self.digits[choose(split, self.digits, 'split')]
    row_numbers = np.array(parse_rows(rows, split, len(digits.labels)))
    batch = gather_digits(digits, row_numbers, (0,))
    predictions, _ = self._predict(params, [batch], len(digits.labels))
    items = []
    for picture, row, label in zip(batch.picture, row_numbers, batch.label, strict=True):
      title = f'{split} {row}: {label}, predicted {predictions[row].label}'
      items.append(glimpse_paths.GlimpsePath(picture, predictions[row].locations, title))
    glimpse_paths.write(items, path, self.config['model']['size'], self.config['model']['scales'])

  @functools.cached_property
  def _classify(self) -> Callable:
    """(params, batch) -> the fields of GlimpsePrediction from `probabilities` on, with a leading batch axis.

    The samples of a picture depend on its row number alone, not on the other pictures of the batch.
    """
    samples = self.config['evaluation']['samples']

    def classify_picture(params, picture: DigitBatch):
      batch = jax.tree.map(lambda x: x[None], picture)

      def sample(rng):
        sampled = _apply(self.model, params, batch, rng, True)
        mean = _apply(self.model, params, batch, rng, False)
        return jax.nn.softmax(sampled.logits[0]), sampled.locations[0], mean.logits[0].argmax()

      rngs = jax.random.split(jax.random.fold_in(jax.random.key(0), picture.index), samples)
      probabilities, locations, means = jax.lax.map(sample, rngs)
      return probabilities.mean(0), locations[0], probabilities.argmax(-1), means

    return jax.jit(jax.vmap(classify_picture, (None, 0)))

  def _predict(
    self, params: Any, batches: Sequence[DigitBatch], rows: int
  ) -> tuple[list[GlimpsePrediction | None], np.ndarray]:
    """Returns one prediction and one loss per row of a split; rows that are in no batch have None and 0."""
    params = self.replicate_params(params)
    predictions = [None] * rows
    losses = np.zeros(rows)

    def classify(batch: DigitBatch) -> Any:
      divides = len(batch.index) % self.mesh.devices.size == 0
      return self._classify(params, shard_batch(batch, self.mesh) if divides else batch)

    for batch, (probabilities, locations, labels, means) in map_batches(classify, batches):
      for i in np.flatnonzero(batch.index >= 0):
        label = int(probabilities[i].argmax())
        prediction = GlimpsePrediction(label, probabilities[i], locations[i], labels[i], means[i])
        predictions[batch.index[i]] = prediction
        losses[batch.index[i]] = -np.log(max(float(probabilities[i, batch.label[i]]), MIN_PROBABILITY))
    return predictions, losses


def _build(model: Mapping[str, Any], classes: int) -> GlimpseNetwork:
  options = dataclasses.asdict(GlimpseConfig(**model))
  dtype = DTYPES[choose(options.pop('dtype'), DTYPES, 'dtype')]
  options.pop('samples')
  return GlimpseNetwork(classes, **options, dtype=dtype)


def _init_params(model: GlimpseNetwork, rng: jax.Array, channels: int = 1) -> Any:
  rngs = {'params': rng, 'attention': rng}
  return model.init(rngs, jnp.zeros((1, 2 * model.size, 2 * model.size, channels)), jnp.zeros((1, 2)))['params']


def _dummy_batch() -> DigitBatch:
  """One picture, for tracing."""
  return DigitBatch(np.zeros((1, 32, 32, 1), np.uint8), np.zeros(1, np.int32), np.zeros(1, np.int32))


def _apply(model: GlimpseNetwork, params: Any, batch: DigitBatch, rng: jax.Array, sample_locations: bool = True):
  """Applies the network from a first location that is sampled uniformly.

  Args:
    model: the network.
    params: its parameters.
    batch: pictures with labels.
    rng: consumed.
    sample_locations: whether later locations are sampled, or are the means of their distributions.

  Returns:
    A models.glimpses.GlimpseNetworkOutput.
  """
  first, rng = jax.random.split(rng)
  start = jax.random.uniform(first, (len(batch.label), 2), minval=-1.0, maxval=1.0)
  pictures = batch.picture.astype(jnp.float32) / 255
  return model.apply({'params': params}, pictures, start, not sample_locations, rngs={'attention': rng})


def _loss(model: GlimpseNetwork, config: Config, training: Training) -> Loss:
  """−log p(y) − Σ_t log π(l_t) (R − b_t) + Σ_t (R − b_t)², R whether the label is right. Mnih et al. 2014, section 3.2.

  The mean over `model.samples` sampled paths of each picture.
  """
  samples = GlimpseConfig(**config['model']).samples

  def path_loss(params, batch, rng):
    outputs = _apply(model, params, batch, rng)
    mask = batch.index >= 0
    sums = cross_entropy(outputs.logits[:, None], batch.label[:, None], mask[:, None], training.label_smoothing)
    is_right = (outputs.logits.argmax(-1) == batch.label).astype(jnp.float32)
    log_policy = outputs.log_policy[:, 1:]  # the first location is not sampled by the policy
    baselines = outputs.baselines[:, 1:]
    rewards = jnp.zeros_like(log_policy).at[:, -1:].set(is_right[:, None])  # one reward, after the last glimpse
    reinforce = jax.vmap(latent.reinforce)(log_policy, rewards, baselines)
    terms = {
      'reinforce': -jnp.sum(jnp.where(mask, reinforce, 0.0)),
      'baseline': jnp.sum(jnp.where(mask[:, None], is_right[:, None] - baselines, 0.0) ** 2),
    }
    return {'cross_entropy': sums['loss'], **sums, **terms, 'loss': sums['loss'] + sum(terms.values())}

  def loss(params, batch, rngs, running, update):
    rng = jax.random.key(0) if rngs is None else rngs[OBJECTIVE_RNG]
    sums = jax.vmap(path_loss, (None, None, 0))(params, batch, jax.random.split(rng, samples))
    return jax.tree.map(lambda x: x.mean(0), sums)

  return Loss(loss)
