"""The cross entropy of a linear output, computed in chunks of steps, equals that of all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attention_jax.losses import vocabulary
from attention_jax.losses.sequence import cross_entropy
from attention_jax.modules.linear import product
from attention_jax.modules.outputs import LinearLogits
from tests.losses.helpers import B, T, V
from tests.modules.helpers import assert_close


@pytest.mark.long
@pytest.mark.parametrize(('max_logits', 'smoothing'), [(1, 0.0), (2 * B * V, 0.1), (2**21, 0.1)])
def test_linear_cross_entropy_equals_cross_entropy_of_all_logits(case, monkeypatch, max_logits, smoothing):
  monkeypatch.setattr(vocabulary, 'MAX_LOGITS', max_logits)
  _, target, mask = case
  rng = np.random.default_rng(0)
  linear = LinearLogits(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, 4), (4, V), (V,))))
  dirty = linear._replace(features=jnp.where(mask[..., None], linear.features, 1e30))

  def by_chunks(linear):
    loss, accuracy = vocabulary.linear_cross_entropy(linear, target, mask, smoothing)
    return 3 * loss, accuracy  # the cotangent of the loss is not 1

  def at_once(linear):
    sums = cross_entropy(linear.logits(), target, mask, smoothing)
    return 3 * sums['loss'], sums['accuracy']

  for transform in (lambda fn: fn, functools.partial(jax.value_and_grad, has_aux=True)):
    actual, expected = (jax.jit(transform(fn)) for fn in (by_chunks, at_once))
    for features in (linear, dirty):
      assert_close(actual(features), expected(linear), rtol=1e-5)


@pytest.mark.long
def test_the_first_of_equal_logits_is_the_prediction():
  linear = LinearLogits(jnp.ones((1, 3, 2), jnp.bfloat16), jnp.ones((2, V)), jnp.zeros(V).at[0].set(-1.0))
  target = jnp.array([[1, 2, 0]])
  mask = jnp.ones((1, 3), bool)
  assert jax.jit(lambda: vocabulary.linear_cross_entropy(linear, target, mask, 0.0))()[1] == 1
  assert cross_entropy(linear.logits(), target, mask)['accuracy'] == 1


def test_the_compiled_gradient_of_a_tied_table_in_bfloat16_is_close_to_float32():
  rng = np.random.default_rng(0)
  features = jnp.asarray(rng.normal(size=(8, 16, 32)), jnp.bfloat16)
  table = jnp.asarray(rng.normal(size=(V, 32)), jnp.float32)
  target = jnp.asarray(rng.integers(V, size=(8, 16)))
  mask = jnp.ones(target.shape, bool)

  def tied_loss(table, features):
    return vocabulary.linear_cross_entropy(LinearLogits(features, table.T, jnp.zeros(V)), target, mask, 0.1)[0]

  actual = jax.jit(jax.grad(tied_loss))(table, features)
  expected = jax.jit(jax.grad(tied_loss))(table, features.astype(jnp.float32))
  np.testing.assert_allclose(actual, expected, rtol=0, atol=0.01 * float(jnp.abs(expected).max()))


@pytest.mark.long
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_kernel_within_shard_map_is_a_sum_over_the_devices(dtype):
  rng = np.random.default_rng(0)
  kernels = tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((32, 32), (32, V)))
  features = jnp.asarray(rng.normal(size=(4, 6, 32)), dtype)
  target = jnp.asarray(rng.integers(V, size=(4, 6)))

  def gradient(kernels, features, target):
    def loss(kernels):
      linear = LinearLogits(product(features, kernels[0]), kernels[1], jnp.zeros(V))
      return vocabulary.linear_cross_entropy(linear, target, jnp.ones(target.shape, bool), 0.1)[0]

    return jax.grad(loss)(kernels)

  mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P('data'), P('data')), out_specs=P())
  for actual, expected in zip(
    jax.jit(sharded)(kernels, features, target), jax.jit(gradient)(kernels, features, target), strict=True
  ):
    atol = 0.02 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (actual, expected)), rtol=0, atol=atol)
