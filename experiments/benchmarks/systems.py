"""Whole systems at the sizes of configs/multi30k.py: training, decoding, the input pipeline, start-up."""

import dataclasses
import functools
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.data.batching import Batch, Batches
from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError
from attention_jax.inference.predictor import compile_beam_search
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.translation import initial_params
from attention_jax.training.loop import Training, prepare_training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh
from attention_jax.training.step import step_rngs
from configs import multi30k
from experiments.benchmarks import peers
from experiments.benchmarks.joey import Joey
from experiments.benchmarks.limits import count_matmuls, time_matmuls
from experiments.benchmarks.measure import BenchmarkContext, Side, Timing, compare

WORDS = (5921, 7859)  # of Multi30k, English and German, with a minimum count of 2
BATCH_SIZE, STEPS = 128, 20
DROPOUT = 0.2
TORCH = {'source_size': WORDS[0], 'target_size': WORDS[1], 'embedding': 256, 'features': 512, 'dropout': DROPOUT}
SMALL = {'source_size': WORDS[0], 'target_size': WORDS[1], 'features': 256, 'heads': 4, 'layers': 3, 'hidden': 1024}
NOT_FED = {
  'model.encoder': "birnn(rnn='gru', features=512)",
  'model.decoder': "luong(rnn='gru', features=512, input_feeding=False)",
}
# name of the case: preset, other fields of the config, what PyTorch has beside it
MODELS = {
  'bahdanau2015': ('bahdanau2015', {}, ('Bahdanau', TORCH)),
  'luong2015, input feeding': ('luong2015', {}, None),
  'luong2015, GRU, not fed': ('luong2015', NOT_FED, ('Luong', TORCH)),
  'transformer2017_small': ('transformer2017_small', {}, ('Transformer', SMALL | {'dropout': DROPOUT})),
}
TRAINING_CASES = [
  ('bahdanau2015', 14),
  ('bahdanau2015', 26),
  *((name, 14) for name in MODELS if name != 'bahdanau2015'),
]


def sentences(rng, longest: int, words: int) -> np.ndarray:
  """Ids [BATCH_SIZE, longest] of sentences that a bucket of this length holds, 0 behind their ends."""
  lengths = rng.integers(longest - 3, longest + 1, BATCH_SIZE)
  ids = rng.integers(4, words, (BATCH_SIZE, longest))
  return np.where(np.arange(longest) < lengths[:, None], ids, 0).astype(np.int32)


def make_batch(longest: int) -> Batch:
  rng = np.random.default_rng(longest)
  source, target = (sentences(rng, longest, words) for words in WORDS)
  return Batch(source, source > 0, target, target > 0, np.arange(BATCH_SIZE), None)


def build_model(name: str, dtype: str = 'float32'):
  preset, fields, _ = MODELS[name]
  config = multi30k.get_config(preset)
  config.update_from_flattened_dict(fields)
  config.model.update({'dropout': DROPOUT, 'dtype': dtype})
  model = build(config.model.to_dict(), *WORDS)
  return model, initial_params(model, 0)


def jax_update(model, params, batch: Batch) -> Side:
  """One update of Adam with clipping, compiled at its first run."""
  step, first = prepare_training(Training(), sequence_loss(model), lambda seed: params, make_mesh(), 0)
  state = [first()]

  def update():
    state[0], metrics = step(state[0], batch)
    jax.block_until_ready(metrics)

  return Side(update)


def torch_update(name: str, batch: Batch, dtype: str = 'float32', way: Callable = peers.train_step) -> Side | None:
  """The same in PyTorch; None where it has no such model, or is not there."""
  peer = MODELS[name][2]
  return way(peer[0], (batch.source, batch.target), peer[1], dtype) if peer else None


def by_joey(python: str, name: str, batch: Batch) -> Joey | None:
  """A model of the same kind and size in Joey NMT; None where there is none, or no interpreter was named."""
  peer = MODELS[name][2]
  return Joey(python, *peer, batch.source, batch.target) if python and peer else None


def training(bench: BenchmarkContext) -> Iterator[Timing]:
  """Updates of Adam with clipping; the limit is the time that the products of matrices alone would take."""
  for name, longest in TRAINING_CASES:
    case = f'{name}, {BATCH_SIZE} x {longest} -> {longest}'
    bench.log(f'training of {case}')
    batch = make_batch(longest)
    model, params = build_model(name, bench.dtype)
    found = count_matmuls(sequence_loss(model), params, batch, step_rngs(jax.random.key(0)))
    sides = {'attention_jax': jax_update(model, params, batch)}
    ways = {'torch': peers.train_step, 'torch.compile': functools.partial(peers.compiled_train_step, bench.log)}
    for dtype, (side, way) in itertools.product(bench.torch_dtypes, ways.items()):
      if update := torch_update(name, batch, dtype, way):
        sides[f'{side}, {dtype}'] = update
    if other := by_joey(bench.joey, name, batch):
      sides['Joey NMT'] = other.side('train')
    tokens = int(batch.target_mask.sum())
    some = compare('training', case, sides, repeats=bench.repeats, amount=tokens, unit='target tokens')
    if other:
      other.close()
    limit = limit_of(some[0], found, gradients=True)
    note = f'{limit.note}; the optimizer alone {1e3 * seconds_of_optimizer(params):.0f} ms'
    yield from (*some, dataclasses.replace(limit, note=note))


