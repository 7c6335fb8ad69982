"""The mask and weights contract for random masks, scores of every size and masked content, in one batch per pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj

EXAMPLES, T, S, WIDTH = 60, 3, 4, 5
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
SCALES = [0.0, 1e-3, 1.0, 100.0]
FILLERS = [np.nan, np.inf, -np.inf, 1e30, -7.0]


def draw_examples():
  """Returns query, key, value and mask of all examples; each scale meets each number of unmasked positions."""
  random = np.random.default_rng(0)
  scales = np.resize(SCALES, EXAMPLES)[:, None, None]
  arrays = [scales * random.normal(size=(EXAMPLES, size, WIDTH)) for size in (T, S, S)]
  rates = np.repeat([0.0, 0.2, 0.5, 0.8, 1.0], EXAMPLES // 5)
  mask = random.random((EXAMPLES, T, S)) < rates[:, None, None]
  return [np.asarray(x, np.float32) for x in arrays], mask


@pytest.mark.parametrize(('score', 'alignment'), PAIRS + PARTIAL_PAIRS)
def test_contract_holds_for_any_mask(score, alignment):
  params = aj.init_params(jax.random.key(0), score=score, alignment=alignment, query=WIDTH, key=WIDTH, features=WIDTH)

  def loss(query, key, value, mask):
    attended = aj.attend(query, key, value, mask, score=score, alignment=alignment, params=params)
    return jnp.sum(attended.context**2), attended

  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

  def run(*arguments):
    return jax.device_get(compiled(*arguments))

  (query, key, value), mask = draw_examples()
  result = run(query, key, value, mask)
  (_, attended), gradients = result
  total = attended.weights.sum(-1)
  is_attending = mask.any(-1)
  assert np.all(attended.weights[~mask] == 0) and np.all(attended.weights >= 0)
  if (score, alignment) in PAIRS:
    np.testing.assert_allclose(total, is_attending, atol=1e-5)
  assert np.all(total <= is_attending + 1e-5)
  assert np.all(attended.context[~is_attending] == 0) and np.all(gradients[0][~is_attending] == 0)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))

  is_used = mask.any(1)[..., None]
  fillers = np.resize(FILLERS, EXAMPLES).astype(np.float32)[:, None, None]
  filled = run(query, *(np.where(is_used, x, fillers) for x in (key, value)), mask)
  jax.tree.map(np.testing.assert_array_equal, filled, result)
