"""Eight seeds in one update (config.seeds) beside eight updates one after the other."""

import jax
import numpy as np
from ml_collections import ConfigDict

from attention_jax.data.batching import Batch
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.translation import initializer
from attention_jax.training.loop import Training, prepare_training
from attention_jax.training.partition import make_mesh
from attention_jax.training.state import TrainState
from attention_jax.training.step import TrainStep
from configs import cmudict, dates
from experiments.benchmarks.measure import BenchmarkContext, Side, Timing, compare

SEEDS = 8
# case: the config, the sizes of its vocabularies, the bucket that most of its rows are in
CASES = {
  'dates:bahdanau2015': (dates.get_config('bahdanau2015'), (400, 16), (42, 11)),
  'cmudict:luong2015': (cmudict.get_config('luong2015'), (32, 43), (9, 9)),
}


def make_batch(rows: int, words: tuple[int, int], bucket: tuple[int, int]) -> Batch:
  """Rows that fill the bucket, or lack up to a third of it."""
  rng, sides = np.random.default_rng(0), []
  for size, length in zip(words, bucket, strict=True):
    mask = np.arange(length) < rng.integers(2 * length // 3, length + 1, (rows, 1))
    sides += [np.where(mask, rng.integers(4, size, mask.shape), 0).astype(np.int32), mask]
  return Batch(*sides, np.arange(rows, dtype=np.int32))


def update_sides(config: ConfigDict, words: tuple[int, int], batch: Batch, seeds: int) -> dict[str, Side]:
  """One update of one run, `seeds` times; and one update of `seeds` runs at once."""
  model, training = build(config.model.to_dict(), *words), Training(**config.training.to_dict())
  params, loss = initializer(model), sequence_loss(model)
  step, first = prepare_training(training, loss, params, make_mesh(), 0)
  alone = _repeating(step, first(), batch, seeds)
  batches = Batch(*(None if x is None else np.stack([x] * seeds) for x in batch))
  step, first = prepare_training(training, loss, params, make_mesh(seeds=seeds), range(seeds))
  return {'one after the other': alone, 'side by side': _repeating(step, first(), batches, 1)}


def _repeating(step: TrainStep, state: TrainState, batch: Batch, times: int) -> Side:
  """`times` updates, each of the state that the one before left."""
  kept = [state]

  def run():
    for _ in range(times):
      kept[0], metrics = step(kept[0], batch)
    jax.block_until_ready(metrics)

  return Side(run)


def side_by_side(bench: BenchmarkContext) -> list[Timing]:
  timings = []
  for case, (config, words, bucket) in CASES.items():
    bench.log(f'{SEEDS} seeds of {case}')
    batch = make_batch(config.data.batch_size, words, bucket)
    sides, tokens = update_sides(config, words, batch, SEEDS), SEEDS * int(batch.target_mask.sum())
    timings += compare(
      'seeds', f'{case}, {SEEDS} seeds', sides, repeats=bench.repeats, amount=tokens, unit='target tokens'
    )
  return timings
