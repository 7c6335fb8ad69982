"""The mask and weights contract for random shapes, masks, inputs and masked content."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_jax as aj

# Few shapes and pairs, so that most examples need no compilation.
SHAPES = [(1, 1), (3, 2), (2, 7)]  # queries and positions
PAIRS = [('scaled_dot', 'softmax'), ('cosine', 'sparsemax'), ('coverage', 'entmax15'), ('dot', 'entmax(alpha=1.2)')]
# Pairs whose weights may sum to less than 1: a window may be empty, and mass may move past the end.
PARTIAL_PAIRS = [
  ('dot', 'local_m(width=1)'),
  ('general', 'local_p(width=2)'),
  ('offset_additive', 'monotonic'),
  ('dot', 'mocha(width=2)'),
  ('fertility', 'forward_agent'),
  ('location_sensitive(width=3)', 'windowed(width=2)'),
  ('dot', 'latent_monotonic'),
]
WIDTH = 5


@functools.cache
def compiled(score, alignment):
  """Returns a compiled function (query, key, value, mask) -> ((loss, attended), gradients)."""
  params = aj.init_params(jax.random.key(0), score=score, alignment=alignment, query=WIDTH, key=WIDTH, features=WIDTH)

  def run(query, key, value, mask):
    attended = aj.attend(query, key, value, mask, score=score, alignment=alignment, params=params)
    return jnp.sum(attended.context**2), attended

  return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))


@st.composite
def problems(draw):
  queries, size = draw(st.sampled_from(SHAPES))
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 100.0]))

  def array(*shape):
    return np.asarray(scale * random.normal(size=shape), np.float32)

  mask_row = st.lists(st.booleans(), min_size=size, max_size=size)
  mask = np.array(draw(st.lists(mask_row, min_size=queries, max_size=queries)))
  return array(queries, WIDTH), array(size, WIDTH), array(size, WIDTH), mask


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.sampled_from(PAIRS + PARTIAL_PAIRS), problems(), st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -7.0]))
def test_contract_holds_for_any_mask(pair, problem, filler):
  query, key, value, mask = problem
  run = compiled(*pair)
  result = jax.device_get(run(query, key, value, mask))
  (_, attended), gradients = result
  total = attended.weights.sum(-1)
  is_attending = mask.any(-1)
  assert np.all(attended.weights[~mask] == 0) and np.all(attended.weights >= 0)
  if pair in PAIRS:
    np.testing.assert_allclose(total, is_attending, atol=1e-5)
  assert np.all(total <= is_attending + 1e-5)
  assert np.all(attended.context[~is_attending] == 0) and np.all(gradients[0][~is_attending] == 0)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))

  is_used = mask.any(0)[:, None]
  filled_key = np.where(is_used, key, np.float32(filler))
  filled_value = np.where(is_used, value, np.float32(filler))
  filled_result = jax.device_get(run(query, filled_key, filled_value, mask))
  jax.tree.map(np.testing.assert_array_equal, filled_result, result)
