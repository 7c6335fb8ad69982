"""A second eager call with equal shapes and an equal spec compiles nothing, and new functions hold no memory."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.functional import programs
from attention_jax.kernels.api import supported_implementations
from attention_jax.modules import attention_equinox, attention_nnx
from attention_jax.modules.heads import attend_heads, init_heads
from tests.compiled import record_compilations
from tests.functional.alignment_cases import PAIRS
from tests.functional.helpers import attend, lookup_rows, make_problem

DEFAULT_PAIRS = [('scaled_dot', 'entmax(alpha=1.3)'), ('coverage', 'softmax'), ('additive', 'mocha(width=2)')]
SPEC = {'score': 'coverage', 'alignment': 'entmax(alpha=1.3)'}  # scanned in order, and with a loop of its own
SIZES = {'query': 5, 'key': 5, 'features': 4}
RNG = jax.random.key(0)


def assert_compiled_once(call):
  jax.block_until_ready(call())
  with record_compilations() as compiled:
    jax.block_until_ready(call())
  assert not compiled


ALL_PAIRS = DEFAULT_PAIRS + [pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS]


@pytest.mark.long
@pytest.mark.parametrize(('score', 'alignment'), ALL_PAIRS)
def test_attend_in_every_implementation(score, alignment):
  problem = make_problem(score, alignment, batch=(2,))
  for implementation in supported_implementations(*lookup_rows(score, alignment)):
    for deterministic in (True, False):
      options = {'implementation': implementation, 'rng': RNG, 'deterministic': deterministic}
      assert_compiled_once(lambda options=options: attend(score, alignment, problem, **options))


@pytest.mark.long
@pytest.mark.parametrize(('score', 'alignment'), ALL_PAIRS)
def test_attend_step(score, alignment):
  params, query, key, value = make_problem(score, alignment)
  memory = aj.remember(key, value, params=params, alignment=alignment)
  carry = aj.init_carry(score, alignment, len(key))
  assert_compiled_once(lambda: aj.attend_step(score, alignment, params, carry, query[0], memory, rng=RNG))


@pytest.mark.long
@pytest.mark.parametrize('heads', [1, 2])
def test_apply_of_the_module(heads):
  attention = aj.Attention(**SPEC, features=4, heads=heads, dropout=0.5)
  query, encoded = jnp.ones((2, 3, 5)), jnp.ones((2, 7, 5))
  mask = jnp.ones((2, 7), bool)

  def run(module, query, encoded, mask, deterministic):
    memory = module.remember(encoded, mask)
    _, step = module(module.init_carry(memory), query[:, 0], memory, deterministic)
    return step, module.parallel(query, memory, deterministic)

  variables = attention.init(RNG, query, encoded, mask, True, method=run)
  for deterministic in (True, False):
    apply = functools.partial(attention.apply, rngs={'attention': RNG}, method=run)
    assert_compiled_once(lambda apply=apply, flag=deterministic: apply(variables, query, encoded, mask, flag))


def previous_dot(query, key, *, previous):
  return key @ query + previous


QUERY, KEY = jnp.ones((3, 5)), jnp.ones((7, 5))
attend_user = functools.partial(aj.attend, QUERY, KEY, KEY)
partial_score = functools.partial(previous_dot)
with_array_option = functools.partial(aj.alignments.softmax, temperature=jnp.float32(0.5))


def gradient(implementation):
  return jax.grad(lambda query: aj.attend(query, KEY, KEY, implementation=implementation).context.sum())(QUERY)


CALLS = {
  **{f'gradient of {name}': functools.partial(gradient, name) for name in ('flash', 'chunked', 'xla')},
  'function': lambda: attend_user(score=previous_dot),
  'row': lambda: attend_user(score=aj.Row(previous_dot)),
  'partial': lambda: attend_user(score=partial_score),
  'option that is an array': lambda: attend_user(alignment=with_array_option),
  'edit': lambda: attend_user(alignment=aj.with_edit('softmax', 'uniform')),
  'dropout': lambda: attend_user(
    alignment=aj.with_dropout('entmax(alpha=1.3)', 0.5), rng=jax.random.key(1), deterministic=False
  ),
}


@pytest.mark.long
@pytest.mark.parametrize('name', CALLS)
def test_gradients_functions_options_edits_and_dropout(name):
  assert_compiled_once(CALLS[name])


def test_heads_nnx_and_equinox():
  query, encoded = jnp.ones((2, 3, 5)), jnp.ones((2, 7, 5))
  params = init_heads(RNG, **SIZES, heads=2, **SPEC)
  assert_compiled_once(lambda: attend_heads(params, query, encoded, **SPEC))
  nnx_module = attention_nnx.Attention(5, 5, 4, heads=2, **SPEC, rngs=nnx.Rngs(0))
  assert_compiled_once(lambda: nnx_module(query, encoded))
  equinox_module = attention_equinox.Attention(5, 5, 4, heads=2, **SPEC, rng=RNG)
  assert_compiled_once(lambda: equinox_module(query, encoded))


@pytest.mark.long
def test_a_method_and_a_function_over_a_traced_array_are_read_in_every_call():
  class Scaled:
    scale = 1.0

    def score(self, query, key):
      return self.scale * jnp.arange(7.0)

  scaled = Scaled()
  first = attend_user(score=scaled.score).weights
  scaled.scale = 2.0
  assert not np.allclose(attend_user(score=scaled.score).weights, first)

  def loss(scale):
    return attend_user(score=lambda query, key: scale * jnp.arange(7.0)).weights[0, 0]

  with jax.checking_leaks():
    jax.jit(jax.grad(loss))(1.0)


@pytest.mark.long
def test_programs_of_new_functions_are_released(monkeypatch):
  """The cache has a bound, and nothing else holds a function or its program."""
  shared = functools.lru_cache(2)(programs._make_program)
  monkeypatch.setattr(programs, '_shared_program', shared)
  references = []
  for _ in range(6):
    score = lambda query, key, *, previous: key @ query + previous  # noqa: E731
    references.append(weakref.ref(score))
    attend_user(score=score)
  del score
  gc.collect()
  assert sum(reference() is not None for reference in references) <= 2
