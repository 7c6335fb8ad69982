"""From pictures to labels by a few glimpses: the system of recurrent models of visual attention."""

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
from attention_jax.systems.base import Config, parse_rows
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.loss import OBJECTIVE_RNG, Loss
from attention_jax.training.partition import make_mesh, replicate, shard_batch
from attention_jax.training.step import step_rngs

SELECTABLE_METRICS = {'loss': False, 'error': False, 'error_of_one': False, 'error_of_means': False}


@dataclasses.dataclass(frozen=True)
class GlimpsingData:
  """The fields of `config.data`: a spec of data.digits.DIGITS, what its paths start from, pictures of a batch."""

  task: str = 'digits'
  folder: str = 'data'
  batch_size: Size = 32


@dataclasses.dataclass(frozen=True)
class GlimpsingEvaluation:
  """The fields of `config.evaluation`.

  Attributes:
    samples: ways of looking at each picture, whose probabilities are averaged.
    batch_size: pictures at once.
  """

  samples: Size = 10
  batch_size: Size = 128

  def __post_init__(self):
    check_fields(self, 'config.evaluation')


class GlimpsePrediction(NamedTuple):
  """What is said of a picture: a label, the probability of each, and one of the ways [T, 2] of looking at it.

  labels: [N], what each way of looking says by itself. means: [N], what it says where it looks at the means of its
    locations, which are not drawn then.
  """

  label: int
  probabilities: np.ndarray
  locations: np.ndarray
  labels: np.ndarray
  means: np.ndarray


