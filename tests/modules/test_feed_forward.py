"""Feed-forward networks and norms against NumPy; shared heads of keys and values against unshared ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.transformer import ACTIVATIONS, EPSILON, NORMS, FeedForward, Residual, make_norm
from tests.modules.helpers import assert_close, attend_all, draw

B, T, D, HIDDEN = 2, 3, 5, 7


def dense(x, params):
  return x @ params['kernel'] + params.get('bias', 0)


LITERAL = {
  'relu': lambda x: np.maximum(0, x),
  'gelu': np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
  'gelu_new': np.vectorize(lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
  'silu': lambda x: x / (1 + np.exp(-x)),
}
LITERAL |= {'swiglu': LITERAL['silu'], 'geglu': LITERAL['gelu'], 'geglu_new': LITERAL['gelu_new']}


def random_params(module, x):
  """Returns random parameters; initial biases and gains are 0 or 1, which would hide errors."""
  params = module.init(jax.random.key(0), x)['params']
  leaves, tree = jax.tree.flatten(params)
  return jax.tree.unflatten(tree, [np.asarray(0.5 + draw(*leaf.shape)) for leaf in leaves])


@pytest.mark.long
@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_feed_forward_equals_numpy(activation):
  """v(f(x U)), or (f(x U) * x W) V without biases."""
  module = FeedForward(D, HIDDEN, activation)
  x = draw(B, T, D)
  params = random_params(module, x)
  # flax numbers the layers in the order of their construction: U, V, W.
  u, v, *w = (params[f'Dense_{i}'] for i in range(len(params)))
  assert bool(w) == ('glu' in activation) == ('bias' not in u)
  hidden = LITERAL[activation](dense(np.asarray(x, np.float64), u)) * (dense(np.asarray(x), w[0]) if w else 1)
  np.testing.assert_allclose(module.apply({'params': params}, x), dense(hidden, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('norm', NORMS)
def test_norms_equal_numpy(norm):
  module = make_norm(norm, jnp.float32)
  x = draw(B, T, D)
  params = random_params(module, x)
  centred = np.asarray(x, np.float64)
  if norm == 'layer':
    centred = centred - centred.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * params['scale']
  if norm == 'layer':
    expected = expected + params['bias']
  np.testing.assert_allclose(module.apply({'params': params}, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_residual_connection_has_dropout_of_the_result_alone():
  x = draw(B, T, 400)
  norm = make_norm('layer', jnp.float32)
  params = random_params(norm, x)

  def add_ones(norm_first, deterministic):
    module = Residual(norm_first=norm_first, dropout=0.25)
    variables = {'params': {'LayerNorm_0': params}}
    rngs = {'dropout': jax.random.key(0)}
    return module.apply(variables, lambda y: (jnp.ones_like(y), ()), x, deterministic, rngs=rngs)[0]

  is_kept = np.asarray(add_ones(True, False) - x) > 0.5
  assert 0.7 < is_kept.mean() < 0.8
  for deterministic, summand in ((False, is_kept / 0.75), (True, np.ones(x.shape))):
    total = x + summand.astype(np.float32)
    np.testing.assert_allclose(add_ones(True, deterministic), total, rtol=1e-5, atol=1e-6)
    expected = norm.apply({'params': params}, total)
    np.testing.assert_allclose(add_ones(False, deterministic), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('groups', [1, 2])
def test_shared_heads_equal_heads_with_repeated_keys_and_values(groups):
  shared, unshared = (aj.Attention('scaled_dot', 'softmax', 8, heads=4, kv_heads=n) for n in (groups, 0))
  inputs = draw(B, T, 6), draw(B, 5, 6), jnp.ones((B, 5), bool).at[1, 3:].set(False)
  params = jax.jit(functools.partial(shared.init, method=attend_all))(jax.random.key(0), *inputs)['params']
  kernels = {name: params[name]['kernel'] for name in ('key_kernel', 'value_kernel')}
  assert {kernel.shape[0] for kernel in kernels.values()} == {groups}
  repeated = {name: {'kernel': jnp.repeat(kernel, 4 // groups, axis=0)} for name, kernel in kernels.items()}
  actual = jax.jit(functools.partial(shared.apply, method=attend_all))({'params': params}, *inputs)
  expected = jax.jit(functools.partial(unshared.apply, method=attend_all))({'params': params | repeated}, *inputs)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)
