"""Whole systems at the sizes of configs/multi30k.py: training, agreement with other toolkits, the input pipeline."""

import dataclasses
import functools
import itertools
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
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import parse_config
from attention_jax.systems.costs import count_matmuls
from attention_jax.systems.translation.system import initial_params, initializer
from attention_jax.training.config import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, shard_batch
from attention_jax.training.seeds import prepare_training
from attention_jax.training.step import step_rngs
from configs import multi30k
from lab.benchmarks import ctranslate, peers
from lab.benchmarks.joey import Joey
from lab.benchmarks.limits import time_matmuls
from lab.benchmarks.measure import (
  BenchmarkContext,
  Side,
  Timing,
  compare,
  median_seconds,
)

VOCAB_SIZES = (5921, 7859)  # of Multi30k, English and German, with a minimum count of 2
BATCH_SIZE = 128
DROPOUT = 0.2
AGREEMENT_TOLERANCE = 1e-5  # relative to the largest logit
PAIRS = 29_000  # sentence pairs of the input pipeline, as in Multi30k
MEAN_LENGTHS = (14, 13.4)  # tokens of a source and of a target
RECURRENT_SIZES = {
  'source_size': VOCAB_SIZES[0],
  'target_size': VOCAB_SIZES[1],
  'embedding': 256,
  'features': 512,
  'dropout': DROPOUT,
}
TRANSFORMER_SIZES = {
  'source_size': VOCAB_SIZES[0],
  'target_size': VOCAB_SIZES[1],
  'features': 256,
  'heads': 4,
  'layers': 3,
  'hidden': 1024,
}
NO_INPUT_FEEDING = {
  'model.encoder': "birnn(rnn='gru', features=512)",
  'model.decoder': "luong(rnn='gru', features=512, input_feeding=False)",
}
# name of the case -> preset, other fields of the config, and the model of PyTorch and Joey NMT with its sizes, or None
MODELS = {
  'bahdanau2015_deep_tanh': ('bahdanau2015_deep_tanh', {}, ('Bahdanau', RECURRENT_SIZES)),
  'luong2015_birnn, input feeding': ('luong2015_birnn', {}, None),
  'luong2015_birnn, GRU, no input feeding': ('luong2015_birnn', NO_INPUT_FEEDING, ('Luong', RECURRENT_SIZES)),
  'transformer2017_small': (
    'transformer2017_small',
    {},
    ('Transformer', TRANSFORMER_SIZES | {'dropout': DROPOUT}),
  ),
}
# (name of the model, longest sentence)
TRAINING_CASES = [
  ('bahdanau2015_deep_tanh', 14),
  ('bahdanau2015_deep_tanh', 26),
  *((name, 14) for name in MODELS if name != 'bahdanau2015_deep_tanh'),
]


def random_sentences(rng: np.random.Generator, longest: int, vocab_size: int) -> np.ndarray:
  """Returns ids [BATCH_SIZE, longest] of sentences of a bucket of this length, padded with 0.

  Args:
    rng: generator of the sentences.
    longest: maximum number of tokens; every sentence has at least longest - 3.
    vocab_size: size of the vocabulary.
  """
  lengths = rng.integers(longest - 3, longest + 1, BATCH_SIZE)
  ids = rng.integers(4, vocab_size, (BATCH_SIZE, longest))
  return np.where(np.arange(longest) < lengths[:, None], ids, 0).astype(np.int32)


def make_batch(longest: int) -> Batch:
  """Returns a batch of random sentences of a bucket (longest, longest)."""
  rng = np.random.default_rng(longest)
  source, target = (random_sentences(rng, longest, vocab_size) for vocab_size in VOCAB_SIZES)
  return Batch(source, source > 0, target, target > 0, np.arange(BATCH_SIZE), None)


def build_model(name: str, dtype: str = 'float32'):
  """Returns a model of MODELS and its initial parameters."""
  model = _make_model(name, dtype)
  return model, initial_params(model, 0)


