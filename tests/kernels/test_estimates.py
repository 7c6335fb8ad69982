"""Estimates of time and memory by which 'auto' chooses on accelerators."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.attend import Problem
from attention_jax.kernels import estimates
from attention_jax.kernels.estimates import BLOCK, CHIPS, COSTS, MEMORY_SHARE, Sizes, choose_by_cost, visited_share
from tests.functional.helpers import lookup_rows

V5E = CHIPS['TPU v5 lite']
LONG = Sizes(rows=32, queries=4096, positions=4096, width=256)


@pytest.mark.parametrize(
  ('names', 'sizes', 'expected'),
  [
    (('splash', 'flash'), LONG, 'splash'),
    (('splash', 'flash'), LONG._replace(rows=1, queries=64, positions=64), 'xla'),  # starting kernels takes longer
    (('flash',), LONG._replace(rows=1), 'xla'),
    (('flash',), LONG._replace(rows=8, queries=2**15, positions=2**15), 'flash'),  # the definition does not fit
    (('cudnn',), LONG, 'cudnn'),
    (('cudnn',), LONG._replace(rows=8, is_dense=True), 'xla'),  # as measured
    (('cudnn',), LONG._replace(is_dense=True), 'cudnn'),  # memory counts
    (('pallas_additive', 'chunked'), LONG._replace(features=128), 'pallas_additive'),
    (('pallas_additive', 'chunked'), LONG._replace(rows=8, queries=2**15, positions=2**15, features=128), 'chunked'),
    (('chunked',), LONG._replace(features=128), 'chunked'),
    (('chunked',), LONG._replace(rows=8, queries=64, positions=64, features=128), 'xla'),
    (('linear',), LONG, 'linear'),
    (('window',), LONG, 'window'),
    (('splash',), LONG._replace(queries=2**22, positions=2**22), 'splash'),  # nothing fits: the smallest
  ],
)
def test_the_choice_is_the_fastest_that_fits(names, sizes, expected):
  assert choose_by_cost(names, sizes, V5E) == expected


@pytest.mark.parametrize('chip', CHIPS)
def test_the_choice_is_never_slower_than_the_definition_where_that_fits_and_fits_where_anything_does(chip):
  limit = MEMORY_SHARE * CHIPS[chip].memory
  axes = (1, 64), (32, 512, 8192), (128, 4096, 2**17), (0, 256), (False, True)
  for rows, queries, positions, features, is_dense in itertools.product(*axes):
    sizes = Sizes(rows, queries, positions, 512, features, is_dense=is_dense)
    costs = {name: cost(sizes) for name, cost in COSTS.items()}
    chosen = costs[choose_by_cost(COSTS, sizes, CHIPS[chip])]
    if costs['xla'].memory <= limit:
      assert chosen.seconds(CHIPS[chip]) <= costs['xla'].seconds(CHIPS[chip])
    assert chosen.memory <= limit or all(cost.memory > limit for cost in costs.values())


def test_the_memory_of_the_additive_kernel_is_that_of_the_compiler():
  # 1812 MB for one TPU v5e, forward, with a causal mask (lab/benchmarks.md).
  assert COSTS['pallas_additive'](LONG._replace(features=128)).memory == pytest.approx(1812e6, rel=0.1)


@pytest.mark.parametrize(
  'mask', [aj.Mask(), aj.Mask.causal(), aj.Mask.window(700, 700), aj.Mask.window(512, 0, sinks=4) & aj.Mask.causal()]
)
@pytest.mark.parametrize(('num_queries', 'size'), [(2048, 2048), (1, 5), (2048, 512), (600, 3000)])
def test_the_share_of_visited_blocks_is_that_of_the_dense_mask(mask, num_queries, size):
  rows, columns = (-(-n // BLOCK) * BLOCK for n in (num_queries, size))
  dense = np.asarray(mask.dense(rows, columns)).reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
  assert visited_share(mask, num_queries, size) == dense.any((1, 3)).mean()


def test_sizes_have_all_leading_axes_and_know_what_is_dense():
  query, key = jnp.zeros((2, 4, 8, 16), jnp.bfloat16), jnp.zeros((2, 1, 6, 16), jnp.bfloat16)
  problem = Problem(*lookup_rows('scaled_dot', 'softmax'), {}, query, aj.Memory(key, key, aj.Mask()))
  assert estimates.sizes_of(problem) == Sizes(8, 8, 6, 32)
  assert estimates.sizes_of(problem._replace(bias=jnp.zeros((8, 6)))).is_dense
  for score in ('additive', 'coverage'):
    assert estimates.sizes_of(problem._replace(score=aj.SCORES[score])).features == 16