def seconds_of_optimizer(params) -> float:
  """In which gradients that are there become new parameters: what reading and writing them costs any program."""
  settings = Training()
  schedule = make_schedule(settings.schedule, settings.steps)
  optimizer = make_optimizer(settings.optimizer, schedule, settings.clip)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def change(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  grads = jax.tree.map(jnp.ones_like, params)
  state = [(jax.tree.map(jnp.copy, params), optimizer.init(params))]

  def run():
    state[0] = jax.block_until_ready(change(*state[0], grads))

  return compare('', '', {'': Side(run)})[0].median


def limit_of(ours: Timing, found: Counter, *, gradients: bool) -> Timing:
  """What the products of matrices that our side makes would take by themselves."""
  alone, flop = time_matmuls(found, gradients=gradients)
  each = f'{flop / ours.amount / 1e6:.0f} MFLOP a {ours.unit.removeprefix("target ").removesuffix("s")}'
  return dataclasses.replace(
    ours,
    side='limit: products',
    low=alone,
    median=alone,
    high=alone,
    speed=ours.median / alone,
    memory=None,
    note=f'{each}; products alone at {flop / alone / 1e9:.0f} GFLOP/s',
  )


def agreement(bench: BenchmarkContext) -> list[Timing]:
  """Says how far our Transformer and PyTorch's are apart with the same parameters.

  Raises: UserError above 1e-5 of the largest logit.
  """
  model, params = build_model('transformer2017_small')
  batch = make_batch(14)
  logits = jax.jit(model.apply)({'params': params}, batch.source, batch.source_mask, batch.target).logits
  found = peers.difference(params, logits, (batch.source, batch.target), SMALL | {'dropout': 0.0})
  if found is not None:
    size = float(jnp.abs(logits).max())
    bench.log(f"our Transformer's logits differ from PyTorch's in float64 by at most {found:.1e}, of {size:.2f}")
    if not found < 1e-5 * size:
      raise UserError('they are not the same model')
  return []


def decoding(bench: BenchmarkContext) -> Iterator[Timing]:
  """Search of so many steps with untrained models, which never want to stop."""
  model, params = build_model('bahdanau2015', bench.dtype)
  never = params['output']['bias'].at[2].set(-1e9)  # the end of a sentence
  params = {**params, 'output': {**params['output'], 'bias': never}}
  batch = make_batch(14)
  other = by_joey(bench.joey, 'bahdanau2015', batch)
  for beams in (1, 5):
    bench.log(f'decoding with {beams} beam(s)')
    search = compile_beam_search(model, beams, STEPS)
    given = params, jnp.asarray(batch.source), jnp.asarray(batch.source_mask)
    sides = {'attention_jax': Side(lambda search=search, given=given: jax.block_until_ready(search(*given)))}
    for dtype in bench.torch_dtypes:
      if theirs := peers.decode(batch.source, TORCH, beams, STEPS, dtype):
        sides[f'torch, {dtype}'] = theirs
    if other:
      sides['Joey NMT'] = other.side(f'search {beams} {STEPS}')
    case = f'bahdanau2015, {BATCH_SIZE} sentences of 14, beam {beams}, {STEPS} steps'
    some = compare('decoding', case, sides, repeats=bench.repeats, amount=BATCH_SIZE, unit='sentences')
    yield from (*some, limit_of(some[0], count_search_matmuls(model, params, batch, beams), gradients=False))


def count_search_matmuls(model, params, batch: Batch, beams: int) -> Counter:
  """The products of matrices of STEPS steps, and of what is done once before them; see limits.count_matmuls."""
  variables = {'params': params}
  start = lambda source, mask: model.apply(variables, source, mask, STEPS, method='start')
  step = lambda carry, token, memory: model.apply(variables, carry, token, memory, method='step')
  carry, memory = jax.eval_shape(start, batch.source, batch.source_mask)
  in_beams = lambda x: jax.ShapeDtypeStruct((BATCH_SIZE, beams, *x.shape[1:]), x.dtype)
  tokens = jax.ShapeDtypeStruct((BATCH_SIZE, beams), jnp.int32)
  each = count_matmuls(jax.vmap(step, (1, 1, None), 1), jax.tree.map(in_beams, carry), tokens, memory)
  return count_matmuls(start, batch.source, batch.source_mask) + Counter({key: STEPS * n for key, n in each.items()})


def pipeline(bench: BenchmarkContext) -> list[Timing]:
  """Batches of 29,000 sentence pairs as fast as they come, with nobody who trains on them."""
  bench.log('input pipeline')
  rng, pairs = np.random.default_rng(0), 29_000
  sides = []
  for words, mean in zip(WORDS, (14, 13.4), strict=True):
    offsets = np.cumsum([0, *np.clip(rng.normal(mean, 4, pairs), 4, 40).astype(int)])
    sides += [rng.integers(4, words, offsets[-1]).astype(np.int32), offsets]
  encoded = EncodedCorpus(*sides, None, None)
  batches = Batches(encoded, multi30k.get_config().data.buckets, BATCH_SIZE, 'sentences', seed=0)
  tokens = [0]

  def epoch():
    tokens[0] = sum(int(batch.target_mask.sum()) for batch in stream(batches, 0, len(batches)))

  epoch()
  return compare(
    'pipeline',
    'an epoch of batches',
    {'attention_jax': Side(epoch)},
    repeats=min(bench.repeats, 3),
    amount=tokens[0],
    unit='target tokens',
  )


def startup(bench: BenchmarkContext) -> list[Timing]:
  """Seconds until a new interpreter has imported what a program needs."""
  bench.log('start-up')
  run = lambda code: Side(lambda: subprocess.run([sys.executable, '-c', code], check=True))
  sides = {'import attention_jax': run('import attention_jax'), 'import jax': run('import jax, jax.numpy')}
  sides['the trainer'] = run('import attention_jax.systems.experiment')
  return compare('startup', 'imports', sides, repeats=min(bench.repeats, 3))
