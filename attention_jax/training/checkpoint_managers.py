"""Managers of orbax that read and write the checkpoints of one kind, and their retention policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from attention_jax.training.orbax_messages import without_orbax_messages


class CheckpointRetention(NamedTuple):
  """Retention policy: keeps the last `keep` regular states, and the very last state.

  A state is regular if its step is a multiple of `every`. A state that an interruption saved in between is deleted when
  the next one is saved, so that an interrupted run ends with the same checkpoints as an uninterrupted one.

  Attributes:
    keep: number of regular states to keep.
    every: steps between regular states; 0 means that there are none.
    pinned: returns the step of a further state that is kept, or None.
  """

  keep: int
  every: int
  pinned: Callable[[], int | None]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Implements orbax's PreservationPolicy; `checkpoints` are in the order of their steps."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    regular = [step for step in steps if self.every and step % self.every == 0]
    kept = {*regular[-self.keep :], steps[-1], self.pinned()}
    return [step in kept for step in steps]


def make_writer(folder: Path, retention: CheckpointRetention) -> ocp.CheckpointManager:
  """Returns the manager that reads and writes checkpoints.

  Args:
    folder: the folder of the checkpoints; created if it does not exist.
    retention: which checkpoints are kept.
  """
  # A thread that fails to create a folder would make the other threads wait for five minutes.
  async_options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
  options = ocp.CheckpointManagerOptions(
    create=True,
    preservation_policy=retention,
    cleanup_tmp_directories=True,
    async_options=async_options,
    multiprocessing_options=_multiprocessing_options(folder, alone=False),
  )
  with without_orbax_messages():
    return ocp.CheckpointManager(folder, options=options)


def make_reader(folder: Path) -> ocp.CheckpointManager | None:
  """Returns a manager with which this process reads checkpoints on its own; None if there is no folder."""
  if not folder.is_dir():
    return None
  options = ocp.CheckpointManagerOptions(
    save_interval_steps=0,
    read_only=True,
    create=False,
    enable_async_checkpointing=False,
    multiprocessing_options=_multiprocessing_options(folder, alone=True),
  )
  with without_orbax_messages():
    return ocp.CheckpointManager(folder, options=options)


def _multiprocessing_options(folder: Path, alone: bool) -> ocp.options.MultiprocessingOptions:
  """Returns which processes use a manager together, and a prefix that makes the names of its barriers unique."""
  prefix = f'{folder.parent.name}.{folder.name}'  # the checkpoints of several seeds are written at once
  if not alone or jax.process_count() == 1:
    return ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
  process = jax.process_index()
  return ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'{prefix}.{process}'
  )
