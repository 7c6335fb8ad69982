"""Estimates of the time and memory of implementations on accelerators, by which 'auto' chooses there.

The time of a candidate, forward and backward, is the largest of its matrix products at the chip's rate and its
traffic of main memory at the chip's rate, plus START for each of its kernels. Both are those of the blocks that it
visits; the traffic and the temporary memory of arrays [T, S] are those that XLA reports for a TPU v5e
(lab/benchmarks.md). tanh is left out: all candidates for an additive score compute it equally often, or more often
where they save memory. Nothing was measured, except SLOWER['cudnn'].
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from attention_jax.functional.attend import Problem
from attention_jax.functional.mask import Mask
from attention_jax.functional.table import TanhSum


class Chip(NamedTuple):
  """Rates and memory of a chip, as its vendor publishes them.

  Attributes:
    flops: multiplications and additions of bfloat16 per second.
    memory: bytes of main memory.
    bandwidth: bytes of main memory read or written per second.
  """

  flops: float
  memory: float
  bandwidth: float


# By the kind of the device, as jax names it. Sources: the pages of cloud.google.com/tpu/docs about v4, v5e, v5p and
# v6e, and NVIDIA's data sheets of A100, H100 SXM and H200 (products of dense matrices).
CHIPS: Mapping[str, Chip] = {
  'TPU v4': Chip(275e12, 32 * 2**30, 1228e9),
  'TPU v5 lite': Chip(197e12, 16 * 2**30, 819e9),
  'TPU v5': Chip(459e12, 95 * 2**30, 2765e9),
  'TPU v6 lite': Chip(918e12, 32 * 2**30, 1640e9),
  'NVIDIA A100-SXM4-80GB': Chip(312e12, 80e9, 2039e9),
  'NVIDIA H100 80GB HBM3': Chip(989e12, 80e9, 3350e9),
  'NVIDIA H200': Chip(989e12, 141e9, 4800e9),
}
DEFAULT_CHIPS = {'gpu': 'NVIDIA A100-SXM4-80GB'}  # by platform, for a kind without a row; a TPU v5e for the others
BLOCK = 512  # queries, and positions, of a block
SCORE_TRAFFIC = 50  # bytes of traffic of the definition per score of a product, forward and backward
SCORE_MEMORY = 13  # bytes of its temporary memory per score
START = 10e-6  # seconds to start a kernel
# Factors on the time of the definition of what is used where memory counts, not time. 'cudnn' with a dense mask or a
# bias took 2.3 times as long as the definition on an H200 (8 heads, T = S = 2048). The others are guesses.
SLOWER = {'cudnn': 2.3, 'flash': 2.0, 'chunked': 1.5}
MEMORY_SHARE = 1 / 8  # of the chip's memory, that one attention may use: the layers of a model store theirs together


class Sizes(NamedTuple):
  """What the cost of attention depends on.

  Attributes:
    rows: number of sequences times heads.
    queries, positions: T and S.
    width: features of a key and a value together.
    features: F of a score v · tanh(q + k) and of a recurrent one, whose gradients read arrays [T, S, F]; else 0.
    itemsize: bytes of a number.
    visited: share of the blocks of [T, S] in which the bands of the mask leave anything.
    is_dense: whether there is a bias, or a mask that the kernels of libraries do not take as structure.
  """

  rows: int
  queries: int
  positions: int
  width: int
  features: int = 0
  itemsize: int = 2
  visited: float = 1.0
  is_dense: bool = False

  @property
  def scores(self) -> int:
    """Number of scores of all rows."""
    return self.rows * self.queries * self.positions

  @property
  def operands(self) -> int:
    """Bytes of queries, keys, values and contexts."""
    return self.rows * (self.queries + self.positions) * self.width * self.itemsize


class Cost(NamedTuple):
  """Cost of one implementation, forward and backward.

  Attributes:
    flop: of its matrix products.
    traffic: bytes of main memory read and written.
    memory: bytes of its temporary arrays.
    kernels: number of kernels that are started.
    slower: factor of the time.
  """

  flop: float
  traffic: float
  memory: float
  kernels: int = 0
  slower: float = 1.0

  def seconds(self, chip: Chip) -> float:
    """The estimated time on this chip."""
    return self.slower * max(self.flop / chip.flops, self.traffic / chip.bandwidth) + self.kernels * START


def _definition(sizes: Sizes) -> Cost:
  # The gradient of an additive score reads an array [T, S, F] that the forward pass has written.
  sums = sizes.scores * sizes.features * sizes.itemsize
  traffic = 3 * sizes.operands + SCORE_TRAFFIC * sizes.scores + 2 * sums
  return Cost(6 * sizes.scores * sizes.width, traffic, SCORE_MEMORY * sizes.scores + sums)


def _in_blocks(products: int) -> Callable[[Sizes], Cost]:
  """Cost of a kernel that keeps scores on the chip and computes `products` products [T, S] x features."""

  def cost(sizes: Sizes) -> Cost:
    # Each block of queries reads the keys and values that it visits; each block of keys likewise.
    reads = sizes.visited * sizes.rows * sizes.queries / BLOCK * sizes.positions * sizes.width * sizes.itemsize
    statistics = 512 * sizes.rows * sizes.queries  # log sums of exponentials, 128 lanes of float32
    flop = products * sizes.visited * sizes.scores * sizes.width
    return Cost(flop, 3 * sizes.operands + 3 * reads, statistics, kernels=3)

  return cost


def _additive(sizes: Sizes) -> Cost:
  # Each span of keys writes its sums for all queries; its largest scores and sums of exponentials fill 128 lanes each.
  spans = math.ceil(sizes.positions / BLOCK)
  sums = 4 * spans * sizes.rows * sizes.queries * (sizes.width - sizes.features + 2 * 128)
  sums += 4 * sizes.queries * sizes.positions  # the mask, as a bias of float32
  cost = _in_blocks(6)(sizes)
  return cost._replace(traffic=cost.traffic + 2 * sums, memory=cost.memory + sums)


def _cudnn(sizes: Sizes) -> Cost:
  if sizes.is_dense:
    return _definition(sizes)._replace(memory=2 * sizes.scores / 17, slower=SLOWER['cudnn'])
  return _in_blocks(7)(sizes)


def _where_memory_counts(name: str) -> Callable[[Sizes], Cost]:
  """Cost of an implementation in blocks without a kernel."""

  def cost(sizes: Sizes) -> Cost:
    block = sizes.rows * BLOCK * BLOCK * (SCORE_MEMORY + sizes.features * sizes.itemsize)
    return _definition(sizes)._replace(memory=min(block, _definition(sizes).memory), slower=SLOWER[name])

  return cost


def _window(sizes: Sizes) -> Cost:
  return _definition(sizes._replace(positions=min(sizes.positions, BLOCK)))._replace(kernels=1)


def _linear(sizes: Sizes) -> Cost:
  products = 6 * sizes.rows * (sizes.queries + sizes.positions) * sizes.width**2
  return Cost(products, 8 * sizes.operands, 4 * sizes.operands, kernels=1)


COSTS: Mapping[str, Callable[[Sizes], Cost]] = {
  'xla': _definition,  # first: it is used unless another one is faster, or it needs too much memory
  'splash': _in_blocks(9),
  'cudnn': _cudnn,
  'pallas_additive': _additive,
  'window': _window,
  'linear': _linear,
  'flash': _where_memory_counts('flash'),
  'chunked': _where_memory_counts('chunked'),
}


def choose_by_cost(names: Iterable[str], sizes: Sizes, chip: Chip) -> str:
  """Returns the fastest of `names` and 'xla' among those within MEMORY_SHARE; the smallest if none is.

  Args:
    names: keys of COSTS that support the problem.
    sizes: its sizes.
    chip: the chip.
  """
  costs = {name: COSTS[name](sizes) for name in COSTS if name in {'xla', *names}}
  fitting = [name for name, cost in costs.items() if cost.memory <= MEMORY_SHARE * chip.memory]
  if not fitting:
    return min(costs, key=lambda name: costs[name].memory)
  return min(fitting, key=lambda name: costs[name].seconds(chip))


def sizes_of(problem: Problem) -> Sizes:
  """Returns the sizes of a problem with all of its leading axes."""
  score, query, (key, value, mask, *_) = problem.score, problem.query, problem.memory
  leading = jax.numpy.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
  return Sizes(
    math.prod(leading),
    query.shape[-2],
    key.shape[-2],
    key.shape[-1] + value.shape[-1],
    key.shape[-1] if isinstance(score.form, TanhSum) or score.is_recurrent else 0,
    query.dtype.itemsize,
    visited_share(mask, query.shape[-2], key.shape[-2]),
    problem.bias is not None or mask.remainder is not None or mask.query_segments is not None,
  )


def visited_share(mask: Mask, num_queries: int, size: int) -> float:
  """Returns the share of blocks in which the bands of the mask leave anything; 1.0 for queries with an offset.

  Args:
    mask: the mask.
    num_queries, size: T and S.
  """
  if not mask.bands or mask.offset is not None or not num_queries or not size:
    return 1.0
  queries, positions = np.arange(0, num_queries, BLOCK)[:, None], np.arange(0, size, BLOCK)[None]
  ends = (queries, queries + BLOCK - 1), (positions, positions + BLOCK - 1)
  return float(np.logical_and.reduce([band.classify(*ends)[0] for band in mask.bands]).mean())


def chip_of_platform(platform: str) -> Chip:
  """Returns the chip of this machine, or the default chip of a platform that it is not."""
  kind = jax.devices()[0].device_kind if jax.default_backend() == platform else ''
  return CHIPS.get(kind) or CHIPS[DEFAULT_CHIPS.get(platform, 'TPU v5 lite')]