def _make_model(name: str, dtype: str):
  preset, fields, _ = MODELS[name]
  config = multi30k.get_config(preset)
  config.update_from_flattened_dict(fields)
  config.model.update({'dropout': DROPOUT, 'dtype': dtype})
  return build(parse_config(config).model, *VOCAB_SIZES)


def jax_update(name: str, batch: Batch, dtype: str = 'float32') -> Side:
  """Returns one update of Adam with clipping, compiled at its first run.

  Args:
    name: a key of MODELS.
    batch: the batch of every update.
    dtype: dtype of the products, 'float32' or 'bfloat16'.
  """
  step, init_state = _prepare_update(name, dtype)
  state = init_state(0)

  def update():
    nonlocal state
    state, metrics = step(state, batch)
    return metrics

  return Side(update)


def update_array_bytes(name: str, batch: Batch, dtype: str = 'float32') -> int:
  """Returns the bytes of the arrays of `jax_update` while it computes gradients, without those of the batch.

  These are the parameters and the state of Adam, the gradients, and the temporary arrays of the program that computes
  the gradients. The process needs at least as much memory.

  Args:
    name, batch, dtype: as in `jax_update`.
  """
  step, init_state = _prepare_update(name, dtype)
  state = init_state.shapes
  batch = shard_batch(batch, step.mesh)
  gradients = step.update.compute_gradients.lower(step.root, state.step, state.params, state.running, batch).compile()
  program = gradients.memory_analysis()
  state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  return state_bytes + program.output_size_in_bytes + program.temp_size_in_bytes


def _prepare_update(name: str, dtype: str):
  model = _make_model(name, dtype)
  return prepare_training(Training(), sequence_loss(model), initializer(model), make_mesh(), 0)


def torch_update(
  name: str, batch: Batch, dtype: str = 'float32', make_side: Callable = peers.train_step
) -> Side | None:
  """Returns the update of `jax_update` in PyTorch; None if PyTorch has no such model or is not installed.

  Args:
    name: a key of MODELS.
    batch: the batch of every update.
    dtype: dtype of the products, 'float32' or 'bfloat16'.
    make_side: peers.train_step, or a function of the same arguments.
  """
  peer = MODELS[name][2]
  if peer is None:
    return None
  model_name, sizes = peer
  return make_side(model_name, (batch.source, batch.target), sizes, dtype)


def joey_model(python: str, name: str, batch: Batch) -> Joey | None:
  """Returns the model of Joey NMT of the same kind and size; None if there is none, or if `python` is ''.

  Args:
    python: an interpreter with Joey NMT; '' for none.
    name: a key of MODELS.
    batch: the batch that is trained on and searched.

  Raises:
    UserError: if the interpreter cannot run or does not have Joey NMT.
  """
  peer = MODELS[name][2]
  return Joey(python, *peer, batch.source, batch.target) if python and peer else None


