"""What stands around the kernel of NVIDIA: the contract holds. XLA stands in for the kernel itself here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import attention_jax as aj
from attention_jax.functional.table import Product
from attention_jax.kernels import cudnn

B, T, S, D, V = 2, 5, 7, 6, 11
OWN = jnp.asarray(np.random.default_rng(0).random((B, T, S)) < 0.5).at[0, 3].set(False)
BIAS = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, S)), jnp.float32).at[1, 2].set(-jnp.inf)


def problem(dtype=jnp.bfloat16, features=D):
  draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)
  return draw(B, T, features), draw(B, S, features), draw(B, S, V)


def run(implementation, given, mask=None, **options):
  options = {'score': 'scaled_dot', 'return_weights': False, 'params': {}} | options
  return aj.attend(*given, mask, implementation=implementation, **options)


@pytest.mark.parametrize('bias', [None, BIAS], ids=['plain', 'biased'])
@pytest.mark.parametrize('score', [name for name, row in aj.SCORES.items() if isinstance(row.form, Product)])
def test_it_equals_the_definition(monkeypatch, score, bias):
  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')
  params = aj.init_params(jax.random.key(0), score=score, query=D, key=D, features=D)
  options = {'score': score, 'alignment': 'softmax(temperature=0.7)', 'params': params, 'bias': bias}
  given = problem()
  found, expected = (run(name, given, OWN, **options) for name in ('cudnn', 'xla'))
  assert found.weights is None and found.context.dtype == jnp.bfloat16
  weights = [run(name, given, OWN, **options, return_weights=True).weights for name in ('cudnn', 'xla')]
  np.testing.assert_allclose(*weights, atol=0.03)
  assert np.all(weights[0][0, 3] == 0)
  close = lambda x, y: np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=0.03, atol=0.03)
  close(found.context, expected.context)
  assert np.all(found.context[0, 3] == 0)
  loss = lambda name: lambda given: jnp.sum(jnp.sin(run(name, given, OWN, **options).context.astype(jnp.float32)))
  jax.tree.map(close, *(jax.grad(loss(name))(given) for name in ('cudnn', 'xla')))


N = 4
HEADS = jnp.asarray(np.random.default_rng(2).normal(size=(N, T, S)), jnp.float32)
# What the kernel is given: sequences and heads of q, and those of the mask and of the bias where there is one.
CASES = {
  'none': (None, None, (1, B * N), (1, 1), None),
  'causal': (aj.causal_mask(S)[:T], None, (1, B * N), (1, 1), None),
  'padding': (aj.padding_mask(jnp.asarray([S, 4]), S)[:, None, None], None, (B, N), (B, 1), None),
  'of every head': (jnp.stack([OWN] * N, 1), None, (B * N, 1), (B * N, 1), None),
  'biased': (OWN[:, None], HEADS, (B * N, 1), (B * N, 1), (B * N, 1)),  # -inf of a bias is in the mask
}


def in_heads(dtype=jnp.bfloat16):
  draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)
  return draw(B, N, T, D), draw(B, N, S, D), draw(B, N, S, V)


@pytest.mark.parametrize(('mask', 'bias', 'rows', 'masks', 'biases'), CASES.values(), ids=CASES)
def test_a_batch_with_heads_is_one_call(monkeypatch, mask, bias, rows, masks, biases):
  """In training it takes no odd numbers of queries and keys beside a mask; T and S are odd here."""
  seen, kernel = [], jax.nn.dot_product_attention

  def watched(q, k, v, bias, mask, **options):
    seen.append((q.shape, k.shape, mask.shape, None if bias is None else bias.shape))
    return kernel(q, k, v, bias, mask, **options)

  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')
  monkeypatch.setattr(jax.nn, 'dot_product_attention', watched)

  def loss(given, bias, name):
    return jnp.sum(jnp.sin(run(name, given, mask, bias=bias).context.astype(jnp.float32)))

  wanted = 0 if bias is None else (0, 1)
  found, expected = (jax.grad(loss, wanted)(in_heads(), bias, name) for name in ('cudnn', 'xla'))
  close = lambda x, y: np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=0.05, atol=0.05)
  jax.tree.map(close, found, expected)
  square = (T + 1, S + 1)
  size = lambda rows, n: (rows[0], n, rows[1], 16)
  expected = size(rows, T + 1), size(rows, S + 1), (*masks, *square), None if bias is None else (*biases, *square)
  assert seen[-1] == expected  # those before are of one sequence and of one axis, traced on the way there


@pytest.mark.parametrize('kv_heads', [0, 2])
def test_what_the_kernel_is_given_is_what_it_takes(monkeypatch, kv_heads):
  """Its own checks of shapes, of all of them under vmap, run where there is no GPU; nothing is compiled."""
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91900)
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')
  heads = {'heads': 4, 'kv_heads': kv_heads, 'implementation': 'cudnn', 'dtype': jnp.bfloat16}
  module = aj.Attention('scaled_dot', features=64, **heads)
  x, mask = jnp.ones((2, 7, 64)), aj.padding_mask(jnp.asarray([7, 4]), 7)
  look = lambda module, x: module.parallel(x, module.remember(x, mask), return_weights=False).context
  params = jax.eval_shape(lambda: module.init(jax.random.key(0), x, method=look))
  loss = lambda params, x: module.apply(params, x, method=look).astype(jnp.float32).sum()
  slopes = jax.eval_shape(jax.grad(loss, (0, 1)), params, x)
  assert slopes[1].shape == x.shape


def test_what_it_cannot_do_it_says(monkeypatch):
  with pytest.raises(aj.UserError, match="'cudnn' cannot compute this: needs an NVIDIA GPU, this machine has cpu"):
    run('cudnn', problem())
  with pytest.raises(aj.UserError, match="'cudnn' cannot compute this: the alignment is not softmax"):
    run('cudnn', problem(), alignment='sparsemax')
  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')
  for mixed in (problem(jnp.float32), (*problem(jnp.float32)[:2], problem()[2])):
    with pytest.raises(aj.UserError, match="in bfloat16 or float16, got float32; possible: 'flash'"):
      run('cudnn', mixed)
  with pytest.raises(aj.UserError, match='at most 128 features, got 130'):
    run('cudnn', problem(features=130))
