"""Glimpsing: the system of networks that classify a picture by glimpses, or by a region of it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from attention_jax.data.batching import Share
from attention_jax.data.text import format_count
from attention_jax.decoding.metrics import MetricValue
from attention_jax.errors import UserError, choose
from attention_jax.functional import latent
from attention_jax.losses.sequence import cross_entropy
from attention_jax.models.encoder_decoder import DTYPES, make_module
from attention_jax.specs import bind
from attention_jax.systems.base import System, check_parameter_options, check_setting, parse_rows, trace_loss
from attention_jax.systems.config import RunConfig
from attention_jax.systems.glimpsing import paths as glimpse_paths
from attention_jax.systems.glimpsing.config import GlimpsingDataConfig, GlimpsingEvaluationConfig
from attention_jax.systems.glimpsing.data import (
  DIGITS,
  DigitBatch,
  DigitBatches,
  Digits,
  eval_digit_batches,
  gather_digits,
  load_digit_splits,
  render_digit,
)
from attention_jax.systems.glimpsing.glimpses import GlimpseConfig, GlimpseNetworkOutput
from attention_jax.systems.glimpsing.model import NETWORKS
from attention_jax.training.compiling import jit_once
from attention_jax.training.config import Training
from attention_jax.training.loss import OBJECTIVE_RNG, Loss
from attention_jax.training.partition import shard_rows
from attention_jax.training.peers import map_batches
from attention_jax.training.watch import Watch, unwatched

# False: a lower value is better.
SELECTABLE_METRICS = {'loss': False, 'error': False, 'error_of_one_sample': False, 'error_of_mean_locations': False}
DUMMY_SHAPE = (32, 32, 1)  # of a picture, for tracing
MIN_PROBABILITY = 1e-30  # bounds the loss: the mean probability over the samples can be 0 in float32


class GlimpsePrediction(NamedTuple):
  """Prediction for one picture of K objects with L labels, from N sampled paths of T glimpses.

  Attributes:
    label: the most probable label of each of the K objects.
    probabilities: [K, L], the mean over the sampled paths.
    locations: [T, 2], the first sampled path.
    labels: [N, K], the labels predicted from each sampled path alone.
    labels_at_means: [N, K], the labels predicted with each sample's first location and the means of all later ones.
    transforms: [T, 2, 3], see GlimpseNetworkOutput.
  """

  label: tuple[int, ...]
  probabilities: np.ndarray
  locations: np.ndarray
  labels: np.ndarray
  labels_at_means: np.ndarray
  transforms: Any = ()


class GlimpsingSystem(System):
  """Any network of models.picture_classifiers on digits, or on any labelled pictures of one size.

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
  mechanisms: Mapping[str, Mapping[str, type]] = {'model.network': NETWORKS}

  def __init__(self, config: RunConfig, load_data: Callable[[], Mapping[str, Digits]]):
    self.config = config
    self._load_data = load_data

  @classmethod
  def load(cls, config: RunConfig, folder: str | None) -> 'GlimpsingSystem':
    splits = load_digit_splits(config.data)
    return cls(config, lambda: splits)

  @classmethod
  def open(cls, config: RunConfig, folder: str) -> 'GlimpsingSystem':
    return cls(config, lambda: load_digit_splits(config.data))

  def with_config(self, config: RunConfig) -> 'GlimpsingSystem':
    return GlimpsingSystem(config, self._load_data)

  @classmethod
  def check(cls, config: RunConfig) -> None:
    training = config.training
    _, _, options = bind(config.data.task, DIGITS, 'task')
    objects = options.get('objects', 1)
    check_setting(training, 'objective', 'likelihood', 'glimpsing')
    check_setting(training, 'auxiliary', '', 'glimpsing')
    model = _build(config.model, classes=2, objects=objects)
    params = jax.eval_shape(lambda: _init_params(model, jax.random.key(0)))
    check_parameter_options(training, params)
    trace_loss(_loss(model, config, training), params, _dummy_batch(objects))

  @classmethod
  def selectable_metrics(cls, config: RunConfig) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def digits(self) -> Mapping[str, Digits]:
    """The splits."""
    return self._load_data()

  @functools.cached_property
  def model(self) -> nn.Module:
    """The network, whose size depends on the number of classes in the data."""
    train = self.digits['train']
    return _build(self.config.model, train.classes, train.objects)

  @property
  def implementation(self) -> str:
    return self.model.attention_kind

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config, self.config.training)

  @property
  def report(self) -> list[str]:
    train = self.digits['train']
    height, width, channels = self._picture_shape
    sizes = [height, width] if channels == 1 else [height, width, channels]
    shape = ' x '.join(map(str, sizes))
    objects = f', {train.objects} in each' if train.objects > 1 else ''
    clutter = f', with {format_count(train.clutter, "piece")} of other pictures' if train.clutter else ''
    details = f'({shape}{objects}{clutter})'
    return [f'{name}: {format_count(len(split.labels), "picture")} {details}' for name, split in self.digits.items()]

  @property
  def _picture_shape(self) -> tuple[int, int, int]:
    return render_digit(self.digits['train'], 0, np.random.default_rng(0)).shape

  @property
  def splits(self) -> list[str]:
    return list(self.digits)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.digits

  def initializer(self) -> Callable[[int], Any]:
    init = functools.partial(_init_params, self.model, shape=self._picture_shape)
    compiled = jit_once(init)
    return lambda seed: compiled(jax.random.key(seed))

  def batches(self, seed: int, share: Share | None = None) -> DigitBatches:
    size = self.config.data.batch_size
    return DigitBatches(self.digits['train'], size, seed, share or self.share)

  def evaluate(
    self, params: Any, split: str, *, beams: int | None = None, watch: Watch = unwatched
  ) -> tuple[dict[str, MetricValue], list[GlimpsePrediction]]:
    digits = self.digits[choose(split, self.digits, 'split')]
    batches = eval_digit_batches(digits, self.evaluation_rows)
    predictions, losses = self._predict(params, batches, len(digits.labels), watch)
    expected = _labels_by_row(batches, len(digits.labels))
    samples = self.config.evaluation.samples
    rows = f'rows:{len(digits.labels)}'
    averaged_signature = f'samples:{samples}|{rows}'
    single_signature = f'mean of {samples}, each by itself|{rows}'

    def single_error(labels: Sequence[np.ndarray]) -> MetricValue:
      wrong = np.any(np.array(labels) != expected[:, None], axis=-1)
      return MetricValue(100 * float(np.mean(wrong)), '%', single_signature)

    wrong = np.any(np.array([p.label for p in predictions]) != expected, axis=-1)
    metrics = {
      'loss': MetricValue(float(np.mean(losses)), 'nat/picture', averaged_signature),
      'error': MetricValue(100 * float(np.mean(wrong)), '%', averaged_signature),
      'error_of_one_sample': single_error([p.labels for p in predictions]),
      'error_of_mean_locations': single_error([p.labels_at_means for p in predictions]),
    }
    return metrics, predictions

  def format_predictions(self, predictions: Sequence[GlimpsePrediction]) -> list[str]:
    return [_format_labels(prediction.label) for prediction in predictions]

  def plot(self, params: Any, path: epath.PathLike, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes pictures of a split with the first sampled path of glimpses, and what the network reads at each.

    Arguments: see `System.plot`.

    Raises:
      UserError: for inputs, and as `System.plot`.
    """
    if inputs:
      raise UserError('--text: this run reads pictures, not text; expected --split and --rows')
    digits = self.digits[choose(split, self.digits, 'split')]
    row_numbers = np.array(parse_rows(rows, split, len(digits.labels)))
    batch = gather_digits(digits, row_numbers, (0,))
    predictions, _ = self._predict(params, [batch], len(digits.labels))
    items = []
    for picture, row, label in zip(batch.picture, row_numbers, batch.label, strict=True):
      prediction = predictions[row]
      title = f'{split} {row}: {_format_labels(np.ravel(label))}, predicted {_format_labels(prediction.label)}'
      items.append(glimpse_paths.GlimpsePath(picture, prediction.locations, title, prediction.transforms))
    glimpse_paths.write(items, path, self.config.model.size, self.config.model.scales)

  @functools.cached_property
  def _classify(self) -> Callable:
    """(params, batch) -> the fields of GlimpsePrediction from `probabilities` on, with a leading batch axis.

    The samples of a picture depend on its row number alone, not on the other pictures of the batch.
    """
    samples = self.config.evaluation.samples

    def classify_picture(params, picture: DigitBatch):
      batch = jax.tree.map(lambda x: x[None], picture)

      def sample(rng):
        sampled = _apply(self.model, params, batch, rng, True)
        mean = _apply(self.model, params, batch, rng, False)
        of_picture = jax.tree.map(lambda x: x[0], sampled)
        logits, mean_logits = (_logits_by_object(outputs, batch)[0] for outputs in (sampled, mean))
        return jax.nn.softmax(logits), of_picture, mean_logits.argmax(-1)

      rngs = jax.random.split(jax.random.fold_in(jax.random.key(0), picture.index), samples)
      probabilities, sampled, means = jax.lax.map(sample, rngs)
      locations, transforms = jax.tree.map(lambda x: x[0], (sampled.locations, sampled.transforms))
      return probabilities.mean(0), locations, probabilities.argmax(-1), means, transforms

    return jax.jit(jax.vmap(classify_picture, (None, 0)))

  def _predict(
    self, params: Any, batches: Sequence[DigitBatch], rows: int, watch: Watch = unwatched
  ) -> tuple[list[GlimpsePrediction | None], np.ndarray]:
    """Returns one prediction and one loss per row of a split; rows that are in no batch have None and 0."""
    params = self.place_params(params)
    predictions = [None] * rows
    losses = np.zeros(rows)

    def classify(batch: DigitBatch) -> Any:
      is_divisible = len(batch.index) % self.mesh.devices.size == 0
      return self._classify(params, shard_rows(batch, self.mesh) if is_divisible else batch)

    for batch, results in map_batches(classify, batches, watch, self.mesh):
      for i in np.flatnonzero(batch.index >= 0):
        probabilities, *further_fields = jax.tree.map(lambda x, i=i: x[i], results)
        label = tuple(int(best) for best in probabilities.argmax(-1))
        predictions[batch.index[i]] = GlimpsePrediction(label, probabilities, *further_fields)
        label_probabilities = np.take_along_axis(probabilities, np.reshape(batch.label[i], (-1, 1)), axis=1)
        losses[batch.index[i]] = -np.log(np.maximum(label_probabilities, MIN_PROBABILITY)).sum()
    return predictions, losses


def _format_labels(labels: Sequence[int]) -> str:
  """The labels of the objects of a picture, such as '3 7'."""
  return ' '.join(map(str, labels))


def _labels_by_row(batches: Sequence[DigitBatch], rows: int) -> np.ndarray:
  """The labels [rows, K] of all rows of a split."""
  labels, index = (np.concatenate(column) for column in zip(*((b.label, b.index) for b in batches), strict=True))
  by_row = np.zeros((rows, *labels.shape[1:]), labels.dtype)
  by_row[index[index >= 0]] = labels[index >= 0]
  return by_row.reshape(rows, -1)


def _logits_by_object(outputs: GlimpseNetworkOutput, batch: DigitBatch) -> jax.Array:
  """The logits [B, K, L] of every object."""
  return outputs.logits.reshape(len(batch.index), -1, outputs.logits.shape[-1])


def _build(config: GlimpseConfig, classes: int, objects: int = 1) -> nn.Module:
  options = dataclasses.asdict(config)
  dtype = DTYPES[choose(options.pop('dtype'), DTYPES, 'dtype')]
  options.pop('samples')
  spec = options.pop('network')
  network = make_module(spec, NETWORKS, 'network', labels=classes, objects=objects, **options, dtype=dtype)
  if objects > 1 and not _reads_several_objects(network):
    expected = ', '.join(name for name, row in NETWORKS.items() if _reads_several_objects(row))
    raise UserError(
      f'config.model.network: {spec!r} predicts one label, but pictures have {objects}; expected one of: {expected}'
    )
  return network


def _reads_several_objects(network: nn.Module | type[nn.Module]) -> bool:
  return 'objects' in {field.name for field in dataclasses.fields(network)}


def _init_params(model: nn.Module, rng: jax.Array, shape: tuple[int, int, int] = DUMMY_SHAPE) -> Any:
  rngs = {'params': rng, 'attention': rng}
  return model.init(rngs, jnp.zeros((1, *shape)), jnp.zeros((1, 2)))['params']


def _dummy_batch(objects: int = 1) -> DigitBatch:
  """One picture with this number of objects, for tracing."""
  label = np.zeros((1, objects), np.int32)
  return DigitBatch(np.zeros((1, *DUMMY_SHAPE), np.uint8), label, np.zeros(1, np.int32))


def _apply(model: nn.Module, params: Any, batch: DigitBatch, rng: jax.Array, sample_locations: bool = True):
  """Applies the network from a first location that is sampled uniformly.

  Args:
    model: the network.
    params: its parameters.
    batch: pictures with labels.
    rng: consumed.
    sample_locations: whether later locations are sampled, or are the means of their distributions.

  Returns:
    A systems.glimpsing.glimpses.GlimpseNetworkOutput.
  """
  first, rng = jax.random.split(rng)
  start = jax.random.uniform(first, (len(batch.label), 2), minval=-1.0, maxval=1.0)
  pictures = batch.picture.astype(jnp.float32) / 255
  return model.apply({'params': params}, pictures, start, not sample_locations, rngs={'attention': rng})


def _loss(model: nn.Module, config: RunConfig, training: Training) -> Loss:
  """−log p(y) − Σ_t log π(l_t) (R_t − b_t) + Σ_t (R_t − b_t)². Mnih et al. 2014, section 3.2.

  y: labels; l_t: location of glimpse t; π: policy; b_t: baseline, without gradient in the second term. R_t is the
  number of right labels from glimpse t on, which is 0 or 1 with one object. The first location is not part of the sums,
  as the policy does not choose it. The loss is the mean over config.model.samples sampled paths of each picture;
  label smoothing changes its first term.
  """
  samples = config.model.samples

  def path_loss(params, batch, rng):
    outputs = _apply(model, params, batch, rng)
    mask = batch.index >= 0
    labels = batch.label.reshape(len(mask), -1)
    logits = _logits_by_object(outputs, batch)
    label_mask = jnp.broadcast_to(mask[:, None], labels.shape)
    sums = cross_entropy(logits, labels, label_mask, training.label_smoothing)
    is_right = (logits.argmax(-1) == labels).astype(jnp.float32)
    # A reward after the last glimpse of every object.
    glimpses = outputs.log_policy.shape[1] // labels.shape[1]  # of each object
    rewards = jnp.zeros_like(outputs.log_policy).at[:, glimpses - 1 :: glimpses].set(is_right)
    # The first location is not sampled by the policy.
    log_policy, rewards, baselines = (x[:, 1:] for x in (outputs.log_policy, rewards, outputs.baselines))
    reinforce = jax.vmap(latent.reinforce)(log_policy, rewards, baselines)
    errors = jax.vmap(latent.rewards_to_go)(rewards) - baselines
    terms = {
      'reinforce': -jnp.sum(jnp.where(mask, reinforce, 0.0)),
      'baseline': jnp.sum(jnp.where(mask[:, None], errors, 0.0) ** 2),
    }
    return {'cross_entropy': sums['loss'], **sums, **terms, 'loss': sums['loss'] + sum(terms.values())}

  def loss(params, batch, rngs, running, update):
    rng = jax.random.key(0) if rngs is None else rngs[OBJECTIVE_RNG]
    sums = jax.vmap(path_loss, (None, None, 0))(params, batch, jax.random.split(rng, samples))
    return jax.tree.map(lambda x: x.mean(0), sums)

  return Loss(loss)
