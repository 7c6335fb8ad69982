"""What stands around the kernel of NVIDIA: the contract holds. XLA stands in for the kernel itself here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
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
@pytest.mark.parametrize('score', [name for name, row in aj.SCORES.items() if row.product])
def test_it_equals_the_definition(monkeypatch, score, bias):
  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'here', lambda: 'gpu')
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


def test_the_kernel_itself_sees_even_sizes(monkeypatch):
  """In training it takes no odd numbers of queries and keys beside a mask; T and S are odd here."""
  seen, kernel = [], jax.nn.dot_product_attention

  def watched(q, k, v, *rest, **options):
    seen.append((q.shape[1], k.shape[1], v.shape[1], *rest[1].shape[2:]))
    return kernel(q, k, v, *rest, **options)

  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'here', lambda: 'gpu')
  monkeypatch.setattr(jax.nn, 'dot_product_attention', watched)
  run('cudnn', problem(), OWN)
  assert seen == [(T + 1, S + 1, S + 1, T + 1, S + 1)]


def test_what_it_cannot_do_it_says(monkeypatch):
  with pytest.raises(aj.UserError, match="'cudnn' cannot compute this: needs an NVIDIA GPU, this machine has cpu"):
    run('cudnn', problem())
  with pytest.raises(aj.UserError, match="'cudnn' cannot compute this: the alignment is not softmax"):
    run('cudnn', problem(), alignment='sparsemax')
  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'here', lambda: 'gpu')
  for mixed in (problem(jnp.float32), (*problem(jnp.float32)[:2], problem()[2])):
    with pytest.raises(aj.UserError, match="in bfloat16 or float16, got float32; possible: 'flash'"):
      run('cudnn', mixed)
  with pytest.raises(aj.UserError, match='at most 128 features, got 130'):
    run('cudnn', problem(features=130))