class GlimpsingSystem:
  """Glimpses of digits, or of any pictures of one size with labels."""

  config_groups: Mapping[str, type] = {'data': GlimpsingData, 'model': GlimpseConfig, 'evaluation': GlimpsingEvaluation}
  plot_filename = 'glimpses.png'
  implementation = 'hard, by glimpses'

  def __init__(self, config: Config, data: Callable[[], Mapping[str, Digits]]):
    """`data` gives the splits when they are asked for."""
    self.config, self._data = config, data

  @classmethod
  def load(cls, config: Config, folder: str | None) -> 'GlimpsingSystem':
    splits = load_digit_splits(config['data'])
    return cls(config, lambda: splits)

  @classmethod
  def open(cls, config: Config, folder: str) -> 'GlimpsingSystem':
    return cls(config, lambda: load_digit_splits(config['data']))

  @classmethod
  def check(cls, config: Config, training: Training) -> None:
    bind(config['data']['task'], DIGITS, 'task')
    GlimpsingEvaluation(**config['evaluation'])
    for name, possible in (('objective', 'likelihood'), ('auxiliary', '')):
      if getattr(training, name) != possible:
        raise UserError(f'training.{name} is {getattr(training, name)!r}; possible for glimpses: {possible!r}')
    model = _build(config['model'], classes=2)
    params, batch = jax.eval_shape(lambda: _initial(model, 0)), _smallest()
    make_anneal(training.anneal, params, training.steps)
    jax.eval_shape(_loss(model, config, training), params, batch, step_rngs(jax.random.key(0)), {})

  @classmethod
  def selectable_metrics(cls, config: Config) -> dict[str, bool]:
    return SELECTABLE_METRICS

  @functools.cached_property
  def digits(self) -> Mapping[str, Digits]:
    """The splits."""
    return self._data()

  @functools.cached_property
  def model(self) -> GlimpseNetwork:
    return _build(self.config['model'], self.digits['train'].classes)

  @functools.cached_property
  def loss(self) -> Loss:
    return _loss(self.model, self.config, Training(**self.config['training']))

  @property
  def report(self) -> list[str]:
    train = self.digits['train']
    *sizes, channels = render_digit(train, 0, np.random.default_rng(0)).shape
    shape = ' x '.join(map(str, sizes if channels == 1 else (*sizes, channels)))
    among = f', among {format_count(train.clutter, "piece")} of others' if train.clutter else ''
    return [
      f'{name}: {format_count(len(split.labels), "picture")} ({shape}{among})' for name, split in self.digits.items()
    ]

  @property
  def splits(self) -> list[str]:
    return list(self.digits)

  @property
  def arrays(self) -> Mapping[str, Any]:
    return self.digits

  def save(self, folder: str) -> None:
    """Nothing: a run is opened by its config and its data."""

  def initializer(self) -> Callable[[int], Any]:
    return jax.jit(functools.partial(_initial, self.model, channels=self.digits['train'].pictures.shape[-1]))

  def batches(self, seed: int) -> DigitBatches:
    return DigitBatches(
      self.digits['train'], self.config['data']['batch_size'], seed, jax.process_index(), jax.process_count()
    )

  def check_data(self, log: Callable[[str], None]) -> None:
    """Nothing: pictures and labels are looked at as they are read."""

  def evaluate(self, params: Any, split: str, *, beams: int | None = None):
    digits = self.digits[choose(split, self.digits, 'split')]
    looks, losses = self._look(params, eval_digit_batches(digits, self._rows), len(digits.labels))
    samples = self.config['evaluation']['samples']
    how = f'samples:{samples}|rows:{len(digits.labels)}'
    wrong = float(np.mean([look.label != label for look, label in zip(looks, digits.labels, strict=True)]))
    of_each = f'mean of {samples}, each by itself|rows:{len(digits.labels)}'
    of_all = {'error_of_one': [look.labels for look in looks], 'error_of_means': [look.means for look in looks]}
    share = lambda said: MetricValue(100 * float(np.mean(np.array(said) != digits.labels[:, None])), '%', of_each)
    found = {
      'loss': MetricValue(float(np.mean(losses)), 'nat/picture', how),
      'error': MetricValue(100 * wrong, '%', how),
    }
    return found | {name: share(said) for name, said in of_all.items()}, looks

  def format_predictions(self, predictions: Sequence[GlimpsePrediction]) -> list[str]:
    return [str(look.label) for look in predictions]

  def plot(self, params: Any, path: str | Path, *, split: str, rows: Sequence[str], inputs: Sequence[str]) -> None:
    """Writes the pictures of some rows, where the model looked at them, in order, and what the retina saw."""
    if inputs:
      raise UserError('--text has nothing to look at; possible: --split and --rows')
    digits = self.digits[choose(split, self.digits, 'split')]
    chosen = np.array(parse_rows(rows, split, len(digits.labels)))
    batch = gather_digits(digits, chosen, (0,))
    looks, _ = self._look(params, [batch], len(digits.labels))
    items = [
      glimpse_paths.GlimpsePath(picture, looks[row].locations, f'{split} {row}: {label}, said {looks[row].label}')
      for picture, row, label in zip(batch.picture, chosen, batch.label, strict=True)
    ]
    glimpse_paths.write(items, path, self.config['model']['size'], self.config['model']['scales'])

  @property
  def _rows(self) -> int:
    devices = len(jax.local_devices())
    return -(-self.config['evaluation']['batch_size'] // devices) * devices

  @functools.cached_property
  def _run(self) -> Callable:
    """(params, batch) -> probabilities [B, L], a way [B, T, 2], labels and those of means [B, N]: each picture looked
    at in several ways, which are drawn by its number, whatever is beside it."""

    def run(params, batch):
      def picture(one):
        def way(rng):
          alone = jax.tree.map(lambda x: x[None], one)
          found, steady = (_apply(self.model, params, alone, rng, drawn) for drawn in (True, False))
          return jax.nn.softmax(found.logits[0]), found.locations[0], steady.logits[0].argmax()

        rng = jax.random.fold_in(jax.random.key(0), one.index)
        rngs = jax.random.split(rng, self.config['evaluation']['samples'])
        probabilities, locations, means = jax.lax.map(way, rngs)
        return probabilities.mean(0), locations[0], probabilities.argmax(-1), means

      return jax.vmap(picture)(batch)

    return jax.jit(run)

  def _look(self, params: Any, batches: Sequence[DigitBatch], rows: int) -> tuple[list[GlimpsePrediction], np.ndarray]:
    mesh, looks, losses = make_mesh(jax.local_devices()), [None] * rows, np.zeros(rows)
    params = replicate(jax.device_get(params), mesh)
    for batch in batches:
      whole = len(batch.index) % mesh.devices.size == 0
      placed = shard_batch(batch, mesh) if whole else batch
      probabilities, *ways = jax.device_get(self._run(params, placed))
      for i in np.flatnonzero(batch.index >= 0):
        looks[batch.index[i]] = GlimpsePrediction(
          int(probabilities[i].argmax()), probabilities[i], *(way[i] for way in ways)
        )
        losses[batch.index[i]] = -np.log(max(float(probabilities[i, batch.label[i]]), 1e-30))
    return looks, losses


def _build(model: Mapping[str, Any], classes: int) -> GlimpseNetwork:
  options = dataclasses.asdict(GlimpseConfig(**model))
  dtype = DTYPES[choose(options.pop('dtype'), DTYPES, 'dtype')]
  options.pop('samples')
  return GlimpseNetwork(classes, **options, dtype=dtype)


def _initial(model: GlimpseNetwork, seed: int, channels: int = 1) -> Any:
  rng = jax.random.key(seed)
  rngs = {'params': rng, 'attention': rng}
  return model.init(rngs, jnp.zeros((1, 2 * model.size, 2 * model.size, channels)), jnp.zeros((1, 2)))['params']


def _smallest() -> DigitBatch:
  return DigitBatch(np.zeros((1, 32, 32, 1), np.uint8), np.zeros(1, np.int32), np.zeros(1, np.int32))


def _apply(model: GlimpseNetwork, params: Any, batch: DigitBatch, rng: jax.Array, drawn: bool = True):
  """GlimpseNetworkOutput, from a first location that is drawn anywhere. The others are `drawn`, at test time as in training, or
  the means of what they would be drawn from."""
  first, rng = jax.random.split(rng)
  start = jax.random.uniform(first, (len(batch.label), 2), minval=-1.0, maxval=1.0)
  pictures = batch.picture.astype(jnp.float32) / 255
  return model.apply({'params': params}, pictures, start, not drawn, rngs={'attention': rng})


def _loss(model: GlimpseNetwork, config: Config, training: Training) -> Loss:
  """−log p(y) − Σ_t log π(l_t) (R − b_t) + Σ_t (R − b_t)², R whether the label is right. Mnih et al. 2014, section 3.2.

  The mean over `model.samples` ways of looking at each picture.
  """
  samples = GlimpseConfig(**config['model']).samples

  def one(params, batch, rng):
    found, real = _apply(model, params, batch, rng), batch.index >= 0
    sums = cross_entropy(found.logits[:, None], batch.label[:, None], real[:, None], training.label_smoothing)
    right = (found.logits.argmax(-1) == batch.label).astype(jnp.float32)
    draws, expected = found.log_policy[:, 1:], found.baselines[:, 1:]
    rewards = jnp.zeros_like(draws).at[:, -1:].set(right[:, None])  # there is one, at the end
    drawn = jax.vmap(latent.reinforce)(draws, rewards, expected)
    beside = {
      'reinforce': -jnp.sum(jnp.where(real, drawn, 0.0)),
      'baseline': jnp.sum(jnp.where(real[:, None], right[:, None] - expected, 0.0) ** 2),
    }
    return {'cross_entropy': sums['loss'], **sums, **beside, 'loss': sums['loss'] + sum(beside.values())}

  def loss(params, batch, rngs, running, update):
    rng = jax.random.key(0) if rngs is None else rngs[OBJECTIVE_RNG]
    found = jax.vmap(one, (None, None, 0))(params, batch, jax.random.split(rng, samples))
    return jax.tree.map(lambda x: x.mean(0), found)

  return Loss(loss)
