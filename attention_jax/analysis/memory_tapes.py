"""What a network with a memory was shown, what it said, and where it wrote and read, step by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError

LOOKED = 0.3  # the weight from which on a slot is one that was looked at


class MemoryTape(NamedTuple):
  """One episode of T steps.

  Attributes:
    inputs: [N, I], the inputs of the first steps.
    targets: [A, O], bits asked for in the steps after that.
    probabilities: [A, O], the probability of each.
    heads: weights [T, H, S] by what the heads do; those of no heads are not drawn.
  """

  inputs: np.ndarray
  targets: np.ndarray
  probabilities: np.ndarray
  heads: Mapping[str, np.ndarray]
  title: str = ''


def write(items: Sequence[MemoryTape], path: str | File) -> None:
  """One PNG with a column for each episode; steps go from left to right, as in Graves et al. 2014, figure 6.

  Raises: UserError for a path that does not end with .png or cannot be written.
  """
  from matplotlib.figure import Figure

  if File(path).suffix.lower() != '.png':
    raise UserError(f'{path}: pictures are PNG; give a path that ends with .png')
  columns = [_panels(item) for item in items]
  rows = max(map(len, columns))
  most = max(1.0, *(float(np.abs(picture).max(initial=0)) for column in columns for _, picture, _ in column))
  widths = [max(3.5, 0.09 * (len(item.inputs) + len(item.targets))) for item in items]
  heights = [
    max(0.9, 0.09 * max(column[row][1].shape[0] for column in columns if row < len(column))) for row in range(rows)
  ]
  figure = Figure(figsize=(sum(widths), sum(heights) + 0.35 * rows), layout='constrained')
  figure.get_layout_engine().set(wspace=0.05, hspace=0.03)
  grid = figure.subplots(
    rows, len(items), squeeze=False, gridspec_kw={'width_ratios': widths, 'height_ratios': heights}
  )
  for axes in grid.flat:
    axes.axis('off')
  for number, (item, column) in enumerate(zip(items, columns, strict=True)):
    for axes, panel in zip(grid[:, number], column, strict=False):
      _draw(axes, *panel, len(item.inputs), most)
    grid[0, number].set_title(f'{item.title}\n{column[0][0]}' if item.title else column[0][0], fontsize=9, loc='left')
  try:
    figure.savefig(path, dpi=110)
  except OSError as error:
    raise UserError(f'{path}: cannot write the picture: {error.strerror}') from error


def _panels(item: MemoryTape) -> list[tuple[str, np.ndarray, np.ndarray]]:
  """(title, picture with a column for each step, the number of each row)."""
  asked = len(item.targets)
  inputs = np.pad(item.inputs, ((0, asked), (0, 0)))
  later = lambda x: np.pad(x, ((len(item.inputs), 0), (0, 0)))
  found = [('shown', inputs.T), ('asked for', later(item.targets).T), ('said', later(item.probabilities).T)]
  found = [(title, picture, np.arange(len(picture))) for title, picture in found]
  for name, weights in item.heads.items():
    for head in range(weights.shape[1]):
      own = weights[:, head].T
      slots = smallest_arc(own.max(1) >= LOOKED)
      number = f' of head {head + 1}' if weights.shape[1] > 1 else ''
      found.append((f'{name} weights{number}, slots {slots[0]} to {slots[-1]}', own[slots], slots))
  return found


def smallest_arc(used: np.ndarray) -> np.ndarray:
  """The numbers of the slots of a ring, in its order, from the first to the last that is used: as few as can be. All
  where none is.

  Args: used [S] bool.
  """
  there = np.flatnonzero(used)
  if not len(there):
    return np.arange(len(used))
  gaps = np.diff(there, append=there[0] + len(used))  # behind each of them
  widest = int(gaps.argmax())
  return (there[(widest + 1) % len(there)] + np.arange(len(used) - gaps[widest] + 1)) % len(used)


def _draw(axes, title: str, picture: np.ndarray, rows: np.ndarray, shown: int, most: float) -> None:
  """White is 0, black `most`, and what is below 0 is blue."""
  from matplotlib.colors import LinearSegmentedColormap
  from matplotlib.ticker import FuncFormatter, MaxNLocator

  axes.axis('on')
  colours = LinearSegmentedColormap.from_list('signed', ['#1c7ed6', 'white', 'black'])
  axes.imshow(picture, cmap=colours, vmin=-most, vmax=most, aspect='auto', interpolation='nearest')
  axes.axvline(shown - 0.5, color='#e8590c', linewidth=0.8)
  axes.set_title(title, fontsize=9, loc='left')
  axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: str(rows[round(y)]) if 0 <= y <= len(rows) - 1 else ''))
  axes.tick_params(labelsize=7)