def training(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times updates of Adam with clipping; the limit is the time of the products of matrices alone."""
  bench.log('compiling updates')
  updates = bench.compile_sides(
    {
      (name, longest): lambda name=name, longest=longest: jax_update(name, make_batch(longest), bench.dtype)
      for name, longest in TRAINING_CASES
    }
  )
  torch_steps = {'torch': peers.train_step}
  if bench.torch_compile:
    torch_steps['torch.compile'] = functools.partial(peers.compiled_train_step, bench.log)
  for (name, longest), update in updates.items():
    case = f'{name}, {BATCH_SIZE} x {longest} -> {longest}'
    bench.log(f'training of {case}')
    batch = make_batch(longest)
    model, params = build_model(name, bench.dtype)
    matmuls = count_matmuls(sequence_loss(model), params, batch, step_rngs(jax.random.key(0)))
    sides = {'attention_jax': update}
    for dtype, (side, make_side) in itertools.product(bench.torch_dtypes, torch_steps.items()):
      if torch_side := torch_update(name, batch, dtype, make_side):
        sides[f'{side}, {dtype}'] = torch_side
    joey = joey_model(bench.joey, name, batch)
    if joey:
      sides['Joey NMT'] = joey.side('train')
    tokens = int(batch.target_mask.sum())
    timings = compare('training', case, sides, repeats=bench.repeats, amount=tokens, unit='target tokens')
    if joey:
      joey.close()
    limit = matmul_limit(timings[0], matmuls, gradients=True)
    note = f'{limit.note}; the optimizer alone {1e3 * optimizer_seconds(params):.3g} ms'
    yield from (*timings, dataclasses.replace(limit, note=note))


def optimizer_seconds(params) -> float:
  """Returns the seconds of the optimizer alone, which has to read and write the parameters in any program."""
  settings = Training()
  schedule = make_schedule(settings.schedule, settings.steps)
  optimizer = make_optimizer(settings.optimizer, schedule, settings.clip)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  grads = jax.tree.map(jnp.ones_like, params)
  params_and_state = (jax.tree.map(jnp.copy, params), optimizer.init(params))

  def run():
    nonlocal params_and_state
    params_and_state = update(*params_and_state, grads)
    return params_and_state

  return median_seconds(Side(run))


def matmul_limit(ours: Timing, matmuls: Counter, *, gradients: bool) -> Timing:
  """Returns the time of the products of matrices of our side by themselves.

  Args:
    ours: the timing of our side.
    matmuls: its products, as `costs.count_matmuls` returns them.
    gradients: whether to include the gradients with respect to both factors.
  """
  seconds, flop = time_matmuls(matmuls, gradients=gradients)
  unit = ours.unit.removeprefix('target ').removesuffix('s')
  return dataclasses.replace(
    ours,
    side='limit: products',
    low=seconds,
    median=seconds,
    high=seconds,
    speed=ours.median / seconds,
    memory=None,
    note=f'{flop / ours.amount / 1e6:.0f} MFLOP a {unit}; products alone at {flop / seconds / 1e9:.0f} GFLOP/s',
  )


def agreement(bench: BenchmarkContext) -> list[Timing]:
  """Logs the largest differences between our Transformer and those of other toolkits with the same parameters.

  Raises:
    UserError: if a difference is not less than AGREEMENT_TOLERANCE times the largest logit.
  """
  model, params = build_model('transformer2017_small')
  batch = make_batch(14)
  logits = jax.jit(model.apply)({'params': params}, batch.source, batch.source_mask, batch.target).logits
  largest = float(jnp.abs(logits).max())
  pairs = (batch.source, batch.target)
  differences = {
    "PyTorch's in float64": peers.difference(params, logits, pairs, TRANSFORMER_SIZES | {'dropout': 0.0}),
    "CTranslate2's": ctranslate.difference(params, logits, pairs, TRANSFORMER_SIZES['heads']),
  }
  for name, difference in differences.items():
    if difference is None:
      continue
    bench.log(f"our Transformer's outputs differ from {name} by at most {difference:.1e}; the largest is {largest:.2f}")
    if not difference < AGREEMENT_TOLERANCE * largest:
      raise UserError(
        f"our Transformer's outputs must differ from {name} by less than {AGREEMENT_TOLERANCE} of the largest, "
        f'{largest:.2f}, got {difference:.1e}'
      )
  return []


def pipeline(bench: BenchmarkContext) -> list[Timing]:
  """Times an epoch of batches of sentence pairs, without training on them."""
  bench.log('input pipeline')
  rng = np.random.default_rng(0)
  ids_and_offsets = []
  for vocab_size, mean in zip(VOCAB_SIZES, MEAN_LENGTHS, strict=True):
    offsets = np.cumsum([0, *np.clip(rng.normal(mean, 4, PAIRS), 4, 40).astype(int)])
    ids_and_offsets += [rng.integers(4, vocab_size, offsets[-1]).astype(np.int32), offsets]
  encoded = EncodedCorpus(*ids_and_offsets, None, None)
  batches = Batches(encoded, multi30k.get_config().data.buckets, BATCH_SIZE, 'sentences', seed=0)

  def epoch() -> int:
    return sum(int(batch.target_mask.sum()) for batch in stream(batches, 0, len(batches)))

  return compare(
    'pipeline',
    'an epoch of batches',
    {'attention_jax': Side(epoch)},
    repeats=min(bench.repeats, 3),
    amount=epoch(),
    unit='target tokens',
  )
