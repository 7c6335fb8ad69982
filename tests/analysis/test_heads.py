"""Gates of heads against gates on the values, the importance of each head, and pruning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import analysis
from attention_jax.errors import UserError
from tests.models.helpers import build_tiny, build_transformer, inputs
from tests.modules.helpers import attend_all

ATTENTION = aj.Attention('scaled_dot', features=6, heads=3)


@pytest.fixture(scope='module')
def transformer():
  model = build_transformer(heads=4)
  return model, jax.jit(model.init)(jax.random.key(0), *inputs())['params']


def attend(params, gates=None):
  """Returns the contexts of ATTENTION, with values times the gate of their head; without params, initial params."""
  query = jax.random.normal(jax.random.key(1), (2, 4, 5))
  encoded = jax.random.normal(jax.random.key(2), (2, 7, 5))

  def run(module):
    memory = module.remember(encoded, jnp.ones((2, 7), bool))
    if gates is not None:
      memory = memory._replace(value=memory.value * gates[None, :, None, None])
    return module.parallel(query, memory)

  if params is None:
    return jax.jit(lambda: ATTENTION.init(jax.random.key(0), method=run)['params'])()
  return jax.jit(lambda params: ATTENTION.apply({'params': params}, method=run).context)(params)


@pytest.mark.long
@pytest.mark.parametrize('path', ['', 'layer'])
def test_a_gate_multiplies_the_output_of_its_head(path):
  attention = attend(None)
  gates = jnp.array([0.0, 1.0, 2.5])
  gated = analysis.gate_heads({path: attention} if path else attention, {path: gates})
  actual = attend(gated[path] if path else gated)
  np.testing.assert_allclose(actual, attend(attention, gates), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_every_attention_with_several_heads_has_gates(transformer):
  gates = analysis.open_gates(transformer[1])
  assert len(gates) == 6  # two layers of the encoder, and two attentions in each of two layers of the decoder
  assert all(gate.shape == (4,) for gate in gates.values())
  model = build_tiny()
  assert analysis.open_gates(jax.eval_shape(model.init, jax.random.key(0), *inputs())['params']) == {}


@pytest.mark.long
def test_pairs_of_differential_attention_have_one_gate():
  attention = aj.Attention('scaled_dot', features=8, heads=4, differential=True)
  query, encoded = (jax.random.normal(jax.random.key(i), (2, size, 5)) for i, size in enumerate((4, 7)))

  def run(params):
    return attention.apply({'params': params}, query, encoded, None, method=attend_all).context

  params = attention.init(jax.random.key(0), query, encoded, None, method=attend_all)['params']
  assert analysis.open_gates(params)[''].shape == (2,)
  parts = [run(analysis.gate_heads(params, {'': jnp.eye(2)[pair]})) for pair in range(2)]
  np.testing.assert_allclose(sum(parts), run(params), rtol=1e-5, atol=1e-6)
  zeroed = params | {'value_kernel': {'kernel': params['value_kernel']['kernel'].at[0].set(0.0)}}
  np.testing.assert_allclose(parts[1], run(zeroed), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_parameters_of_one_attention_have_gates():
  params = attend(None)
  gates = analysis.open_gates(params)
  assert gates.keys() == {''} and gates[''].shape == (3,)
  pruned = analysis.prune_heads(params, {'': jnp.array([0.2, 0.1, 0.3])}, 1)
  np.testing.assert_allclose(attend(pruned), attend(params, jnp.array([1.0, 0.0, 1.0])), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_sensitivity_is_the_absolute_slope_of_the_loss(transformer):
  """The slope is the sum of kernel x gradient over the rows of a head, by the chain rule: its gate scales them."""
  model, params = transformer

  def loss(params):
    return model.apply({'params': params}, *inputs()).logits.std()

  sensitivity, gradient = jax.jit(lambda p: (analysis.head_sensitivity(loss, p), jax.grad(loss)(p)))(params)
  for side, block, name in (('decoder', 'blocks_1', 'cross'), ('encoder', 'blocks_0', 'attention')):
    kernel, slope = (tree[side][block][name]['join']['kernel'] for tree in (params, gradient))
    expected = abs((kernel * slope).reshape(4, -1).sum(1))
    np.testing.assert_allclose(sensitivity[f'{side}/{block}/{name}'], expected, rtol=1e-3, atol=1e-7)
    assert expected.min() > 1e-6


def test_the_least_important_heads_are_pruned(transformer):
  _, params = transformer
  importance = {path: jnp.arange(1.0, 5.0) for path in analysis.open_gates(params)}
  importance['encoder/blocks_0/attention'] = jnp.array([0.0, 5.0, 5.0, 5.0])
  pruned = analysis.prune_heads(params, importance, 1)
  kernel = params['encoder']['blocks_0']['attention']['join']['kernel']
  expected = kernel.at[: kernel.shape[0] // 4].set(0)
  np.testing.assert_array_equal(pruned['encoder']['blocks_0']['attention']['join']['kernel'], expected)
  changed = [x is not y and bool((x != y).any()) for x, y in zip(*map(jax.tree.leaves, (params, pruned)), strict=True)]
  assert sum(changed) == 1
  for count in (-1, 25):
    with pytest.raises(UserError, match=f'^count must be from 0 to 24, the number of heads, got {count}$'):
      analysis.prune_heads(params, importance, count)
