"""What stands in a Transformer beside its attention, against NumPy: every activation, every norm, shared heads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.transformer import ACTIVATIONS, EPSILON, NORMS, FeedForward, normalise
from tests.modules.helpers import draw

B, T, D, HIDDEN = 2, 3, 5, 7

sigmoid = lambda x: 1 / (1 + np.exp(-x))
gelu = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)
LITERAL = {
  'relu': lambda x, u, v: np.maximum(0, x @ u['kernel'] + u['bias']) @ v['kernel'] + v['bias'],
  'gelu': lambda x, u, v: gelu(x @ u['kernel'] + u['bias']) @ v['kernel'] + v['bias'],
  'swiglu': lambda x, u, w, v: (x @ u['kernel'] * sigmoid(x @ u['kernel']) * (x @ w['kernel'])) @ v['kernel'],
  'geglu': lambda x, u, w, v: (gelu(x @ u['kernel']) * (x @ w['kernel'])) @ v['kernel'],
}


def drawn(module, x):
  """Parameters of which none is 0 or 1, as they are at first."""
  params = module.init(jax.random.key(0), x)['params']
  leaves, tree = jax.tree.flatten(params)
  return jax.tree.unflatten(tree, [np.asarray(0.5 + draw(*leaf.shape)) for leaf in leaves])


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_feed_forward(activation):
  module, x = FeedForward(D, HIDDEN, activation), draw(B, T, D)
  params = drawn(module, x)
  layers = [params[f'Dense_{i}'] for i in ((0, 2, 1) if 'Dense_2' in params else (0, 1))]  # U, W, V, as they are made
  wanted = LITERAL[activation](np.asarray(x, np.float64), *layers)
  np.testing.assert_allclose(module.apply({'params': params}, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('norm', NORMS)
def test_norms(norm):
  module, x = normalise(norm, jnp.float32), draw(B, T, D)
  params = drawn(module, x)
  given = np.asarray(x, np.float64)
  centred = given - given.mean(-1, keepdims=True) if norm == 'layer' else given
  wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * params['scale']
  wanted = wanted + params['bias'] if norm == 'layer' else wanted
  np.testing.assert_allclose(module.apply({'params': params}, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('groups', [1, 2])
def test_shared_heads_are_heads_with_the_same_keys_and_values(groups):
  shared, every = (aj.Attention('scaled_dot', 'softmax', 8, heads=4, kv_heads=g) for g in (groups, 0))
  query, encoded, mask = draw(B, T, 6), draw(B, 5, 6), jnp.ones((B, 5), bool).at[1, 3:].set(False)
  at_once = lambda module, query, encoded, mask: module.parallel(query, module.remember(encoded, mask))
  params = shared.init(jax.random.key(0), query, encoded, mask, method=at_once)['params']
  assert params['key_kernel']['kernel'].shape[0] == params['value_kernel']['kernel'].shape[0] == groups
  spread = {
    name: jax.tree.map(lambda leaf: jnp.repeat(leaf, 4 // groups, axis=0), layer)
    if name in ('key_kernel', 'value_kernel')
    else layer
    for name, layer in params.items()
  }
  found, wanted = (
    module.apply({'params': own}, query, encoded, mask, method=at_once)
    for module, own in ((shared, params), (every, spread))
  )
  np.testing.assert_allclose(found.context, wanted.context, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-5, atol=1e-6)
