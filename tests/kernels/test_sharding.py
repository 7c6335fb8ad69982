"""Batches that lie on several devices: each runs the kernels for its own part, and nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.kernels import pallas_additive
from attention_jax.kernels.sharding import batch_mesh_axis, shard_over_rows
from tests.functional.helpers import Problem, loss, make_problem

B, N, T, S = 4, 2, 6, 9


@pytest.fixture
def mesh():
  return jax.make_mesh((2, B), ('seed', 'data'), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on_devices(fn, mesh, specs, given):
  """fn of what lies as the specs say, which gathers nothing; held against the same on one device."""
  placed = jax.tree.map(lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)), specs, given)
  with jax.set_mesh(mesh):
    compiled = jax.jit(fn).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  found = compiled(*placed)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, jax.jit(fn)(*given))
  return found


@pytest.mark.parametrize(('score', 'implementation'), [('dot', 'flash'), ('additive', 'pallas_additive')])
@pytest.mark.parametrize('batch', [(B,), (B, N)])
def test_value_and_gradient_are_made_where_the_rows_lie(score, implementation, batch, mesh):
  given, spec = make_problem(score, 'softmax', batch, T, S), P('data')
  shown = aj.padding_mask(jnp.arange(3, 3 + B), S).reshape(B, *(1,) * len(batch), S)
  total = lambda given, mask: loss(score, 'softmax', given, mask, implementation=implementation)[0]
  with pallas_additive.compile_for('interpret'):
    specs = Problem(jax.tree.map(lambda _: P(), given.params), spec, spec, spec), P('data')
    _, slopes = on_devices(jax.value_and_grad(total), mesh, specs, (given, shown))
  assert slopes.query.sharding.spec == spec


def test_maps_around_maps(mesh):
  """The outer has an axis that the rows have and the table has not."""
  told = shard_over_rows(sequential_vmap(lambda row, table: {'mixed': row @ table, 'sum': row.sum()}))
  rows, tables = jnp.arange(2.0 * B * 15).reshape(2, B, 3, 5), jnp.arange(30.0).reshape(2, 5, 3)
  both = lambda outer: jax.vmap(jax.vmap(told, (0, None), spmd_axis_name='data'), (0, 0), spmd_axis_name=outer)
  found = on_devices(both('seed'), mesh, (P('seed', 'data'), P('seed')), (rows, tables))
  assert found['mixed'].sharding.spec == P('seed', 'data')
  on_devices(both(None), mesh, (P(None, 'data'), P()), (rows, tables))


def test_steps_of_a_loop(mesh):
  """As a recurrent decoder has them: mapped over rows, inside a loop over time."""
  sort = jax.vmap(shard_over_rows(sequential_vmap(lambda row: jnp.sort(row))), spmd_axis_name='data')
  walk = lambda rows: jax.lax.scan(lambda carry, _: (sort(carry) * 2, ()), rows, None, length=3)[0]
  on_devices(walk, mesh, (P('data'),), (jnp.arange(8.0 * B).reshape(B, 8),))


def test_only_rows_that_the_mesh_around_can_split(mesh):
  assert batch_mesh_axis(B) is None
  with jax.set_mesh(mesh):
    assert batch_mesh_axis(2 * B) == 'data' and batch_mesh_axis(B + 1) is None
    inside = []
    own = lambda x: inside.append(batch_mesh_axis(B)) or x
    jax.shard_map(own, in_specs=P('data'), out_specs=P('data'))(jnp.ones(B))
    jax.jit(jax.shard_map(own, in_specs=P('seed'), out_specs=P('seed'), axis_names={'seed'}))(jnp.ones(B))
    assert set(inside) == {None}
    given = make_problem('dot', 'softmax', (B,), T, S)
    some = jax.shard_map(
      lambda query: loss('dot', 'softmax', given._replace(query=query), implementation='flash')[1].context,
      in_specs=P(),
      out_specs=P(),
      axis_names={'seed'},
    )
    np.testing.assert_allclose(
      jax.jit(some)(given.query), loss('dot', 'softmax', given)[1].context, rtol=1e-4, atol=1e-5
    )
  with jax.set_mesh(jax.make_mesh((2,), ('other',), axis_types=(jax.sharding.AxisType.Auto,))):
    assert batch_mesh_axis(B) is None
