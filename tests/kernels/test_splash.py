"""Implementation 'splash' equals the definition for every pair and mask that it accepts, in Pallas' interpreter."""

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import Product, lookup
from attention_jax.kernels.target import compile_for

ROOT = Path(__file__).parents[2]
T, D, V = 20, 8, 6
ALIGNMENTS = ('softmax(temperature=2.0)', 'capped_softmax(cap=2.0)', 'sink_softmax', 'scalable_softmax')
ALIGNMENTS += ('softmax(temperature=0.5, length_scale=0.7, cap=2.0, sink=True)',)
PRODUCTS = [score for score, row in aj.SCORES.items() if isinstance(row.form, Product)]
PAIRS = list(itertools.product(PRODUCTS, ALIGNMENTS))
LENGTHS = jnp.array([[0], [13]])
SEGMENTS = jnp.sort(jax.random.randint(jax.random.key(0), (2, 1, T), 0, 4))
KEYS = jax.random.bernoulli(jax.random.key(1), 0.5, (2, 1, 1, T))
MASKS = {
  'none': aj.Mask(),
  'causal': aj.Mask.causal(),
  'window': aj.Mask.window(3, 1),
  'sinks': aj.Mask.window(3, 0, sinks=2) & aj.Mask.causal(),
  'lengths': aj.Mask.lengths(LENGTHS),
  'causal lengths': aj.Mask.causal() & aj.Mask.lengths(LENGTHS),
  'segments': aj.Mask.segments(SEGMENTS) & aj.Mask.causal(),
  'array that queries share': aj.Mask.array(KEYS),
}


def make_inputs(shapes=((2, 2, T, D), (2, 2, T, D), (2, 2, T, V)), dtype=jnp.float32):
  rngs = jax.random.split(jax.random.key(2), 3)
  return [jax.random.normal(rng, shape, dtype) for rng, shape in zip(rngs, shapes, strict=True)]


def results(implementation, inputs, mask, params=None, **options):
  """Returns the context, and the gradients of the inputs and the parameters."""

  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def gradients(inputs, params):
    context = aj.attend(
      *inputs, mask, params=params, implementation=implementation, return_weights=False, **options
    ).context
    weights = jnp.cos(jnp.arange(context.size, dtype=jnp.float32)).reshape(context.shape)
    return jnp.sum(context.astype(jnp.float32) * weights), context

  with compile_for('interpret'):
    return jax.jit(gradients)(inputs, params)


def assert_equal_results(inputs, mask, tolerance=1e-5, **options):
  actual, expected = (results(name, inputs, mask, **options) for name in ('splash', 'xla'))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x.astype(jnp.float32), y.astype(jnp.float32), rtol=2 * tolerance, atol=tolerance
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize(('score', 'alignment'), PAIRS, ids=map('-'.join, PAIRS))
def test_every_pair_equals_the_definition(score, alignment):
  params = aj.init_params(jax.random.key(3), score=score, alignment=alignment, query=D, key=D, features=D)
  shapes = ((T, D), (T, D), (T, V))
  assert_equal_results(make_inputs(shapes), aj.Mask.causal(), params=params, score=score, alignment=alignment)


@pytest.mark.parametrize('name', MASKS)
def test_every_mask_equals_the_definition(name):
  """Queries without positions get zeros."""
  assert_equal_results(make_inputs(), MASKS[name])


@pytest.mark.long
@pytest.mark.parametrize(('query_heads', 'key_heads'), [((1, 4), (1, 1)), ((2, 2), (2, 1)), ((2, 2), (1, 2))])
def test_heads_share_keys_and_values(query_heads, key_heads):
  """More queries than positions, none of them a multiple of the blocks."""
  shapes = ((2, *query_heads, 130, D), (2, *key_heads, T, D), (2, *key_heads, T, V))
  assert_equal_results(make_inputs(shapes), aj.Mask.lengths(jnp.array([5, T])[:, None, None]))


