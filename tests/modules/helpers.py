"""Helpers of tests: random parameters without compiled initialisers, and comparisons of trees."""

import jax
import jax.numpy as jnp
import numpy as np

RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1), 'attention': jax.random.key(2)}


def draw(*shape: int, seed: int = 0) -> jax.Array:
  """Returns standard normal numbers, a function of the shape and the seed."""
  return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def variables(module, *args, seed: int = 0, scale: float = 0.7, **options):
  """Returns variables with the structure of `module.init(..., *args, **options)` and normal numbers times `scale`."""
  shapes = jax.eval_shape(lambda: module.init(RNGS, *args, **options))
  random = np.random.default_rng(seed)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes)), 'parameters are float32'
  return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * scale, jnp.float32), shapes)


def attend_all(module, query, encoded, mask, **options):
  """Attends with all queries at once."""
  return module.parallel(query, module.remember(encoded, mask), **options)


def assert_close(actual, desired, rtol: float = 1e-4, atol: float = 1e-5):
  """Asserts that two trees have the same structure and nearly equal numbers."""
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, desired)


def assert_same(actual, desired):
  """Asserts that two trees have the same structure, dtypes and bits."""
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), actual, desired)


def gradient_error_of_16_bits(make_module, params, *args) -> float:
  """Returns the largest difference of gradients in bfloat16 and float32, relative to the largest entry of each leaf.

  The first output of make_module(dtype) is summed with random weights of mean 1.
  """

  def gradient(dtype):
    def loss(params):
      output = jax.tree.leaves(make_module(dtype).apply(params, *args))[0].astype(jnp.float32)
      return (output * (1 + draw(*output.shape))).sum()

    return jax.jit(jax.grad(loss))(params)

  errors = jax.tree.map(
    lambda actual, desired: float(jnp.abs(actual - desired).max() / jnp.abs(desired).max()),
    gradient(jnp.bfloat16),
    gradient(jnp.float32),
  )
  return max(jax.tree.leaves(errors))


def assert_padding_has_no_gradient(layer, inputs, mask):
  """Asserts that gradients reach all parameters and unmasked inputs, and are finite if the padding is NaN."""
  params = variables(layer, inputs, mask)

  def loss(params, inputs):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(layer.apply(params, inputs, mask)))

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  gradients, input_gradients = gradient(params, jnp.where(mask[..., None], inputs, jnp.nan))
  assert all(np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))
  assert np.all((input_gradients != 0).any(-1) == mask)
