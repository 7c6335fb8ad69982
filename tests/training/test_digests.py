"""Digests: every change of files and data is found and named. Checksums: the sum that defines them, flipped bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.errors import UserError
from attention_jax.training.digests import (
  AXIS_STRIDE,
  FILE_DIGESTS,
  add_file_digests,
  check_digests,
  check_file_digests,
  compute_digests,
  drop_file_digests,
  store_digests,
  tree_checksums,
)

MODULUS = 2**64
SPLIT = EncodedCorpus(*(np.arange(n, dtype=np.int32) for n in (6, 3, 4, 3)))
CHANGED = {
  'value': SPLIT._replace(target=np.array([0, 1, 2, 4], np.int32)),
  'order': SPLIT._replace(source=SPLIT.source[::-1]),
  'type': SPLIT._replace(source=SPLIT.source.astype(np.int64)),
  'shape': SPLIT._replace(source=SPLIT.source.reshape(2, 3)),
  'empty': SPLIT._replace(source=SPLIT.source[:0]),
}


@pytest.fixture
def folder(tmp_path):
  for name in 'abc':
    (tmp_path / name).write_text(name)
  add_file_digests(tmp_path, 'ab')  # the files a and b
  add_file_digests(tmp_path, 'c')
  return tmp_path


def test_unchanged_files_and_folders_without_digests_are_no_errors(folder):
  check_file_digests(folder)
  check_file_digests(folder / 'none')
  check_file_digests(folder / 'a')


def test_all_changes_are_named(folder):
  (folder / 'a').write_text('x')
  (folder / 'b').unlink()
  (folder / 'c').unlink()
  (folder / 'c').mkdir()
  message = r'a has changed, b is missing, c cannot be read \(Is a directory\); restore .* or delete .*digests\.json'
  with pytest.raises(UserError, match=message):
    check_file_digests(folder)
  (folder / FILE_DIGESTS).unlink()
  check_file_digests(folder)


def test_files_that_are_being_written_are_not_checked(folder):
  drop_file_digests(folder, ['a', 'not yet'])
  (folder / 'a').write_text('x')
  check_file_digests(folder)
  add_file_digests(folder, ['a'])
  (folder / 'a').write_text('y')
  with pytest.raises(UserError, match=r'stored it: a has changed;'):
    check_file_digests(folder)
  drop_file_digests(folder)
  (folder / 'b').unlink()
  check_file_digests(folder)


@pytest.mark.parametrize('content', ['', '[1]', '{"a": 1', '\udcff'])
def test_damaged_digests_are_an_error(folder, content):
  (folder / FILE_DIGESTS).write_bytes(content.encode('utf-8', 'surrogateescape'))
  with pytest.raises(UserError, match=r'cannot read .*digests\.json: .*; delete it to skip the check'):
    check_file_digests(folder)


def test_equal_data_have_equal_digests(tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  check_digests(tmp_path, compute_digests({'test': SPLIT, 'train': SPLIT._replace(source=SPLIT.source.copy())}))
  assert [path.name for path in tmp_path.iterdir()] == ['data.json']


def test_values_of_any_type_are_covered():
  arrays = {'bfloat16': jnp.arange(3, dtype=jnp.bfloat16), 'number': np.float32(1), 'text': np.array(['a', 'b'])}
  digests = compute_digests(arrays | {'changed': jnp.arange(1, 4, dtype=jnp.bfloat16), 'empty': np.zeros((0, 3))})
  assert len(set(digests.values())) == 5
  assert (digests['number'], digests['text']) == ('e8b1e42dc5326c85', 'fd8af547faff1454')  # as in earlier versions


def test_a_run_without_digests_is_logged(tmp_path):
  lines = []
  check_digests(tmp_path, compute_digests({'train': SPLIT}), lines.append)
  assert len(lines) == 1 and 'data.json does not exist: cannot check' in lines[0]


@pytest.mark.parametrize('change', CHANGED)
def test_a_changed_split_is_named(change, tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  message = r'trained on other data: test \(or the vocabulary\) changed since; restore the earlier data, '
  with pytest.raises(UserError, match=message):
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'test': CHANGED[change]}))
  with pytest.raises(UserError, match='other data: test, unseen '):  # a missing and a new one
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'unseen': SPLIT}))


@pytest.mark.parametrize('content', ['', '[1]', '{"train": '])
def test_an_unreadable_file_is_an_error(content, tmp_path):
  (tmp_path / 'data.json').write_text(content)
  with pytest.raises(UserError, match=r'cannot read .*data\.json'):
    check_digests(tmp_path, compute_digests({'train': SPLIT}))


def weight(axis, position):
  """SplitMix64 in Python's integers, made odd."""
  z = (position + axis * int(AXIS_STRIDE)) * 0x9E3779B97F4A7C15 % MODULUS
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
  return (z ^ (z >> 31)) | 1


def checksum(array):
  return tree_checksums({'x': jnp.asarray(array)})['x']


@pytest.mark.long
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
  assert list(tree_checksums({'a': [array], 'b': {'c': array}})) == ['a/0', 'b/c']
