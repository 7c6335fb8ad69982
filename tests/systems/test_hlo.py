"""Traffic of compiled programs: loops count as often as they run, slices by their size, collectives by their groups."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attention_jax.systems.hlo import count_traffic
from attention_jax.training.partition import MeshConfig, make_mesh

STEPS = 50
B = 8
D = 64
FLOAT = 4  # bytes


def traffic_of(fn, *args, **options):
  return count_traffic(jax.jit(fn, **options).lower(*args).compile().as_text())


def test_the_body_of_a_loop_counts_in_every_step_and_its_outputs_by_their_slices():
  def recurrence(kernel, state):
    def step(state, _):
      state = jnp.tanh(state @ kernel)
      return state, state

    return jax.lax.scan(step, state, None, length=STEPS)

  memory = traffic_of(recurrence, jnp.ones([D, D]), jnp.ones([B, D])).memory
  kernel = D * D * FLOAT
  state = B * D * FLOAT
  # A step reads the kernel and the state, and writes the state and one slice of the outputs; tanh and copies may be
  # instructions of their own. Counting whole outputs in every step would add STEPS times STEPS states.
  assert STEPS * (kernel + 3 * state) < memory < STEPS * (kernel + 12 * state)


def make_gradient(mesh):
  """Returns a gradient that gathers its kernel from all devices and sums over their rows."""

  def gradient(kernel, x):
    kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P()))
    return jax.grad(lambda kernel: jnp.sum(jnp.tanh(x @ kernel)))(kernel)

  return gradient


@pytest.mark.parametrize('devices', [2, 8])
def test_collectives_send_what_a_ring_sends(devices):
  mesh = make_mesh(jax.devices()[:devices], sizes=MeshConfig(fsdp=devices))
  sharded = NamedSharding(mesh, P('fsdp'))
  layouts = {'in_shardings': (sharded, sharded), 'out_shardings': NamedSharding(mesh, P())}
  traffic = traffic_of(make_gradient(mesh), jnp.ones([D, D]), jnp.ones([B, D]), **layouts)
  size = D * D * FLOAT
  assert traffic.payload == {'all-gather': size, 'all-reduce': size}
  share = (devices - 1) / devices
  assert traffic.collectives == pytest.approx({'all-gather': share * size, 'all-reduce': 2 * share * size})


TPU_PROGRAM = """HloModule jit_f, is_scheduled=true

%async_computation (param: f32[4,8]) -> f32[8,8] {
  %param = f32[4,8]{1,0:T(8,128)} parameter(0)
  ROOT %all-gather.1 = f32[8,8]{1,0:T(8,128)} all-gather(%param), replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (a: f32[4,8]) -> f32[8,8] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0)
  %copy.1 = f32[4,8]{1,0:T(8,128)S(1)} copy(%a)
  %start = ((f32[4,8]{1,0:T(8,128)}), f32[8,8]{1,0:T(8,128)}) async-start(%a), calls=%async_computation
  %done = f32[8,8]{1,0:T(8,128)} async-done(%start), calls=%async_computation
  %sum = f32[8,8]{1,0:T(8,128)} all-reduce-start(%done), replica_groups={{0,1,2,3}}
  ROOT %end = f32[8,8]{1,0:T(8,128)} all-reduce-done(%sum)
}
"""


def test_asynchronous_collectives_count_and_the_memory_of_a_core_does_not():
  traffic = count_traffic(TPU_PROGRAM)
  size = 8 * 8 * FLOAT
  assert traffic.payload == {'all-gather': size, 'all-reduce': size}
  assert traffic.collectives == {'all-gather': 0.5 * size, 'all-reduce': 1.5 * size}
  # The copy reads half an array and writes to the memory of the core, which does not count. The all-gather reads half
  # and writes a whole array, the all-reduce reads and writes a whole one.
  assert traffic.memory == 0.5 * size + 1.5 * size + 2 * size


PROGRAM_WITHOUT_GROUPS = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (a: f8e4m3fn[8,8]) -> f8e4m3fn[8,8] {
  %a = f8e4m3fn[8,8]{1,0} parameter(0)
  ROOT %sum = f8e4m3fn[8,8]{1,0} all-reduce(%a), channel_id=1, replica_groups={}, use_global_device_ids=true
}
"""


def test_a_collective_without_groups_is_one_of_all_devices_and_numbers_of_8_bits_count():
  size = 8 * 8
  assert count_traffic(PROGRAM_WITHOUT_GROUPS) == (2 * size, {'all-reduce': 2 * 7 / 8 * size}, {'all-reduce': size})


PREFETCHING_PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[2,8] {
  %a = f32[8,8]{1,0:T(8,128)} parameter(0)
  %b = f32[8,8]{1,0:T(8,128)} parameter(1)
  %buffer = f32[8,8]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %copy = (f32[8,8]{1,0:T(8,128)S(1)}, f32[8,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %inside = f32[8,8]{1,0:T(8,128)S(1)} copy-done(%copy)
  %slice = ((f32[8,8]{1,0:T(8,128)}), f32[2,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:2], [0:8]}
  %part = f32[2,8]{1,0:T(8,128)S(1)} slice-done(%slice)
  %rows = f32[2,8]{1,0:T(8,128)S(1)} slice(%inside), slice={[0:2], [0:8]}
  %sum = f32[2,8]{1,0:T(8,128)S(1)} add(%part, %rows)
  %out = (f32[2,8]{1,0:T(8,128)}, f32[2,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%sum)
  ROOT %end = f32[2,8]{1,0:T(8,128)} copy-done(%out)
}
"""


def test_prefetches_into_the_memory_of_the_core_count_what_they_read():
  # One whole array, a quarter of the other one, and the result; a buffer that is allocated is not written yet.
  assert count_traffic(PREFETCHING_PROGRAM).memory == (1 + 0.25 + 0.25) * 8 * 8 * FLOAT


# A program sharded over fsdp, on a mesh whose axes are transposed.
SHARDED_PROGRAM = """HloModule jit_f, is_scheduled=true

%all-reduce-scatter (input: f32[8,8]) -> f32[2,8] {
  %input = f32[8,8]{1,0:T(8,128)} parameter(0)
  %all-reduce.2 = f32[8,8]{1,0:T(8,128)} all-reduce(%input), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %part = f32[2,8]{1,0:T(8,128)} dynamic-slice(%all-reduce.2, %id, %zero), dynamic_slice_sizes={2,8}
}

ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0:T(8,128)} parameter(0)
  %whole = f32[8,8]{1,0:T(8,128)} all-gather(%a), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, dimensions={0}
  ROOT %sum = f32[2,8]{1,0:T(8,128)} fusion(%whole), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501 - an instruction is one line


def test_a_fused_all_reduce_whose_result_is_sliced_is_a_reduce_scatter():
  traffic = count_traffic(SHARDED_PROGRAM)
  size = 8 * 8 * FLOAT
  assert traffic.payload == {'all-gather': size, 'reduce-scatter': size / 4}
  assert traffic.collectives == {'all-gather': 0.75 * size, 'reduce-scatter': 0.75 * size}


def test_a_slice_reads_a_part_of_its_operand():
  memory = traffic_of(lambda x: jax.lax.slice(x, [0, 0], [2, D]) + 1.0, jnp.ones([D, D])).memory
  part = 2 * D * FLOAT
  assert 2 * part <= memory <= 4 * part
