"""masked_top_k equals a stable sort, and log_sum_exp equals jax.nn.logsumexp."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import top_k
from tests.sampled_cases import sample_cases


# `in_one_block`: whether all forbidden ids are in the first block
@pytest.mark.parametrize(
  ('size', 'count', 'in_one_block'), sample_cases([*itertools.product([3, 64, 65, 200], [1, 5, 70], [True, False])], 2)
)
def test_masked_top_k_equals_a_sort(size, count, in_one_block):
  random = np.random.default_rng(size)
  logits = random.integers(-9, 9, (2, 3, size)).astype(np.float32)  # with many equal values
  allowed = np.arange(size) >= 2 if in_one_block else random.random(size) < 0.8
  values, ids = top_k.masked_top_k(jnp.asarray(logits), allowed, count)
  masked = np.where(allowed, logits, -np.inf)
  expected_ids = np.argsort(-masked, axis=-1, kind='stable')[..., :count]
  expected = np.take_along_axis(masked, expected_ids, -1)
  np.testing.assert_array_equal(values, expected)
  assert np.all(ids < size)
  is_allowed = expected > -np.inf
  np.testing.assert_array_equal(np.where(is_allowed, ids, -1), np.where(is_allowed, expected_ids, -1))


@pytest.mark.long
@pytest.mark.parametrize('size', [3, 64, 65, 200])
def test_log_sum_exp_equals_that_of_jax(size):
  finite = 100 * jax.random.normal(jax.random.key(size), (5, size))
  with_forbidden = jnp.where(jnp.arange(size) % 3 == 0, -jnp.inf, finite)
  all_forbidden = jnp.full_like(finite, -jnp.inf)
  with_nan = finite.at[0, 0].set(jnp.nan)
  logits = jnp.stack([finite, with_forbidden, all_forbidden, with_nan])
  np.testing.assert_allclose(top_k.log_sum_exp(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)
