"""A whole attention problem for any pair of variants: parameters, a batch of inputs, and the loss whose gradient is
looked at. Compiled once per pair and shared by every law."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.functional.table import lookup
from tests.functional.alignment_cases import CORE_PAIRS
from tests.functional.cases import FEATURES, KEY, QUERY, SCORES_BY_NAME, VALUE, S, T

# Every row is in the spine, and is compiled as users compile it; other pairs as conftest.py says.
AS_USERS_DO = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}


class Problem(NamedTuple):
  params: dict
  query: jax.Array
  key: jax.Array
  value: jax.Array


def same_width(score: str) -> bool:
  """Whether this score compares query and key as they are."""
  given = SCORES_BY_NAME[score.split('(')[0]].arguments
  row = lookup(score, aj.SCORES, 'score')
  return not row.project and given['query'].shape[-1] == given['key'].shape[-1]


def make_problem(score: str, alignment: str, batch=(), queries=T, size=S, dtype=jnp.float32, seed=0) -> Problem:
  rng = np.random.default_rng(seed)
  width = QUERY if same_width(score) else KEY
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  params = aj.init_params(
    jax.random.key(seed), score=score, alignment=alignment, query=QUERY, key=width, features=FEATURES
  )
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  return Problem(params, array(*batch, queries, QUERY), array(*batch, size, width), array(*batch, size, VALUE))


def attend(score: str, alignment: str, given: Problem, mask=None, **options) -> aj.Attended:
  params, query, key, value = given
  return aj.attend(query, key, value, mask, score=score, alignment=alignment, params=params, **options)


def is_continuous(alignment: str) -> bool:
  """Whether a small change of the scores is a small change of the weights, at test."""
  row = lookup(alignment, aj.ALIGNMENTS, 'alignment')
  return row.at_test is None and row.fn is not aj.alignments.hardmax


def loss(score: str, alignment: str, given: Problem, mask=None, **options):
  """A number that every entry of what was asked for moves, with it beside the number."""
  attended = attend(score, alignment, given, mask, **options)
  probe = lambda x: jnp.sin(jnp.arange(x.shape[-1])).astype(x.dtype)
  total = sum(jnp.sum(jnp.einsum('...i,i->...', x, probe(x)).astype(jnp.float32)) for x in attended if x is not None)
  return total, attended


@functools.cache
def compiled_loss(score: str, alignment: str):
  """(problem, mask) -> ((loss, attended), gradients of the problem)."""
  run = jax.value_and_grad(functools.partial(loss, score, alignment), has_aux=True)
  return jax.jit(run, compiler_options=AS_USERS_DO if (score, alignment) in CORE_PAIRS else {})


def assert_same(one, other, **tolerance):
  """Equal trees; bit for bit unless a tolerance is given."""
  tolerance = {'rtol': 0, 'atol': 0} | tolerance
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, strict=True, **tolerance), one, other)
