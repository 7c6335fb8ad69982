"""Batches: a pure function of (seed, step), every row once per epoch, static shapes, shares that partition a batch."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.batching import (
  BATCH_UNITS,
  MIN_EVALUATION_BATCHES,
  Batches,
  Share,
  check_rows_fit,
  eval_batches,
)
from attention_jax.data.encoding import EncodedCorpus, assign_buckets, check_buckets
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, PAD

BUCKETS = ((3, 5), (8, 8), (8, 13))
ROWS = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 15)), min_size=1, max_size=60)
SIZES = st.tuples(st.integers(1, 9), st.just('sentences')) | st.tuples(st.integers(1, 300), st.just('tokens'))


def make_row(row, side, size):
  """Ids that encode their row, side and position."""
  return [100 * (2 * row + side) + 4 + position for position in range(size - 1)] + [EOS]


def make_split(lengths):
  """An encoded split with these (source, target) lengths."""

  def encode_side(sizes, side):
    rows = itertools.chain.from_iterable(make_row(row, side, size) for row, size in enumerate(sizes))
    return np.fromiter(rows, np.int32), np.cumsum([0, *sizes])

  return EncodedCorpus(*encode_side([s for s, _ in lengths], 0), *encode_side([t for _, t in lengths], 1))


def random_split(seed=0, rows=53):
  return make_split(np.random.default_rng(seed).integers(1, 9, (rows, 2)).tolist())


def assert_equal_batches(first, second):
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


def fitting_rows(lengths):
  return [row for row, (s, t) in enumerate(lengths) if any(s <= x and t <= y for x, y in BUCKETS)]


@given(ROWS.filter(fitting_rows), SIZES, st.integers(0, 2**40))
def test_an_epoch_contains_every_fitting_row_once_in_the_shapes_of_buckets(lengths, size, seed):
  batches = Batches(make_split(lengths), BUCKETS, *size, seed=seed)
  assert len(batches.shapes) <= len(BUCKETS)
  for epoch in (0, 3):
    found = []
    for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
      batch = batches[step]
      assert batches.shape(step) == (*batch.source.shape, batch.target.shape[1])
      assert batches.shape(step) in batches.shapes
      assert [array.dtype for array in batch[:5]] == [np.int32, bool, np.int32, bool, np.int32] and batch.links is None
      for i, row in enumerate(batch.index):
        for side, (ids, mask) in enumerate([(batch[0][i], batch[1][i]), (batch[2][i], batch[3][i])]):
          expected = make_row(row, side, lengths[row][side]) if row >= 0 else []
          assert ids.tolist() == expected + [PAD] * (len(ids) - len(expected))
          assert mask.tolist() == [position < len(expected) for position in range(len(ids))]
      found += batch.index[batch.index >= 0].tolist()
    assert sorted(found) == fitting_rows(lengths)


@given(ROWS, st.integers(1, 9))
def test_evaluation_sorts_every_fitting_row_by_source_length_and_joins_small_buckets_to_longer_ones(lengths, size):
  rows = collections.defaultdict(list)
  batches = eval_batches(make_split(lengths), BUCKETS, size)
  assert len(batches) == len([*batches])
  for batch in batches:
    assert len(batch.index) == size
    rows[batch.source.shape[1], batch.target.shape[1]] += [row for row in batch.index if row >= 0]
  assert sorted(itertools.chain.from_iterable(rows.values())) == fitting_rows(lengths)
  for bucket, found in rows.items():
    sources = [lengths[row][0] for row in found]
    assert sources == sorted(sources)
    has_longer = any(other != bucket and np.all(np.greater_equal(other, bucket)) for other in rows)
    assert len(found) >= MIN_EVALUATION_BATCHES * size or not has_longer


def test_batches_are_a_pure_function_of_seed_and_step():
  first = Batches(random_split(), BUCKETS, 4, seed=7)
  second = Batches(random_split(), BUCKETS, 4, seed=7)
  steps = list(range(3 * len(first)))
  forward = [first[step] for step in steps]
  for step in np.random.default_rng(0).permutation(steps):
    assert_equal_batches(second[int(step)], forward[step])
  other = Batches(random_split(), BUCKETS, 4, seed=1)
  order = [tuple(batch.index) for batch in forward]
  count = len(first)
  assert order[:count] != order[count : 2 * count] and order[:count] != [tuple(other[i].index) for i in range(count)]
  with pytest.raises(IndexError):
    first[-1]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_shares_are_parts_of_the_batch_in_order(count, rows, step):
  whole = Batches(random_split(), BUCKETS, count * rows)[step]
  for index in range(count):
    part = Batches(random_split(), BUCKETS, count * rows, share=Share(index, count))
    assert_equal_batches(part[step][:5], (array[index * rows : (index + 1) * rows] for array in whole[:5]))
    assert all(shape[0] == rows for shape in part.shapes)


def test_filler_rows_make_a_batch_divisible_and_change_no_other_row():
  whole = Batches(random_split(), BUCKETS, 6)
  padded = Batches(random_split(), BUCKETS, 6, share=Share(multiple=4))
  second = Batches(random_split(), BUCKETS, 6, share=Share(1, 2, multiple=4))
  assert len(whole) == len(padded) and {shape[0] for shape in padded.shapes} == {8}
  for step in range(len(whole)):
    assert_equal_batches(whole[step][:5], (array[:6] for array in padded[step][:5]))
    assert_equal_batches(second[step][:5], (array[4:] for array in padded[step][:5]))
    assert not padded[step].source_mask[6:].any() and (padded[step].index[6:] == -1).all()


def test_assign_buckets_selects_the_smallest_bucket():
  assert check_buckets([[8, 13], (3, 5), (8, 8)]) == BUCKETS
  encoded = make_split([(3, 5), (3, 6), (1, 1), (8, 8), (1, 9), (9, 1), (1, 14)])
  assert assign_buckets(encoded, BUCKETS[::-1]).tolist() == [0, 1, 0, 1, 2, -1, -1]


@pytest.mark.parametrize(('size', 'rows'), [(4096, 168), (24 * 8, 8), (24 * 16 - 1, 8), (24 * 16, 16), (1, 8)])
def test_a_batch_of_tokens_has_a_multiple_of_eight_rows(size, rows):
  assert BATCH_UNITS['tokens'](size, (20, 24)) == BATCH_UNITS['tokens'](size, (24, 20)) == rows


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'unit': 'token'}, "unknown batch unit 'token' (did you mean 'tokens'?); expected one of: sentences, tokens"),
    ({'share': Share(0, 3)}, 'the 4 rows of a batch cannot be divided among 3 processes'),
    ({'size': 0}, 'batch_size must be at least 1, got 0'),
    ({'seed': -1}, 'seed must be at least 0, got -1'),
    ({'share': Share(2, 2)}, 'the index of a share must be at least 0 and less than 2, got 2'),
    ({'buckets': ((1, 1),)}, 'none of the 1 rows fits a bucket of ((1, 1),); expected a larger bucket'),
    ({'buckets': (9,)}, 'length, each at least 1, such as ((20, 20), (40, 40)); got (9,)'),
    ({'buckets': ((0, 2),)}, 'buckets must be distinct pairs of a source and a target length, each at least 1'),
  ],
)
def test_invalid_arguments_are_reported(arguments, message):
  with pytest.raises(UserError) as caught:
    Batches(**{'encoded': make_split([(2, 3)]), 'buckets': BUCKETS, 'size': 4, **arguments})
  assert message in str(caught.value)


def test_a_split_with_too_few_fitting_rows_is_reported():
  check_rows_fit('test', np.array([-1, 0]), 0.5)
  check_rows_fit('test', np.array([-1, -1, 0]), 0.7)
  with pytest.raises(UserError, match=r'test: 2 of its 3 rows fit no bucket, a greater share than .*max_left_out=0.5;'):
    check_rows_fit('test', np.array([-1, -1, 0]), 0.5)
  with pytest.raises(UserError, match='test: none of its 2 rows fits a bucket'):
    check_rows_fit('test', np.array([-1, -1]), 1.0)


def unpack(batch):
  """The (source, target) ids of every pair of a packed batch."""
  for source, target, source_ids, target_ids in zip(batch.source, batch.target, *batch.segments, strict=True):
    assert (np.diff(source_ids[source_ids > 0]) >= 0).all() and (np.diff(target_ids[target_ids > 0]) >= 0).all()
    for number in range(1, source_ids.max() + 1):
      yield tuple(source[source_ids == number]), tuple(target[target_ids == number])


@pytest.mark.long
@given(ROWS, st.integers(1, 9), st.integers(0, 2**40))
def test_packed_batches_contain_every_fitting_pair_once_in_an_epoch(lengths, size, seed):
  rows = fitting_rows(lengths)
  if not rows:
    return
  split = make_split(lengths)
  batches = Batches(split, BUCKETS, size, seed=seed, packed=True)
  assert batches.shapes == [(size, 8, 13)]
  num_batches = len(Batches(split, BUCKETS, size, seed=seed + 1, packed=True))
  assert len(batches) == num_batches <= -(-len(rows) // size)
  for epoch in (0, 3):
    steps = range(epoch * num_batches, (epoch + 1) * num_batches)
    pairs = [pair for step in steps for pair in unpack(batches[step])]
    assert sorted(pairs) == sorted(tuple(map(tuple, split.row(row))) for row in rows)
    for step in steps:
      batch = batches[step]
      np.testing.assert_array_equal(batch.source_mask, batch.segments[0] > 0)
      np.testing.assert_array_equal(batch.target_mask, batch.segments[1] > 0)
      np.testing.assert_array_equal(batch.index >= 0, batch.target_mask.any(1))
      assert not batch.source[~batch.source_mask].any() and not batch.target[~batch.target_mask].any()


def test_packed_batches_depend_on_seed_and_step_alone_and_shares_partition_them():
  split = random_split(rows=97)
  options = {'buckets': ((30, 30),), 'size': 4, 'packed': True}
  batches = Batches(split, **options, seed=5)
  last = 2 * len(batches) - 1
  expected = [batches[step] for step in range(last + 1)]
  assert_equal_batches(Batches(split, **options, seed=5)[last], expected[last])
  shares = [Batches(split, **options, seed=5, share=Share(i, 2))[last] for i in range(2)]
  assert_equal_batches(
    [np.concatenate(sides) for sides in zip(*(x[:5] for x in shares), strict=True)], expected[last][:5]
  )
  first, second = (
    [set(unpack(batch)) for batch in part] for part in (expected[: len(batches)], expected[len(batches) :])
  )
  assert all(pairs not in first for pairs in second), 'each epoch draws the pairs of a batch anew'
  assert np.mean([batch.source_mask.mean() for batch in expected[: len(batches)]]) > 0.85


@pytest.mark.parametrize(
  ('lengths', 'expected'),
  [
    ([(8, 8), (5, 5), (3, 3), (4, 4), (4, 4), (1, 1)], [[(8, 8)], [(5, 5), (3, 3)], [(4, 4), (4, 4)], [(1, 1)]]),
    ([(6, 1), (1, 6), (2, 2), (2, 2)], [[(1, 6), (6, 1)], [(2, 2), (2, 2)]]),
    ([(2, 3)] * 5, [[(2, 3)] * 2, [(2, 3)] * 2, [(2, 3)]]),
  ],
)
def test_rows_take_the_longest_pair_that_fits(lengths, expected):
  batch = Batches(make_split(lengths), ((8, 8),), len(expected), packed=True)[0]
  for side, ids in enumerate(batch.segments):
    rows = [[int(n) for n in np.bincount(row[row > 0])[1:]] for row in ids]
    assert sorted(rows) == sorted([pair[side] for pair in row] for row in expected)
