"""Lower bounds of the memory that a config needs, checked before anything of that size is allocated."""

import math
import os
from typing import Any

import jax
import numpy as np

from attention_jax.errors import UserError
from attention_jax.systems.base import BatchSequence
from attention_jax.systems.config import RunConfig
from attention_jax.training.optim import make_optimizer, make_schedule

BYTES_PER_POSITION = 5  # an id, int32, and its mask, bool


def check_state_memory(config: RunConfig, params: Any) -> None:
  """Checks that parameters, moving average, gradients and optimiser state fit into the memory of all devices.

  Args:
    config: the config.
    params: the parameters of one run, or their shapes.

  Raises:
    UserError: if they do not fit; the message names the largest array.
  """
  training = config.training
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip, training.frozen)
  copies = 2 if training.average else 1  # parameters, moving average
  state = (params,) * copies, jax.eval_shape(optimizer.init, params)
  needed = config.seeds * _total_bytes(state) + _total_bytes(params)  # runs may be updated in turn
  path, largest = max(jax.tree.leaves_with_path(params), key=lambda leaf: _bytes(leaf[1]))
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  _check(
    f'parameters, {"moving average, " if training.average else ""}gradients and the state of {training.optimizer} need',
    needed,
    f'the largest array is {name} {list(largest.shape)}; lower the sizes of config.model or config.data.vocabulary',
  )


def check_batch_memory(config: RunConfig, batches: BatchSequence) -> None:
  """Checks that the largest batch fits into memory, as if each of its positions had an id and a mask only.

  Args:
    config: the config.
    batches: the batches of one run.

  Raises:
    UserError: if it does not fit; the message contains the shape of the batch.
  """

  def needed_bytes(shape):
    rows, *lengths = shape
    return config.seeds * rows * max(batches.min_row_positions(lengths), 1) * BYTES_PER_POSITION

  shape = max(batches.shapes, key=needed_bytes)
  fields = [f'config.data.{name}' for name in ('batch_size', 'buckets', 'lengths') if hasattr(config.data, name)]
  _check(
    f'a batch of shape ({batches.shape_names}) {shape} needs',
    needed_bytes(shape),
    f'lower {" or ".join(fields) or "the batch"}',
  )


def available_bytes() -> float:
  """Returns the memory of the devices of all processes, as if each process had as much as this one.

  On CPUs, it is main memory; it is infinite if an accelerator does not report its memory.
  """
  devices = jax.local_devices()
  if devices[0].platform == 'cpu':
    local = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  else:
    local = sum((device.memory_stats() or {}).get('bytes_limit', math.inf) for device in devices)
  return local * jax.process_count()


def _total_bytes(tree: Any) -> int:
  return sum(map(_bytes, jax.tree.leaves(tree)))


def _bytes(array: Any) -> int:
  return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _check(demand: str, needed: int, remedy: str) -> None:
  """Raises UserError if `needed` bytes exceed the memory; the message begins with `demand`, and ends with `remedy`."""
  available = available_bytes()
  if needed > available:
    raise UserError(
      f'{demand} at least {needed:,} bytes ({needed / 2**30:,.1f} GiB), more than the '
      f'{available / 2**30:,.1f} GiB of memory; {remedy}'
    )
