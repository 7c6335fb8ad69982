"""Implementation 'auto' chooses by pair, size and platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.attend import Problem
from attention_jax.kernels import auto
from attention_jax.kernels.target import compile_for
from tests.functional.helpers import attend, lookup_rows, make_problem


def describe(score, alignment):
  return auto.describe_choice(*lookup_rows(score, alignment))


def choose_implementation(score, alignment, num_queries, dtype=jnp.float32, params=None, size=1):
  """Returns the choice for one sequence."""
  query, key = (np.zeros((length, 8), dtype) for length in (num_queries, size))
  memory = aj.Memory(key, key, aj.Mask())
  return auto.choose_implementation(Problem(*lookup_rows(score, alignment), params or {}, query, memory))


def test_auto_chooses_by_pair_and_size(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100, 'linear': 120}})
  assert [choose_implementation('additive', 'softmax', n) for n in (99, 100)] == ['xla', 'factored']
  assert [choose_implementation('additive', 'local_m', n) for n in (99, 149, 150)] == ['xla', 'factored', 'window']
  assert choose_implementation('dot', 'softmax', 10**6) == 'xla'
  assert describe('additive', 'softmax') == 'xla, factored from T S = 100'
  assert describe('location', 'hard') == 'xla'
  assert describe('elu_dot', 'proportional') == 'xla, linear (one mask for all queries, no weights) from T S = 120'


def test_auto_chooses_chunked_where_memory_is_the_limit(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100}})
  assert describe('location_sensitive', 'softmax') == f'xla, chunked from T S = {2**7}'
  monkeypatch.setattr(auto, 'MIN_SCORES', {})
  assert [choose_implementation('additive', 'softmax', n) for n in (10**6, 2**20)] == ['xla', 'chunked']


def test_auto_describes_its_choice_on_accelerators_as_estimated():
  with compile_for('gpu'):
    assert describe('scaled_dot', 'softmax').startswith('xla or cudnn (16-bit) or flash, by estimates of time')
  with compile_for('tpu'):
    assert 'xla or pallas_additive or chunked, by estimates' in describe('additive', 'softmax')
  assert 'estimates' not in describe('scaled_dot', 'softmax')


def test_auto_saves_memory_for_types_that_a_kernel_does_not_support():
  size = 2**14
  with compile_for('gpu'):
    assert choose_implementation('additive', 'softmax', size, np.float64, size=size) == 'chunked'
    assert choose_implementation('additive', 'softmax', size, np.float32, size=size) == 'pallas_additive'


@pytest.mark.long
def test_auto_excludes_kernels_that_do_not_support_a_width():
  choices = []
  for score in ('low_rank(rank=128)', 'low_rank(rank=130)'):
    params = aj.init_params(jax.random.key(0), score=score, query=8, key=8, features=8)
    with compile_for('gpu'):
      choices.append(choose_implementation(score, 'softmax', 2**22, jnp.bfloat16, params))
  assert choices == ['cudnn', 'xla']


def test_auto_runs_its_choice(monkeypatch):
  calls = []

  def recording_attend(problem, axes):
    calls.append(problem)
    return aj.Attended(0.0, None)

  monkeypatch.setattr(auto.factored, 'attend_batch', recording_attend)
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'factored': 0}})
  attend('additive', 'softmax', make_problem('additive', 'softmax'), implementation='auto')
  assert calls
