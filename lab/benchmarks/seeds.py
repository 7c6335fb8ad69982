"""Updates of eight seeds side by side (config.seeds), beside eight updates of one run."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from attention_jax.data.batching import Batch
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import parse_config
from attention_jax.systems.translation.system import initializer
from attention_jax.training.config import Training
from attention_jax.training.partition import make_mesh
from attention_jax.training.seeds import make_updates, prepare_training
from configs import cmudict, dates
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare

SEEDS = 8
# case -> config, sizes of the source and target vocabularies of the random batch, and a bucket of the config
CASES = {
  'dates:bahdanau2015_deep_tanh': (dates.get_config('bahdanau2015_deep_tanh'), (400, 16), (42, 11)),
  'cmudict:luong2015_birnn': (cmudict.get_config('luong2015_birnn'), (32, 43), (9, 9)),
}


def make_batch(rows: int, vocab_sizes: tuple[int, int], bucket: tuple[int, int]) -> Batch:
  """Returns a batch of random rows, whose lengths are at least two thirds of those of a bucket, rounded down.

  Args:
    rows: number of rows.
    vocab_sizes: sizes of the source and the target vocabulary.
    bucket: lengths of source and target.
  """
  rng = np.random.default_rng(0)
  ids_and_masks = []
  for vocab_size, length in zip(vocab_sizes, bucket, strict=True):
    mask = np.arange(length) < rng.integers(2 * length // 3, length + 1, (rows, 1))
    ids = np.where(mask, rng.integers(4, vocab_size, mask.shape), 0).astype(np.int32)
    ids_and_masks += [ids, mask]
  return Batch(*ids_and_masks, np.arange(rows, dtype=np.int32))


def _one_after_the_other(config: ConfigDict, vocab_sizes: tuple[int, int], batch: Batch, seeds: int) -> Side:
  """Returns a side of `seeds` successive updates of one run. Arguments: see `_side_by_side`."""
  loss, init, training = _model_functions(config, vocab_sizes)
  step, init_state = prepare_training(training, loss, init, make_mesh(), 0)
  return repeated_update(step, init_state(0), batch, seeds)


def _side_by_side(config: ConfigDict, vocab_sizes: tuple[int, int], batch: Batch, seeds: int) -> Side:
  """Returns a side of one update of each of `seeds` runs, as training makes them, see `make_updates`.

  Args:
    config: the config of the runs.
    vocab_sizes: sizes of the source and the target vocabulary.
    batch: the batch of every update.
    seeds: number of runs.
  """
  loss, init, training = _model_functions(config, vocab_sizes)
  update = make_updates(training, loss, init, None, range(seeds))
  live = [True] * seeds
  states = update.load([None] * seeds)
  return repeated_update(lambda states, batches: update(states, batches, live), states, [batch] * seeds, 1)


def _model_functions(config: ConfigDict, vocab_sizes: tuple[int, int]) -> tuple[Callable, Callable, Training]:
  """Returns the loss, the initialiser and the settings of training."""
  parsed = parse_config(config)
  model = build(parsed.model, *vocab_sizes)
  return sequence_loss(model), initializer(model), parsed.training


def repeated_update(step: Callable, state: Any, batch: Batch, repetitions: int) -> Side:
  """Returns a side of several updates; each call continues from the state that the previous call returned.

  Args:
    step: (state, batch) -> state, metrics.
    state: the state before the first update.
    batch: the batch of every update.
    repetitions: number of updates of one call.
  """

  def run():
    nonlocal state
    for _ in range(repetitions):
      state, metrics = step(state, batch)
    return metrics

  return Side(run)


SIDES = {'one after the other': _one_after_the_other, 'side by side': _side_by_side}


def side_by_side(bench: BenchmarkContext) -> list[Timing]:
  """Times the updates of CASES."""
  timings = []
  bench.log('compiling updates')
  makers = {}
  for case, (config, vocab_sizes, bucket) in CASES.items():
    batch = make_batch(config.data.batch_size, vocab_sizes, bucket)
    for name, make_side in SIDES.items():
      makers[case, name] = functools.partial(make_side, config, vocab_sizes, batch, SEEDS)
  updates = bench.compile_sides(makers)
  for case, (config, vocab_sizes, bucket) in CASES.items():
    bench.log(f'{SEEDS} seeds of {case}')
    batch = make_batch(config.data.batch_size, vocab_sizes, bucket)
    sides = {key[-1]: side for key, side in updates.items() if key[0] == case}
    tokens = SEEDS * int(batch.target_mask.sum())
    timings += compare(
      'seeds', f'{case}, {SEEDS} seeds', sides, repeats=bench.repeats, amount=tokens, unit='target tokens'
    )
  return timings
