"""Implementation 'cudnn' satisfies the contract of kernels/api.py; here XLA replaces NVIDIA's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.functional.table import Product
from attention_jax.kernels import cudnn
from tests.sampled_cases import sample_cases

B, T, S, D, V = 2, 5, 7, 6, 11
N = 4
MASK = jnp.asarray(np.random.default_rng(0).random((B, T, S)) < 0.5).at[0, 3].set(False)
BIAS = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, S)), jnp.float32).at[1, 2].set(-jnp.inf)
HEADS_BIAS = jnp.asarray(np.random.default_rng(2).normal(size=(N, T, S)), jnp.float32)


@pytest.fixture
def xla_kernel(monkeypatch):
  """Runs 'cudnn' on this machine, with XLA in place of the kernel."""
  monkeypatch.setattr(cudnn, 'KERNEL', 'xla')
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')


def draw(shape, dtype):
  return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def make_inputs(dtype=jnp.bfloat16, features=D, heads=()):
  """Returns query, key and value."""
  return [draw((B, *heads, *shape), dtype) for shape in ((T, features), (S, features), (S, V))]


def attend(implementation, inputs, mask=None, **options):
  options = {'score': 'scaled_dot', 'return_weights': False, 'params': {}} | options
  return aj.attend(*inputs, mask, implementation=implementation, **options)


def assert_close(x, y, tolerance=0.03):
  np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=tolerance, atol=tolerance)


def test_factors_that_exceed_float16_are_balanced_without_a_change_of_their_products():
  q, k = 96000.0 * draw((T, D), jnp.float32), 1e-3 * draw((S, D), jnp.float32)
  q = q.at[:, 0].set(0.0)
  balanced = [x.astype(jnp.float16) for x in cudnn._balance(q, k)]
  assert all(np.all(np.isfinite(x)) for x in balanced)
  balanced_q, balanced_k = (np.asarray(x, np.float32) for x in balanced)
  np.testing.assert_allclose(balanced_q @ balanced_k.T, q @ k.T, rtol=0.01, atol=0.2)
  jax.tree.map(np.testing.assert_array_equal, cudnn._balance(k, k), (k, k))  # unchanged where nothing exceeds it


@pytest.mark.long
@pytest.mark.parametrize('bias', [None, BIAS], ids=['plain', 'biased'])
@pytest.mark.parametrize(
  'score', sample_cases([(name,) for name, row in aj.SCORES.items() if isinstance(row.form, Product)], 2)
)
def test_equals_definition(xla_kernel, score, bias):
  params = aj.init_params(jax.random.key(0), score=score, query=D, key=D, features=D)
  options = {'score': score, 'alignment': 'softmax(temperature=0.7)', 'params': params, 'bias': bias}
  inputs = make_inputs()

  @jax.jit
  def attend_both(inputs):
    attended = [attend(name, inputs, MASK, **options) for name in ('cudnn', 'xla')]
    weights = [attend(name, inputs, MASK, **options, return_weights=True).weights for name in ('cudnn', 'xla')]
    return attended, weights

  (actual, expected), weights = attend_both(inputs)
  assert actual.weights is None
  assert actual.context.dtype == jnp.bfloat16
  np.testing.assert_allclose(*weights, atol=0.03)
  assert np.all(weights[0][0, 3] == 0)
  assert_close(actual.context, expected.context)
  assert np.all(actual.context[0, 3] == 0)

  def loss(inputs, implementation):
    context = attend(implementation, inputs, MASK, **options).context
    return jnp.sum(jnp.sin(context.astype(jnp.float32)))

  gradients = jax.jit(lambda inputs: [jax.grad(loss)(inputs, name) for name in ('cudnn', 'xla')])
  jax.tree.map(assert_close, *gradients(inputs))


@pytest.mark.long
@pytest.mark.parametrize('limit', ['min', 'max'])
def test_a_bias_beyond_the_range_of_the_kernel_is_clipped(xla_kernel, limit):
  """The first query has the bias at all positions, the others at two positions; 'cudnn' pads to even lengths."""
  extreme = float(getattr(jnp.finfo(jnp.float32), limit))
  bias = jnp.zeros((T, S)).at[0].set(extreme).at[1:, :2].set(extreme)

  def loss(inputs, implementation):
    context = attend(implementation, inputs, MASK.at[:, 0].set(True), bias=bias).context
    return jnp.sum(jnp.sin(context.astype(jnp.float32))), context

  gradients = jax.grad(loss, has_aux=True)
  actual, expected = (gradients(make_inputs(), name) for name in ('cudnn', 'xla'))
  jax.tree.map(lambda x, y: assert_close(x, y, 0.05), actual, expected)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_no_bias_is_below_what_jax_adds_at_masked_positions(dtype):
  dtype = jnp.dtype(dtype)
  added = fused_attention_stablehlo.combine_bias_and_mask(jnp.zeros((1, 1), dtype), jnp.zeros((1, 1), bool), dtype)
  assert cudnn.LARGEST_BIAS[dtype.name] == -added.item() / 2


LENGTHS = jnp.asarray([S, 4])[:, None]
IDS = jnp.asarray([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]])[:, None]
SEGMENTS = aj.Mask.segments(IDS[..., :T], IDS)
DENSE = (B, 1)  # axes of a dense mask
# mask, bias, and what the kernel gets: its options, the axes of a dense mask and those of a bias; None: none.
CASES = {
  'no_mask': (None, None, {}, None, None),
  'causal': (aj.Mask.causal(), None, {'is_causal': True}, None, None),
  'left': (aj.Mask.window(2, 0), None, {'is_causal': True, 'local_window_size': (2, 0)}, None, None),
  'lengths': (aj.Mask.lengths(LENGTHS), None, {'key_value_seq_lengths'}, None, None),
  'empty': (aj.Mask.lengths(LENGTHS - 4) & aj.Mask.causal(), None, {'is_causal', 'key_value_seq_lengths'}, None, None),
  'right': (aj.Mask.window(2, 1), None, {}, (1, 1), None),
  'sinks': (aj.Mask.window(1, 0, sinks=1) & aj.Mask.causal(), None, {'is_causal': True}, (1, 1), None),
  'segments': (SEGMENTS & aj.Mask.causal(), None, {'is_causal': True}, DENSE, None),
  'offset': (aj.Mask.causal().at(1), None, {}, (1, 1), None),
  'array': (MASK[:, None], None, {}, DENSE, None),
  'array_per_head': (jnp.stack([MASK] * N, 1), None, {}, (B * N, 1), None),
  'bias': (None, HEADS_BIAS, {}, (1, B * N), (1, B * N)),
  'bias_and_lengths': (aj.Mask.lengths(LENGTHS), HEADS_BIAS, {'key_value_seq_lengths'}, (B, N), (B, N)),
}


@pytest.mark.parametrize(('mask', 'bias', 'options', 'mask_axes', 'bias_axes'), CASES.values(), ids=CASES)
def test_the_kernel_gets_the_structure_of_masks_and_is_called_once(
  xla_kernel, monkeypatch, mask, bias, options, mask_axes, bias_axes
):
  """With a dense mask or a bias it gets even lengths, because its gradient does not support odd ones."""
  calls = []
  kernel = jax.nn.dot_product_attention

  def recording_kernel(q, k, v, bias, mask, *, scale, implementation, **options):
    calls.append((q.shape, k.shape, *(None if x is None else x.shape for x in (mask, bias)), options))
    return kernel(q, k, v, bias, mask, scale=scale, implementation=implementation, **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', recording_kernel)

  def loss(inputs, bias, implementation):
    context = attend(implementation, inputs, mask, bias=bias).context
    return jnp.sum(jnp.sin(context.astype(jnp.float32))), context

  argnums = 0 if bias is None else (0, 1)
  gradients = jax.jit(jax.grad(loss, argnums, has_aux=True), static_argnums=2)
  actual, expected = (gradients(make_inputs(heads=(N,)), bias, name) for name in ('cudnn', 'xla'))
  jax.tree.map(lambda x, y: assert_close(x, y, 0.05), actual, expected)
  is_even = mask_axes is not None
  lengths = (T + 1, S + 1) if is_even else (T, S)
  query_shape, key_shape, mask_shape, bias_shape, passed = calls[0]
  assert query_shape[0] * query_shape[2] == B * N and query_shape[1::2] == (lengths[0], 16)
  assert key_shape == (query_shape[0], lengths[1], query_shape[2], 16)
  assert mask_shape == (None if mask_axes is None else (*mask_axes, *lengths))
  assert bias_shape == (None if bias_axes is None else (*bias_axes, *lengths))
  assert passed.keys() == set(options)
  assert all(passed[name] == value for name, value in dict.fromkeys(options).items() if value is not None)


@pytest.mark.long
@pytest.mark.parametrize('kv_heads', [0, 2])
def test_kernel_accepts_the_shapes_it_receives(monkeypatch, kv_heads):
  """The kernel's own checks of shapes run without a GPU, under vmap too; nothing is compiled."""
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91900)
  monkeypatch.setattr(cudnn, 'kernel_platform', lambda: 'gpu')
  options = {'heads': 4, 'kv_heads': kv_heads, 'implementation': 'cudnn', 'dtype': jnp.bfloat16}
  module = aj.Attention('scaled_dot', features=64, **options)
  x = jnp.ones((2, 7, 64))
  mask = aj.padding_mask(jnp.asarray([7, 4]), 7)

  def attend_all(module, x):
    return module.parallel(x, module.remember(x, mask), return_weights=False).context

  def loss(params, x):
    return module.apply(params, x, method=attend_all).astype(jnp.float32).sum()

  params = jax.eval_shape(lambda: module.init(jax.random.key(0), x, method=attend_all))
  gradients = jax.eval_shape(jax.grad(loss, (0, 1)), params, x)
  assert gradients[1].shape == x.shape


