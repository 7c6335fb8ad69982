"""Pictures of glimpses: the path of locations over an image, and the patches that were read at each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_jax.analysis.picture_files import check_png_path, report_write_errors
from attention_jax.functional.spatial import affine_grid, bilinear_sample

SIDE = 1.7  # inches of a panel
LINE = '#2f9e44'
NUMBER = '#ffd43b'


class GlimpsePath(NamedTuple):
  """An image and the locations of its glimpses.

  Attributes:
    picture: [height, width, C] uint8.
    locations: [T, 2], row and column from -1 to 1.
    title: title of the first panel.
    transforms: [T, 2, 3], transforms of functional.spatial that read a region; () for patches of a retina.
  """

  picture: np.ndarray
  locations: np.ndarray
  title: str = ''
  transforms: Any = ()


def write(items: Sequence[GlimpsePath], path: str | Path, size: int, scales: int) -> None:
  """Writes one PNG with a row for each image: the whole path with its finest patches, then a panel for each glimpse.

  Args:
    items: images, with different numbers of glimpses.
    path: ends with .png.
    size: side of the finest patch of the retina, see models.glimpses.retina, or of a region, pixels.
    scales: number of patches of the retina, each twice as wide as the one before.

  Raises:
    UserError: for a path that does not end with .png or cannot be written.
  """
  from matplotlib.figure import Figure

  check_png_path(path)
  columns = 1 + max(len(item.locations) for item in items)
  figure = Figure(figsize=(SIDE * columns, (SIDE + 0.25) * len(items)), layout='constrained')
  panels = figure.subplots(len(items), columns, squeeze=False)
  for axes in panels.flat:
    axes.axis('off')
  for (path_axes, *glimpse_axes), item in zip(panels, items, strict=True):
    centres = (item.locations + 1) / 2 * np.array(item.picture.shape[:2])
    _draw_path(path_axes, item, centres, size)
    for number, (axes, centre) in enumerate(zip(glimpse_axes, centres, strict=False), 1):
      if len(item.transforms):
        _draw_region(axes, item.picture, item.transforms[number - 1], size)
      else:
        _draw_glimpse(axes, item.picture, centre, size, scales)
      axes.set_title(str(number), fontsize=9)
  with report_write_errors(path):
    figure.savefig(path, dpi=110)


def _draw_path(axes, item: GlimpsePath, centres: np.ndarray, size: int) -> None:
  """Draws the image with the finest patch of each glimpse, and the numbered path of their centres."""
  from matplotlib.patheffects import withStroke

  _draw_picture(axes, item.picture)
  for theta in item.transforms:
    _draw_outline(axes, theta, item.picture.shape)
  for top, left in [] if len(item.transforms) else np.round(centres) - size // 2:
    _draw_frame(axes, top, left, size, 0.5)
  axes.plot(centres[:, 1], centres[:, 0], '-', color=LINE, linewidth=1.2)
  axes.scatter(centres[:, 1], centres[:, 0], s=10, color=LINE)
  outline = withStroke(linewidth=1.5, foreground='black')  # keeps numbers legible on white strokes
  for number, (row, column) in enumerate(centres, 1):
    axes.annotate(
      str(number),
      (column, row),
      color=NUMBER,
      fontsize=8,
      xytext=(3, 2),
      textcoords='offset points',
      path_effects=[outline],
    )
  height, width = item.picture.shape[:2]
  axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
  axes.set_title(item.title, fontsize=9)


def _draw_glimpse(axes, picture: np.ndarray, centre: np.ndarray, size: int, scales: int) -> None:
  """Draws the patches of the retina on top of each other: each covers twice the side at half the resolution."""
  widest = size * 2 ** (scales - 1)
  padded = np.pad(picture, [(widest, widest)] * 2 + [(0, 0)]).astype(float)
  padded_centre = np.round(centre).astype(int) + widest
  glimpse = np.zeros((widest, widest, picture.shape[-1]))
  for scale in reversed(range(scales)):
    cell = 2**scale
    width = size * cell
    top, left = padded_centre - width // 2
    patch = padded[top : top + width, left : left + width].reshape(size, cell, size, cell, -1).mean((1, 3))
    margin = (widest - width) // 2
    glimpse[margin : margin + width, margin : margin + width] = np.kron(patch, np.ones((cell, cell, 1)))
  _draw_picture(axes, glimpse)
  for scale in range(scales - 1):
    width = size * 2**scale
    margin = (widest - width) / 2
    _draw_frame(axes, margin, margin, width, 0.6**scale)


def _draw_region(axes, picture: np.ndarray, theta: np.ndarray, size: int) -> None:
  """Draws the region that a transform reads, resampled to size x size pixels."""
  region = bilinear_sample(picture.astype(np.float32), affine_grid(theta, size, size))
  _draw_picture(axes, np.asarray(region))


def _draw_outline(axes, theta: np.ndarray, shape: Sequence[int]) -> None:
  """Draws the outline of the region that a transform reads from a picture of this shape."""
  from matplotlib.patches import Polygon

  corners = np.array([[-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]]) @ np.asarray(theta).T
  pixels = (corners + 1) / 2 * np.array([shape[1], shape[0]]) - 0.5
  axes.add_patch(Polygon(pixels, fill=False, edgecolor=LINE, linewidth=1))


def _draw_picture(axes, picture: np.ndarray) -> None:
  """Draws 1 channel in grey and 3 in colours; of any other number their mean, in grey."""
  drawn = picture if picture.shape[-1] in (1, 3) else picture.mean(-1, keepdims=True)
  axes.imshow(drawn / 255.0, cmap='gray', vmin=0, vmax=1)


def _draw_frame(axes, top: float, left: float, width: int, alpha: float) -> None:
  from matplotlib.patches import Rectangle

  corner = (left - 0.5, top - 0.5)
  axes.add_patch(Rectangle(corner, width, width, fill=False, edgecolor=LINE, linewidth=1, alpha=alpha))
