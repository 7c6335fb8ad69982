"""The contract for shapes, masks, numbers and fillings that nobody thought of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_jax as aj

# Few shapes and pairs, so that most examples find their program compiled.
SHAPES = [(1, 1), (3, 2), (2, 7)]
PAIRS = [('scaled_dot', 'softmax'), ('cosine', 'sparsemax'), ('coverage', 'entmax15'), ('dot', 'entmax(alpha=1.2)')]
# Their weights may sum to less than 1: a window that holds nothing, mass that runs off the end.
PARTIAL = [
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
  params = aj.init_params(jax.random.key(0), score=score, alignment=alignment, query=WIDTH, key=WIDTH, features=WIDTH)

  def run(query, key, value, mask):
    attended = aj.attend(query, key, value, mask, score=score, alignment=alignment, params=params)
    return jnp.sum(attended.context**2), attended

  return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))


@st.composite
def problems(draw):
  queries, size = draw(st.sampled_from(SHAPES))
  numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 100.0]))
  array = lambda *shape: np.asarray(scale * numbers.normal(size=shape), np.float32)
  row = st.lists(st.booleans(), min_size=size, max_size=size)
  mask = np.array(draw(st.lists(row, min_size=queries, max_size=queries)))
  return array(queries, WIDTH), array(size, WIDTH), array(size, WIDTH), mask


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.sampled_from(PAIRS + PARTIAL), problems(), st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -7.0]))
def test_the_contract_holds_for_any_mask(pair, problem, filler):
  query, key, value, mask = problem
  run = compiled(*pair)
  (_, attended), gradients = result = jax.device_get(run(*problem))
  total = attended.weights.sum(-1)
  assert np.all(attended.weights[~mask] == 0) and np.all(attended.weights >= 0)
  if pair in PAIRS:
    np.testing.assert_allclose(total, mask.any(-1), atol=1e-5)
  assert np.all(total <= mask.any(-1) + 1e-5)
  assert np.all(attended.context[~mask.any(-1)] == 0) and np.all(gradients[0][~mask.any(-1)] == 0)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))

  seen = mask.any(0)[:, None]
  other = run(query, np.where(seen, key, np.float32(filler)), np.where(seen, value, np.float32(filler)), mask)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(other), result)
