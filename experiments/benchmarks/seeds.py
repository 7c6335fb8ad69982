"""Eight seeds in one update (config.seeds) beside eight updates one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from attention_jax.data.batching import Batch
from attention_jax.models.seq2seq import build
from attention_jax.training.experiment import initial_params
from attention_jax.training.loop import Training, begin
from attention_jax.training.losses import sequence_loss
from attention_jax.training.partition import make_mesh, replicate, sharding
from configs import cmudict, dates
from experiments.benchmarks.measure import Side, Timing, compare

SEEDS = 8
# case: the config, the sizes of its vocabularies, the bucket that most of its rows are in
CASES = {
  'dates:bahdanau2015': (dates.get_config('bahdanau2015'), (400, 16), (42, 11)),
  'cmudict:luong2015': (cmudict.get_config('luong2015'), (32, 43), (9, 9)),
}


def batch_of(rows: int, words: tuple[int, int], bucket: tuple[int, int]) -> Batch:
  """Rows that fill the bucket, or lack up to a third of it."""
  rng, sides = np.random.default_rng(0), []
  for size, length in zip(words, bucket, strict=True):
    mask = np.arange(length) < rng.integers(2 * length // 3, length + 1, (rows, 1))
    sides += [np.where(mask, rng.integers(4, size, mask.shape), 0).astype(np.int32), mask]
  return Batch(*sides, np.arange(rows, dtype=np.int32))


def updating(config: ConfigDict, words: tuple[int, int], batch: Batch, seeds: int) -> Side:
  """One update of one run, `seeds` times; or one update of all of them."""
  model = build(config.model.to_dict(), *words)
  params, loss, training = initial_params(model, 0), sequence_loss(model), Training(**config.training.to_dict())
  step, init = begin(training, loss, params, make_mesh(), 0)
  state = [replicate(init(params), make_mesh())]

  def one_by_one():
    for _ in range(seeds):
      state[0], metrics = step(state[0], batch)
    jax.block_until_ready(metrics)

  return Side(one_by_one)


def together(config: ConfigDict, words: tuple[int, int], batch: Batch, seeds: int) -> Side:
  model, mesh = build(config.model.to_dict(), *words), make_mesh(seeds=seeds)
  params, loss, training = initial_params(model, 0), sequence_loss(model), Training(**config.training.to_dict())
  step, init = begin(training, loss, params, mesh, list(range(seeds)))
  many = jax.tree.map(lambda x: jnp.stack([x] * seeds), params)
  state = [jax.device_put(jax.vmap(init)(many), sharding(mesh, 'states'))]
  batches = Batch(*(None if x is None else np.stack([x] * seeds) for x in batch))

  def at_once():
    state[0], metrics = step(state[0], batches)
    jax.block_until_ready(metrics)

  return Side(at_once)


def side_by_side(say, repeats: int) -> list[Timing]:
  timings = []
  for case, (config, words, bucket) in CASES.items():
    say(f'{SEEDS} seeds of {case}')
    given = config, words, batch_of(config.data.batch_size, words, bucket), SEEDS
    sides = {'one after the other': updating(*given), 'side by side': together(*given)}
    tokens = SEEDS * int(given[2].target_mask.sum())
    timings += compare(
      'seeds', f'{case}, {SEEDS} seeds', sides, repeats=repeats, amount=tokens, unit='target tokens'
    )
  return timings
