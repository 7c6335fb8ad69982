"""Batches split over several devices: each device runs the kernels for its own rows, and nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import sequential_vmap
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.kernels import auto
from attention_jax.kernels.sharding import batch_mesh_axis, shard_over_rows
from attention_jax.kernels.target import compile_for, kernel_platform
from tests.functional.alignment_cases import CORE_PAIRS
from tests.functional.helpers import AttentionInputs, attend, loss, make_problem

B, N, T, S = 4, 2, 6, 9
TOLERANCE = {'rtol': 1e-4, 'atol': 1e-5}


@pytest.fixture
def mesh():
  return jax.make_mesh((2, B), ('seed', 'data'), axis_types=(AxisType.Auto,) * 2)


def run_sharded(fn, mesh, specs, arguments):
  """Runs fn on sharded arguments; checks that it gathers nothing and equals the result on one device."""
  sharded = jax.tree.map(lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)), specs, arguments)
  with jax.set_mesh(mesh):
    compiled = jax.jit(fn).lower(*sharded).compile()
  assert 'all-gather' not in compiled.as_text()
  result = compiled(*sharded)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), result, jax.jit(fn)(*arguments))
  return result


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'implementation', 'batch'),
  [
    ('dot', 'flash', (B, N)),
    ('dot', 'splash', (B, N)),
    ('additive', 'pallas_additive', (B,)),
    ('dot', 'flash', (B,)),
    ('additive', 'pallas_additive', (B, N)),
  ],
)
def test_gradients_of_arrays_stay_sharded(score, implementation, batch, mesh):
  problem = make_problem(score, 'softmax', batch, T, S)
  mask = aj.padding_mask(jnp.arange(3, 3 + B), S).reshape(B, *(1,) * len(batch), S)
  row_spec = P('data')

  def total(problem, mask):
    return loss(score, 'softmax', problem, mask, implementation=implementation)[0]

  params_spec = jax.tree.map(lambda _: P(), problem.params)
  specs = AttentionInputs(params_spec, row_spec, row_spec, row_spec), row_spec
  with compile_for('interpret'):
    _, gradients = run_sharded(jax.value_and_grad(total), mesh, specs, (problem, mask))
  assert all(gradient.sharding.spec == row_spec for gradient in (gradients.query, gradients.key, gradients.value))


def test_rows_that_an_explicit_mesh_splits_are_an_error_of_kernels_with_loops_and_auto_avoids_them(monkeypatch):
  monkeypatch.setitem(auto.MIN_SCORES, kernel_platform(), {'flash': 1})
  with jax.set_mesh(jax.make_mesh((B,), ('data',), axis_types=(AxisType.Explicit,))):
    rows, mask = jax.device_put((jnp.ones((B, T, 3)), jnp.ones((B, T, T), bool)), P('data'))
    params = aj.init_params(jax.random.key(0), score='dot', alignment='local_p', query=3, key=3, features=3)
    for options in (
      {'mask': mask, 'implementation': 'flash'},
      {'score': 'additive', 'params': {'score': {'v': jnp.ones(3)}}, 'implementation': 'factored'},
      {'score': 'dot', 'alignment': 'local_p', 'params': params, 'implementation': 'window'},
    ):
      with pytest.raises(aj.UserError, match=r"axes of AxisType.Explicit; expected .*, or implementation='xla'"):
        aj.attend(rows, rows, rows, **options)
    attended = aj.attend(rows, rows, rows, mask, implementation='auto')
    assert attended.context.sharding.spec[0] == 'data'
    np.testing.assert_array_equal(attended.context, rows)
  with jax.set_mesh(jax.make_mesh((2, B), ('data', 'fsdp'), axis_types=(AxisType.Explicit,) * 2)):
    query, key = (jax.device_put(jnp.ones((8, T, 3)), P(axis)) for axis in ('data', 'fsdp'))
    with pytest.raises(aj.UserError, match='split alike along batch axis 0, got mesh axes data and fsdp'):
      aj.attend(query, key, key)


# A softmax, one that sorts, and the rows whose loops carry numbers.
QUICK_PAIRS = [*(('dot', name) for name in ('softmax', 'entmax15', 'entmax', 'forward_agent')), ('fertility', 'hard')]
SAMPLED_PAIRS = QUICK_PAIRS + [
  pytest.param(*pair, marks=pytest.mark.product) for pair in CORE_PAIRS if pair not in QUICK_PAIRS
]


@pytest.mark.long
@pytest.mark.parametrize(('score', 'alignment'), SAMPLED_PAIRS)
def test_every_row_computes_rows_that_a_mesh_of_eight_devices_splits(score, alignment):
  """With an rng, so that alignments sample, and with one query for all rows of the memory."""
  problem = make_problem(score, alignment, (8,))
  mask = aj.padding_mask(jnp.arange(8) % 8, 7)[:, None]
  options = {'rng': jax.random.key(1), 'deterministic': False}

  @jax.jit
  def run(problem, query, mask):
    def both(problem):
      total, attended = loss(score, alignment, problem, mask, **options)
      shared_query = attend(score, alignment, problem._replace(query=query), mask, **options)
      return total + shared_query.context.sum(), (attended, shared_query)

    return jax.value_and_grad(both, has_aux=True)(problem)

  expected = run(problem, problem.query[0], mask)
  for axis_type in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((8,), ('data',), axis_types=(axis_type,))
    replicated, rows = (NamedSharding(mesh, spec) for spec in (P(), P('data')))
    sharded = jax.device_put(
      (problem, problem.query[0], mask), (AttentionInputs(replicated, rows, rows, rows), replicated, rows)
    )
    with jax.set_mesh(mesh):
      result = run(*sharded)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), result, expected)


@pytest.mark.long
@pytest.mark.parametrize('score', ['additive', 'coverage'])
def test_dropout_of_the_module_attention_on_an_explicit_mesh(score, rng):
  module = aj.Attention(score=score, alignment='hard', features=8, heads=2, dropout=0.3, implementation='xla')
  rows = [jnp.asarray(np.random.default_rng(i).normal(size=(8, T, 5)), jnp.float32) for i in range(2)]

  def call(module, query, encoded):
    memory = module.remember(encoded, jnp.ones((8, T), bool))
    _, step = module(module.init_carry(memory), query[:, 0], memory, deterministic=False)
    return step, module.parallel(query, memory, deterministic=False)

  params = jax.jit(lambda: module.init(rng, *rows, method=call))()
  run = jax.jit(lambda *rows: module.apply(params, *rows, method=call, rngs={'attention': rng}))
  expected = run(*rows)
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    result = run(*jax.device_put(rows, NamedSharding(mesh, P('data'))))
  assert result[1].context.sharding.spec[0] == 'data'
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), result, expected)


@pytest.mark.long
def test_nested_vmaps_stay_sharded(mesh):
  """The outer vmap maps an axis that both arguments have, the inner one an axis that only `rows` has."""
  fn = shard_over_rows(sequential_vmap(lambda row, table: {'product': row @ table, 'sum': row.sum()}))
  rows = jnp.arange(2.0 * B * 15).reshape(2, B, 3, 5)
  tables = jnp.arange(30.0).reshape(2, 5, 3)

  def mapped(outer_axis):
    inner = jax.vmap(fn, (0, None), spmd_axis_name='data')
    return jax.vmap(inner, (0, 0), spmd_axis_name=outer_axis)

  result = run_sharded(mapped('seed'), mesh, (P('seed', 'data'), P('seed')), (rows, tables))
  assert result['product'].sharding.spec == P('seed', 'data')
  run_sharded(mapped(None), mesh, (P(None, 'data'), P()), (rows, tables))


def test_vmap_inside_a_scan_stays_sharded(mesh):
  """As in a recurrent decoder: mapped over rows, inside a loop over time."""
  sort = jax.vmap(shard_over_rows(sequential_vmap(lambda row: jnp.sort(row))), spmd_axis_name='data')

  def scanned(rows):
    return jax.lax.scan(lambda carry, _: (sort(carry) * 2, ()), rows, None, length=3)[0]

  run_sharded(scanned, mesh, (P('data'),), (jnp.arange(8.0 * B).reshape(B, 8),))


def test_batch_mesh_axis_requires_a_mesh_that_splits_the_rows(mesh):
  axes = []

  def record_axis(x):
    axes.append(batch_mesh_axis(B))
    return x

  assert batch_mesh_axis(B) is None
  with jax.set_mesh(mesh):
    assert batch_mesh_axis(2 * B) == ('data',)
    assert batch_mesh_axis(B + 1) is None
    jax.shard_map(record_axis, in_specs=P('data'), out_specs=P('data'))(jnp.ones(B))
    over_seeds = jax.shard_map(record_axis, in_specs=P('seed'), out_specs=P('seed'), axis_names={'seed'})
    jax.jit(over_seeds)(jnp.ones(B))
  assert set(axes) == {None}  # within shard_map
  with jax.set_mesh(jax.make_mesh((2,), ('other',), axis_types=(AxisType.Auto,))):
    assert batch_mesh_axis(B) is None


@pytest.mark.long
def test_flash_within_a_partial_shard_map_equals_the_definition(mesh):
  problem = make_problem('dot', 'softmax', (B,), T, S)

  def context(query):
    return loss('dot', 'softmax', problem._replace(query=query), implementation='flash')[1].context

  with jax.set_mesh(mesh):
    sharded = jax.shard_map(context, in_specs=P(), out_specs=P(), axis_names={'seed'})
    expected = loss('dot', 'softmax', problem)[1].context
    np.testing.assert_allclose(jax.jit(sharded)(problem.query), expected, **TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'implementation'), [('additive', 'factored'), ('general', 'flash'), ('location_sensitive', 'chunked')]
)
def test_gradients_of_parameters_within_shard_map_are_sums_over_the_devices(score, implementation, mesh):
  problem = make_problem(score, 'softmax', (B,), T, S)
  bias = jnp.linspace(-1.0, 1.0, S)

  def gradient(shared, query, key, value):
    def total(shared):
      options = {'score': score, 'implementation': implementation}
      return jnp.sum(aj.attend(query, key, value, params=shared[0], bias=shared[1], **options).context ** 2)

    return jax.grad(total)(shared)

  arguments = ((problem.params, bias), problem.query, problem.key, problem.value)
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P('data'), P('data'), P('data')), out_specs=P())
  expected = jax.jit(gradient)(*arguments)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), jax.jit(sharded)(*arguments), expected)
