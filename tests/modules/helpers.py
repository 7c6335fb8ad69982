"""What these tests share: parameters that NumPy draws, for no initialiser has to be compiled, and comparisons."""

import jax
import jax.numpy as jnp
import numpy as np

RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1), 'attention': jax.random.key(2)}


def draw(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def variables(module, *args, seed: int = 0, scale: float = 0.7, **options):
  """What `module.init(..., *args, **options)` would give in structure and shapes; every number is drawn, none is 0."""
  shapes = jax.eval_shape(lambda: module.init(RNGS, *args, **options))
  random = np.random.default_rng(seed)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes)), 'parameters are float32'
  return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * scale, jnp.float32), shapes)


def assert_close(one, other, rtol: float = 1e-4, atol: float = 1e-5):
  """Trees of equal structure and equal numbers, up to rounding in another order."""
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), one, other)


def assert_same(one, other):
  """Equal bit for bit."""
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), one, other)
