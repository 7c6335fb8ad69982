"""Attention problems for any pair of variants: parameters, a batch of inputs, and a loss, compiled once per pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.functional.table import lookup
from attention_jax.testing import AttentionInputs, attend_inputs, loss
from tests.functional.alignment_cases import CORE_PAIRS
from tests.functional.cases import FEATURES, KEY, QUERY, SCORES_BY_NAME, VALUE, S, T

# An eighth of the pairs is compiled with the default optimisation of XLA, the others with the flags of
# tests/conftest.py; `make test-all` compiles all pairs with the defaults.
OPTIMISED_PAIRS = CORE_PAIRS[::8]
DEFAULT_COMPILER_OPTIONS = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}


attend = attend_inputs


def lookup_rows(score: str, alignment: str) -> tuple[aj.Row, aj.Row]:
  return lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')


def requires_equal_widths(score: str) -> bool:
  """Returns whether a score compares queries and keys without projecting them."""
  arguments = SCORES_BY_NAME[score.split('(')[0]].arguments
  row = lookup(score, aj.SCORES, 'score')
  return not row.project and arguments['query'].shape[-1] == arguments['key'].shape[-1]


def make_problem(score: str, alignment: str, batch=(), queries=T, size=S, dtype=jnp.float32, seed=0) -> AttentionInputs:
  """Returns random parameters and inputs for a pair of variants."""
  rng = np.random.default_rng(seed)
  width = QUERY if requires_equal_widths(score) else KEY

  def array(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)

  params = aj.init_params(
    jax.random.key(seed), score=score, alignment=alignment, query=QUERY, key=width, value=VALUE, features=FEATURES
  )
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  return AttentionInputs(params, array(*batch, queries, QUERY), array(*batch, size, width), array(*batch, size, VALUE))


def is_continuous(alignment: str) -> bool:
  """Returns whether the weights are a continuous function of the scores at test time."""
  row = lookup(alignment, aj.ALIGNMENTS, 'alignment')
  return row.at_test is None and row.fn is not aj.alignments.hardmax


@functools.cache
def compiled_loss(score: str, alignment: str):
  """Returns a compiled function (problem, mask) -> ((loss, attended), gradients of the problem)."""
  run = jax.value_and_grad(functools.partial(loss, score, alignment), has_aux=True)
  return jax.jit(run, compiler_options=DEFAULT_COMPILER_OPTIONS if (score, alignment) in OPTIMISED_PAIRS else {})


def assert_same(actual, expected, **tolerance):
  """Asserts that two trees are equal, bit for bit unless a tolerance is set."""
  tolerance = {'rtol': 0, 'atol': 0} | tolerance
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, strict=True, **tolerance), actual, expected)
