"""Checksums: the sum that defines them, every flipped bit, and independence of the sharding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attention_jax.training.checksums import AXIS_STRIDE, tree_checksums

MODULUS = 2**64


def weight(axis, position):
  """SplitMix64 in Python's integers, made odd."""
  z = (position + axis * int(AXIS_STRIDE)) * 0x9E3779B97F4A7C15 % MODULUS
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
  return (z ^ (z >> 31)) | 1


def checksum(array):
  return tree_checksums({'x': jnp.asarray(array)})['x']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32', 'uint8', 'bool'])
@pytest.mark.parametrize('shape', [(), (7,), (2, 3, 5)])
def test_a_checksum_equals_the_sum_that_defines_it(shape, dtype):
  array = jax.random.normal(jax.random.key(0), shape).astype(dtype)
  host = np.asarray(array)
  total = 0
  for index in np.ndindex(shape or (1,)):
    bits = int.from_bytes(host.reshape(shape or (1,))[index].tobytes(), 'little')
    for axis, position in enumerate(index):
      bits *= weight(axis, position)
    total += bits
  assert checksum(array) == f'{total % MODULUS:016x}'


def test_every_flipped_bit_and_every_exchange_of_elements_changes_the_checksum():
  array = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
  flipped = [array.view(np.uint32).copy() for _ in range(array.size * 32)]
  for bit, copy in enumerate(flipped):
    copy.flat[bit // 32] ^= np.uint32(1 << bit % 32)
  variants = [copy.view(np.float32) for copy in flipped]
  for a, b in itertools.combinations(range(array.size), 2):
    exchanged = array.copy()
    exchanged.flat[[a, b]] = array.flat[[b, a]]
    variants.append(exchanged)
  checksums = {checksum(variant) for variant in variants}
  assert checksum(array) not in checksums and len(checksums) == len(variants)


def test_a_checksum_does_not_depend_on_the_sharding():
  mesh = jax.make_mesh((2, 4), ('a', 'b'))
  array = jax.random.normal(jax.random.key(1), (4, 8))
  specs = [(), ('a',), ('b', 'a'), (None, ('a', 'b'))]
  sharded = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs]
  assert {checksum(x) for x in sharded} == {checksum(array)} == {tree_checksums({'x': np.asarray(array)})['x']}


def test_the_names_of_checksums_are_paths():
  assert list(tree_checksums({'a': [jnp.ones(2)], 'b': {'c': jnp.zeros(())}})) == ['a/0', 'b/c']