@pytest.mark.long
@pytest.mark.parametrize(('lengths', 'keys'), [(None, 'f32[4,128,128]'), ([4, T], 'f32[2,2,128,128]')])
def test_the_module_passes_shared_heads_without_copies(lengths, keys):
  """Each of two heads of keys is read by two heads of queries. A causal mask alone has no arrays."""
  attention = aj.Attention('scaled_dot', features=4 * D, heads=4, kv_heads=2, implementation='splash')
  x = jax.random.normal(jax.random.key(0), (2, T, 3))
  mask = aj.Mask.causal() & (aj.Mask() if lengths is None else aj.Mask.lengths(jnp.array(lengths)))

  def attend(module, x):
    return module.parallel(x, module.remember(x, mask), return_weights=False).context

  with compile_for('interpret'):
    params = attention.init(jax.random.key(1), x, method=attend)
    apply = functools.partial(attention.apply, method=attend)
    copied = jax.make_jaxpr(apply)(params, x)
    actual = jax.jit(apply)(params, x)
  assert keys in str(copied)  # [B G, S, D] or [B, G, S, D], padded
  expected = jax.jit(functools.partial(attention.clone(implementation='xla').apply, method=attend))(params, x)
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.long
def test_bfloat16_and_weights():
  inputs = make_inputs(dtype=jnp.bfloat16)
  assert_equal_results(inputs, aj.Mask.causal(), tolerance=0.05)
  with compile_for('interpret'):
    attended = aj.attend(*inputs, aj.Mask.causal(), implementation='splash')
  expected = aj.attend(*inputs, aj.Mask.causal()).weights
  np.testing.assert_array_equal(attended.weights, expected)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'mask': aj.causal_mask(T)}, 'must not be an array that differs between queries; expected a Mask of bands'),
    ({'mask': aj.Mask.causal().at(3)}, 'the queries must start at position 0'),
    ({'bias': jnp.zeros((T, T))}, 'the kernel takes no bias'),
    ({'alignment': 'sparsemax'}, 'the alignment is not softmax'),
    ({'alignment': aj.with_dropout(lookup('softmax', aj.ALIGNMENTS, 'alignment'), 0.1)}, 'no dropout'),
    ({'score': 'additive'}, 'the score is not a product'),
  ],
)
def test_what_the_kernel_lacks_is_refused(changes, message):
  params = aj.init_params(jax.random.key(3), score='additive', query=D, key=D, features=D)
  options = {'params': params} if 'score' in changes else {}
  with compile_for('interpret'), pytest.raises(aj.UserError, match=message):
    aj.attend(*make_inputs(), **options, implementation='splash', **changes)
  with pytest.raises(aj.UserError, match="'splash' cannot compute this: needs a TPU, got platform cpu"):
    aj.attend(*make_inputs(), implementation='splash')


def test_auto_uses_it_for_long_sequences_without_weights():
  query = jax.ShapeDtypeStruct((1024, D), jnp.float32)

  def lowered(**options):
    with compile_for('interpret'):
      return str(jax.make_jaxpr(lambda x: aj.attend(x, x, x, implementation='auto', **options))(query))

  assert 'splash' not in lowered()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('attention_jax.kernels.auto.ESTIMATED', {'interpret': ('splash',)})
    assert 'splash' in lowered(return_weights=False)
    assert 'splash' not in lowered(return_weights=True)


@pytest.mark.long
@pytest.mark.parametrize('topology', ['v5e:1x1', 'v5p:2x2x1', 'v6e:1x1'])
def test_it_is_compiled_for_tpus(topology):
  """Ahead of time, forward and backward, over a mesh. One array [T, S] of a sequence would take 64 MB."""
  libtpu = Path(sys.prefix) / 'libtpu'
  if not libtpu.exists():
    pytest.skip(f'needs the TPU compiler in {libtpu}, which make test-all installs')
  flags = ['--implementation=splash', '--score=scaled_dot', '--lengths=4096', '--causal', '--features=128']
  environment = os.environ | {'PYTHONPATH': str(libtpu), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-m', 'lab.compile_for_tpu', f'--topology={topology}', *flags]
  result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  megabytes = [int(x) for x in re.findall(r'(\d+) MB temporary', result.stdout)]
  assert len(megabytes) == 4 and max(megabytes) < 64
