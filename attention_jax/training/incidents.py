"""Numerical incidents: stores batches whose loss or gradient is not finite, and detects spikes of the loss."""

import statistics
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.atomic import write_atomic
from attention_jax.errors import UserError
from attention_jax.training import peers

FOLDER = 'nonfinite'  # subfolder of the run folder, for the stored batches
SPIKE_WINDOW = 50  # number of earlier losses with which a loss is compared
SPIKE_DEVIATIONS = 8.0  # a spike exceeds their mean by more than this number of standard deviations,
SPIKE_RATIO = 1.5  # and this multiple of their mean
MAX_SPIKES = 5  # in a row; the loss has a new level after them
Stream = Callable[[int, int], Iterable]  # (start, stop) -> the batches of steps `start` to `stop` - 1


class BatchRecorder:
  """Builds a batch again, a pure function of its step, to store it or to list its rows.

  Args:
    folder: the run folder.
    stream: (start, stop) -> the batches of steps `start` to `stop` - 1.
    share: number of the share of each batch that `stream` yields in this process, see partition.process_share; several
      processes may read the same share.
    rows_axis: the axis of the rows in the arrays of a batch.
  """

  def __init__(self, folder: str | Path, stream: Stream, share: int = 0, rows_axis: int = 0):
    self._folder = Path(folder)
    self._stream = stream
    self._share = share
    self._rows_axis = rows_axis

  def store(self, update: int) -> Path | None:
    """Stores the arrays of the batch of an update; returns the file, or None in other processes than the first.

    All processes must call it: the first one stores the rows of all, in the order of the batch.

    Args:
      update: number of the update, from 1.
    """
    arrays = named_arrays(self._batch(update))
    if jax.process_count() > 1:
      shares = {int(share): part for part, share in peers.gather((arrays, np.asarray(self._share)))}
      parts = [shares[share] for share in sorted(shares)]
      arrays = {name: np.concatenate([part[name] for part in parts], self._rows_axis) for name in arrays}
    if jax.process_index() > 0:
      return None
    path = batch_path(self._folder, update)
    path.parent.mkdir(exist_ok=True)
    with write_atomic(path) as temporary, open(temporary, 'wb') as file:
      np.savez(file, **arrays)
    return path

  def rows(self, update: int, run: tuple[int, ...] = ()) -> list[int]:
    """Returns the `index` of the rows of a batch; none if it has no index.

    An index is a number in the training split or, if batches are generated, in the batch; of several processes, those
    of this one's share.

    Args:
      update: number of the update, from 1.
      run: the index (i,) among runs side by side, whose batches have a leading axis of runs; () for a single run.
    """
    index = getattr(self._batch(update), 'index', None)
    if index is None:
      return []
    rows = np.asarray(index)[run]
    return rows[rows >= 0].tolist()  # fillers have index -1

  def _batch(self, update: int) -> Any:
    return next(iter(self._stream(update - 1, update)))


class SpikeDetector:
  """Detects losses far above the last SPIKE_WINDOW ones that were not spikes.

  After MAX_SPIKES spikes in a row, losses are compared with those after them.
  """

  def __init__(self):
    self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
    self._spikes_in_a_row = 0

  def __call__(self, loss: float) -> float | None:
    """Returns the mean of the last SPIKE_WINDOW losses if `loss` is a spike; None otherwise, or if there are fewer."""
    losses = self._losses
    if len(losses) == SPIKE_WINDOW:
      mean = statistics.fmean(losses)
      bound = mean + SPIKE_DEVIATIONS * statistics.pstdev(losses)
      if loss > max(bound, SPIKE_RATIO * mean):
        self._spikes_in_a_row += 1
        if self._spikes_in_a_row == MAX_SPIKES:
          losses.clear()
        return mean
    self._spikes_in_a_row = 0
    losses.append(loss)
    return None


def batch_path(folder: Path, update: int) -> Path:
  """Returns the path of the stored batch of an update."""
  return folder / FOLDER / f'update_{update}.npz'


def stored_updates(folder: Path) -> list[int]:
  """Returns the numbers of the updates whose batches are stored in a run folder, ascending; skips other files."""
  names = [path.stem.removeprefix('update_') for path in (folder / FOLDER).glob('update_*.npz')]
  return sorted(int(name) for name in names if name.isdecimal())


def read_batch(folder: Path, update: int) -> dict[str, np.ndarray]:
  """Returns the arrays of a stored batch by name.

  Raises:
    UserError: if the file does not exist or cannot be read.
  """
  path = batch_path(folder, update)
  try:
    with np.load(path) as file:
      return {name: file[name] for name in file}
  except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a tree by their paths: {'source': ..., 'target': ...} for a batch."""
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf) for path, leaf in leaves}
