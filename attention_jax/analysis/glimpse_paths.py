"""Where a model looked in pictures, in order, and what it saw there."""

from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError

SIDE, LINE = 1.7, '#2f9e44'  # inches of a panel


class GlimpsePath(NamedTuple):
  """A picture [height, width, C] uint8 and the locations [T, 2] looked at: row and column, from -1 to 1."""

  picture: np.ndarray
  locations: np.ndarray
  title: str = ''


def write(items: Sequence[GlimpsePath], path: str | File, size: int, scales: int) -> None:
  """One PNG with a row for each picture: the whole path with its finest patches, then all patches of each glimpse.

  Args: size, scales: of the retina, see models.glimpses.retina.
  Raises: UserError for a path that does not end with .png or cannot be written.
  """
  from matplotlib.figure import Figure

  if File(path).suffix.lower() != '.png':
    raise UserError(f'{path}: pictures are PNG; give a path that ends with .png')
  columns = 1 + max(len(item.locations) for item in items)
  figure = Figure(figsize=(SIDE * columns, (SIDE + 0.25) * len(items)), layout='constrained')
  panels = figure.subplots(len(items), columns, squeeze=False)
  for axes in panels.flat:
    axes.axis('off')
  for row, item in zip(panels, items, strict=True):
    places = (item.locations + 1) / 2 * np.array(item.picture.shape[:2])
    _whole(row[0], item, places, size)
    for number, (axes, place) in enumerate(zip(row[1:], places, strict=False), 1):
      _glimpse(axes, item.picture, place, size, scales)
      axes.set_title(str(number), fontsize=9)
  try:
    figure.savefig(path, dpi=110)
  except OSError as error:
    raise UserError(f'{path}: cannot write the picture: {error.strerror}') from error


def _whole(axes, item: GlimpsePath, places: np.ndarray, size: int) -> None:
  from matplotlib.patheffects import withStroke

  _show(axes, item.picture)
  for row, column in np.round(places) - size // 2:
    _frame(axes, row, column, size, 0.5)
  axes.plot(places[:, 1], places[:, 0], '-', color=LINE, linewidth=1.2)
  axes.scatter(places[:, 1], places[:, 0], s=10, color=LINE)
  edge = [withStroke(linewidth=1.5, foreground='black')]  # numbers are read on white strokes too
  for number, (row, column) in enumerate(places, 1):
    axes.annotate(
      str(number),
      (column, row),
      color='#ffd43b',
      fontsize=8,
      xytext=(3, 2),
      textcoords='offset points',
      path_effects=edge,
    )
  axes.set(xlim=(-0.5, item.picture.shape[1] - 0.5), ylim=(item.picture.shape[0] - 0.5, -0.5))
  axes.set_title(item.title, fontsize=9)


def _glimpse(axes, picture: np.ndarray, place: np.ndarray, size: int, scales: int) -> None:
  """What the retina covers, coarser from scale to scale."""
  widest = size * 2 ** (scales - 1)
  padded = np.pad(picture, [(widest, widest)] * 2 + [(0, 0)]).astype(float)
  middle = np.round(place).astype(int) + widest
  shown = np.zeros((widest, widest, picture.shape[-1]))
  for scale in reversed(range(scales)):
    width, cell = size * 2**scale, 2**scale
    top, left = middle - width // 2
    patch = padded[top : top + width, left : left + width].reshape(size, cell, size, cell, -1).mean((1, 3))
    inner = (widest - width) // 2
    shown[inner : inner + width, inner : inner + width] = np.kron(patch, np.ones((cell, cell, 1)))
  _show(axes, shown)
  for scale in range(scales - 1):
    width = size * 2**scale
    _frame(axes, (widest - width) / 2, (widest - width) / 2, width, 0.6**scale)


def _show(axes, picture: np.ndarray) -> None:
  """Grey or in colours; of any other number of channels their mean."""
  shown = picture if picture.shape[-1] in (1, 3) else picture.mean(-1, keepdims=True)
  axes.imshow(shown / 255.0, cmap='gray', vmin=0, vmax=1)


def _frame(axes, top: float, left: float, width: int, alpha: float) -> None:
  from matplotlib.patches import Rectangle

  place = left - 0.5, top - 0.5
  axes.add_patch(Rectangle(place, width, width, fill=False, edgecolor=LINE, linewidth=1, alpha=alpha))
