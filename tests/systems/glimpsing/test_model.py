"""The network of a spatial transformer in the system of glimpses: its outputs, its loss and its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.config import default_run_config
from attention_jax.systems.glimpsing.data import DigitBatch
from attention_jax.systems.glimpsing.glimpses import GlimpseConfig, GlimpseNetwork
from attention_jax.systems.glimpsing.model import SpatialTransformerNetwork
from attention_jax.systems.glimpsing.system import _build, _loss
from attention_jax.training.config import Training
from attention_jax.training.loss import OBJECTIVE_RNG
from tests.modules.helpers import variables

NETWORK = 'spatial_transformer(filters=4, transform="attention")'
MODEL = GlimpseConfig(NETWORK, size=6, hidden=5, features=7)
PICTURES = np.random.default_rng(0).integers(0, 255, (3, 12, 10, 1)).astype(np.uint8)


def test_the_spec_selects_the_network():
  assert type(_build(GlimpseConfig(), 3)) is GlimpseNetwork
  assert _build(MODEL, 3) == SpatialTransformerNetwork(3, 6, 5, 7, 'attention', 4)
  for spec, message in (
    ('spacial_transformer', r"unknown network 'spacial.*did you mean 'spatial_transformer'"),
    ('spatial_transformer(size=3)', "unknown option of network 'spatial_transformer': 'size'"),
  ):
    with pytest.raises(UserError, match=message):
      _build(GlimpseConfig(spec), 3)


@pytest.mark.long
def test_the_loss_is_the_cross_entropy_alone_and_has_gradients_everywhere():
  network = _build(MODEL, 3)
  floats = jnp.asarray(PICTURES / 255, jnp.float32)
  params = variables(network, floats, jnp.zeros((3, 2)), scale=0.3)['params']
  batch = DigitBatch(PICTURES, np.array([0, 1, 2], np.int32), np.array([0, 1, -1], np.int32))  # the last is a filler
  loss = _loss(network, dataclasses.replace(default_run_config('glimpsing'), model=MODEL), Training())

  def total(params):
    sums = loss(params, batch, {OBJECTIVE_RNG: jax.random.key(0)})
    return sums['loss'], sums

  (value, sums), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  outputs = jax.jit(lambda params: network.apply({'params': params}, floats, None))(params)
  log_probs = np.asarray(jax.nn.log_softmax(outputs.logits))
  np.testing.assert_allclose(value, -log_probs[[0, 1], [0, 1]].sum(), rtol=1e-4)
  assert sums['reinforce'] == sums['baseline'] == 0 and sums['tokens'] == 2
  assert all(np.any(leaf != 0) and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
  assert outputs.locations.shape == (3, 1, 2) and outputs.transforms.shape == (3, 1, 2, 3)
  np.testing.assert_array_equal(outputs.locations[:, 0], outputs.transforms[:, 0, ::-1, 2])
