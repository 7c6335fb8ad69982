"""Search at the sizes of configs/multi30k.py, beside other toolkits."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.data.batching import Batch
from attention_jax.decoding.compiled_search import compile_beam_search
from attention_jax.systems.costs import count_matmuls
from attention_jax.tokens import EOS
from lab.benchmarks import peers
from lab.benchmarks.ctranslate import CTranslate, ctranslate2
from lab.benchmarks.joey import Joey
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare
from lab.benchmarks.systems import (
  BATCH_SIZE,
  RECURRENT_SIZES,
  TRANSFORMER_SIZES,
  build_model,
  joey_model,
  make_batch,
  matmul_limit,
)

STEPS = 20  # decoding steps


def recurrent_decoding(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times searches by bahdanau2015_deep_tanh, beside PyTorch and Joey NMT."""
  yield from _time_searches(bench, 'bahdanau2015_deep_tanh', _torch_sides)


def transformer_decoding(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times searches by transformer2017_small, beside Joey NMT and, on a CPU, CTranslate2 with the same parameters."""
  yield from _time_searches(bench, 'transformer2017_small', _ctranslate_sides)


def _time_searches(bench: BenchmarkContext, name: str, make_sides: Callable[..., dict[str, Side]]) -> Iterator[Timing]:
  """Times searches of STEPS steps with an untrained model that never emits EOS.

  Args:
    bench: settings.
    name: a key of systems.MODELS.
    make_sides: (bench, parameters, batch, beams) -> the searches of other toolkits.
  """
  model, params = build_model(name, bench.dtype)
  # Excludes EOS, so that a search makes STEPS steps, and PAD and BOS, which only other toolkits would emit.
  bias = params['output']['bias'].at[: EOS + 1].set(-1e9)
  params = {**params, 'output': {**params['output'], 'bias': bias}}
  batch = make_batch(14)
  inputs = (params, jnp.asarray(batch.source), jnp.asarray(batch.source_mask))
  joey = joey_model(bench.joey, name, batch)
  for beams in (1, 5):
    bench.log(f'decoding by {name} with {beams} beam(s)')
    search = compile_beam_search(model, beams, STEPS)
    sides = {
      **bench.compile_sides({'attention_jax': functools.partial(_search_side, search, inputs)}),
      **make_sides(bench, params, batch, beams),
      **_joey_sides(joey, beams),
    }
    case = f'{name}, {BATCH_SIZE} sentences of 14, beam {beams}, {STEPS} steps'
    timings = compare('decoding', case, sides, repeats=bench.repeats, amount=BATCH_SIZE, unit='sentences')
    yield from timings
    if timings and timings[0].side == 'attention_jax':
      yield matmul_limit(timings[0], count_search_matmuls(model, params, batch, beams), gradients=False)
  if joey:
    joey.close()


def _search_side(search: Callable, inputs: tuple) -> Side:
  return Side(lambda: search(*inputs))


def _joey_sides(joey: Joey | None, beams: int) -> dict[str, Side]:
  return {'Joey NMT': joey.side(f'search {beams} {STEPS}')} if joey else {}


def _torch_sides(bench: BenchmarkContext, params: Any, batch: Batch, beams: int) -> dict[str, Side]:
  """The search of PyTorch's recurrent model, in each dtype."""
  sides = {
    f'torch, {dtype}': peers.decode(batch.source, RECURRENT_SIZES, beams, STEPS, dtype) for dtype in bench.torch_dtypes
  }
  return {name: side for name, side in sides.items() if side}


def _ctranslate_sides(bench: BenchmarkContext, params: Any, batch: Batch, beams: int) -> dict[str, Side]:
  """The searches of CTranslate2 with the same parameters."""
  if ctranslate2 is None or jax.default_backend() != 'cpu':
    return {}
  model = CTranslate(params, TRANSFORMER_SIZES['heads'])
  return {f'CTranslate2, {dtype}': model.side(batch.source, beams, STEPS, dtype) for dtype in ('float32', 'int8')}


def count_search_matmuls(model, params, batch: Batch, beams: int) -> Counter:
  """Counts the products of matrices of STEPS search steps and of the encoder; see costs.count_matmuls.

  Args:
    model: the model.
    params: its parameters.
    batch: the batch, whose sources are read.
    beams: beam size.
  """
  variables = {'params': params}

  def start(source, mask):
    return model.apply(variables, source, mask, STEPS, beams, method='start')

  def step(carry, token, memory):
    return model.apply(variables, carry, token, memory, method='step')

  def repeat_for_beams(x):
    return jax.ShapeDtypeStruct((BATCH_SIZE, beams, *x.shape[1:]), x.dtype)

  carry, memory = jax.eval_shape(start, batch.source, batch.source_mask)
  tokens = jax.ShapeDtypeStruct((BATCH_SIZE, beams), jnp.int32)
  beam_step = jax.vmap(step, (1, 1, None), 1)
  per_step = count_matmuls(beam_step, jax.tree.map(repeat_for_beams, carry), tokens, memory)
  of_encoder = count_matmuls(start, batch.source, batch.source_mask)
  return of_encoder + Counter({matmul: STEPS * count for matmul, count in per_step.items()})
