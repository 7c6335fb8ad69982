"""Implementation 'window' reads only its window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import Pointwise
from tests.functional.cases import T
from tests.functional.helpers import assert_same, attend, make_problem

CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


@pytest.mark.parametrize('alignment', ['local_m(width=2)', 'local_p(width=2)'])
def test_window_reads_only_its_window(alignment):
  sizes = []

  def recording_score(query, key):
    sizes.append(key.shape[0])
    return key @ query

  def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

  row = aj.Row(recording_score, form=Pointwise())
  params = aj.init_params(jax.random.key(0), score=row, alignment=alignment, query=5, key=5, features=3)
  inputs = draw(T, 5), draw(500, 5), draw(500, 2)
  options = {'score': row, 'alignment': alignment, 'params': params}
  attended = jax.jit(lambda inputs: aj.attend(*inputs, **options, implementation='window'))(inputs)
  assert sizes == [5]
  assert_same(attended, jax.jit(lambda inputs: aj.attend(*inputs, **options))(inputs), **CLOSE)


@pytest.mark.long
@pytest.mark.parametrize('size', [1, 2, 5])
def test_equals_definition_for_a_memory_shorter_than_the_window(size):
  problem = make_problem('dot', 'local_p(width=4)', size=size)

  @jax.jit
  def attend_both(problem):
    return [attend('dot', 'local_p(width=4)', problem, implementation=name) for name in ('xla', 'window')]

  assert_same(*attend_both(problem), **CLOSE)