def test_unsupported_platforms_raise():
  with pytest.raises(aj.UserError, match="'cudnn' cannot compute this: needs an NVIDIA GPU, got platform cpu"):
    attend('cudnn', make_inputs())


def test_unsupported_alignments_types_and_widths_raise(xla_kernel):
  mixed = (*make_inputs(jnp.float32)[:2], make_inputs()[2])
  params = aj.init_params(jax.random.key(0), score='low_rank(rank=130)', query=D, key=D, features=D)
  types = 'must all be bfloat16 or all float16, got float32, float32,'
  for inputs, options, message in (
    (make_inputs(), {'alignment': 'sparsemax'}, "'cudnn' cannot compute this: the alignment is not softmax"),
    (make_inputs(jnp.float32), {}, f"{types} float32; use 'flash'"),
    (mixed, {}, f"{types} bfloat16; use 'flash'"),
    (make_inputs(features=130), {}, 'features must be at most 128, got 130'),
    (make_inputs(), {'score': 'low_rank(rank=130)', 'params': params}, 'features must be at most 128, got 130'),
  ):
    with pytest.raises(aj.UserError, match=message):
      attend('cudnn', inputs, **options)


@pytest.mark.long
def test_gradients_of_replicated_operands_within_shard_map_are_sums_over_the_devices(xla_kernel):
  query, key, value = make_inputs()
  mesh = jax.make_mesh((B,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))

  def gradients(bias, query, key, value):
    def total(bias, key):
      return jnp.sum(attend('cudnn', (query, key, value), bias=bias).context.astype(jnp.float32) ** 2)

    return jax.grad(total, (0, 1))(bias, key)

  arguments = (BIAS[0], query, key[0], value)
  specs = (P(), P('data'), P(), P('data'))
  sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
  expected = jax.jit(gradients)(*arguments)
  jax.tree.map(lambda x, y: assert_close(x, y, 0.1), jax.jit(sharded)(*arguments), expected)
