"""The module of a spatial transformer: its initial region, its gradients, and user errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.spatial import affine_grid, bilinear_sample
from attention_jax.modules.spatial_transformer import SpatialTransformer
from tests.modules.helpers import assert_close, variables

PICTURES = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 9, 11, 3)), jnp.float32)
MODULE = SpatialTransformer(size=5, filters=4, hidden=6)


@pytest.mark.long
def test_the_initial_region_is_the_whole_picture():
  (regions, theta), params = jax.jit(lambda rng: MODULE.init_with_output(rng, PICTURES))(jax.random.key(0))
  np.testing.assert_array_equal(theta, np.broadcast_to([[1, 0, 0], [0, 1, 0]], (2, 2, 3)))
  grid = affine_grid(theta[0], 5, 5)
  assert_close(regions, jnp.stack([bilinear_sample(picture, grid) for picture in PICTURES]))
  gradients = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(MODULE.apply(params, PICTURES)[0]))))(params)
  assert np.all(np.isfinite(gradients['params']['transform']['bias']))
  assert np.any(gradients['params']['transform']['kernel'] != 0)


@pytest.mark.long
def test_an_upright_window_has_three_parameters():
  module = MODULE.clone(transform='attention', dtype=jnp.bfloat16)
  params = variables(module, PICTURES, scale=0.1)
  assert params['params']['transform']['bias'].shape == (3,)
  regions, theta = jax.eval_shape(module.apply, params, PICTURES)
  assert regions.shape == (2, 5, 5, 3) and regions.dtype == theta.dtype == jnp.float32


def test_an_unknown_transform_is_reported():
  with pytest.raises(aj.UserError, match=r"unknown transform 'afine'.*expected one of: affine, attention"):
    variables(MODULE.clone(transform='afine'), PICTURES)
