"""Implementation 'auto' chooses by pair, size and platform."""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.functional.attend import Problem
from attention_jax.functional.table import lookup
from attention_jax.kernels import auto
from attention_jax.kernels.target import compile_for
from tests.functional.helpers import attend, make_problem


def lookup_rows(score, alignment):
  return lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')


def choose_implementation(score, alignment, num_scores, dtype=jnp.float32, params=None):
  """Returns the choice for `num_scores` queries and one position."""
  query, key = (np.zeros((length, 8), dtype) for length in (num_scores, 1))
  memory = aj.Memory(key, key, aj.Mask())
  return auto.choose_implementation(Problem(*lookup_rows(score, alignment), params or {}, query, memory))


def test_auto_chooses_by_pair_and_size(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100, 'linear': 120}})
  assert [choose_implementation('additive', 'softmax', n) for n in (99, 100)] == ['xla', 'factored']
  assert [choose_implementation('additive', 'local_m', n) for n in (99, 149, 150)] == ['xla', 'factored', 'window']
  assert choose_implementation('dot', 'softmax', 10**6) == 'xla'
  assert auto.describe_choice(*lookup_rows('additive', 'softmax')) == 'xla, factored from T S = 100'
  assert auto.describe_choice(*lookup_rows('location', 'hard')) == 'xla'
  linear = auto.describe_choice(*lookup_rows('elu_dot', 'proportional'))
  assert linear == 'xla, linear (one mask for all queries, no weights) from T S = 120'


def test_auto_chooses_chunked_where_memory_is_the_limit(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100}})
  assert auto.describe_choice(*lookup_rows('location_sensitive', 'softmax')) == f'xla, chunked from T S = {2**7}'
  monkeypatch.setattr(auto, 'MIN_SCORES', {'gpu': {'factored': 0}})  # no entry for this platform
  assert choose_implementation('additive', 'softmax', 10**6) == 'xla'
  assert choose_implementation('additive', 'softmax', 2**20) == 'chunked'


def test_auto_describes_its_choice_on_accelerators_as_estimated():
  product = 'scaled_dot', 'softmax'
  with compile_for('gpu'):
    assert [choose_implementation(*product, n, jnp.bfloat16) for n in (2**22 - 1, 2**22)] == ['xla', 'cudnn']
    assert choose_implementation(*product, 2**22) == 'xla'
    assert auto.describe_choice(*lookup_rows(*product)) == (
      f'xla, cudnn (16-bit) from T S = {2**22}; estimated, not measured on a gpu'
    )
  with compile_for('tpu'):
    assert choose_implementation('additive', 'softmax', 2**10) == 'pallas_additive'
    assert auto.describe_choice(*lookup_rows(*product)) == (
      f'xla, splash (no weights, no bias) from T S = {2**18}; estimated, not measured on a tpu'
    )
  assert 'estimated' not in auto.describe_choice(*lookup_rows(*product))


def test_auto_saves_memory_for_types_that_a_kernel_does_not_support():
  additive = 'additive', 'softmax'
  with compile_for('gpu'):
    assert [choose_implementation(*additive, n, np.float64) for n in (2**18, 2**20)] == ['xla', 'chunked']
    assert choose_implementation(*additive, 2**20) == 'pallas_additive'


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
