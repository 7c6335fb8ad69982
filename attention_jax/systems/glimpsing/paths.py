"""Pictures of glimpses: the path of locations over an image, and the patches that were read at each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_jax.analysis import picture_page
from attention_jax.analysis.picture_files import select_by_suffix
from attention_jax.atomic import write_atomic
from attention_jax.errors import report_write_errors
from attention_jax.functional.spatial import affine_grid, bilinear_sample

SIDE = 1.7  # inches of a panel
LINE = '#2f9e44'
NUMBER = '#ffd43b'


class GlimpsePath(NamedTuple):
  """An image and the locations of its glimpses.

  Attributes:
    picture: [height, width, C] uint8.
    locations: [T, 2], row and column of the centres, from -1 at the top left to 1 at the bottom right.
    title: title of the first panel in a picture, or the name of the example on a page.
    transforms: [T, 2, 3], transforms of functional.spatial that read a region; () for patches of a retina.
  """

  picture: np.ndarray
  locations: np.ndarray
  title: str = ''
  transforms: Any = ()


def write(items: Sequence[GlimpsePath], path: str | Path, size: int, scales: int) -> None:
  """Writes a page with a slider over glimpses, or a picture.

  A picture has a row for each image: the whole path with its finest patches or regions, then a panel for each glimpse.

  Args:
    items: images; they may have different numbers of glimpses.
    path: ends with .html or .png.
    size: side in pixels of the finest patch of the retina (glimpses.retina), or of a resampled region.
    scales: number of patches of the retina, each twice as wide as the one before; not used for regions.

  Raises:
    UserError: for a path that ends neither with .html nor with .png, or cannot be written.
  """
  write_items = select_by_suffix(path, {'.html': _write_page, '.png': _write_picture})
  with report_write_errors(path):
    write_items(items, path, size, scales)


def _write_page(items: Sequence[GlimpsePath], path: str | Path, size: int, scales: int) -> None:
  examples = [_to_example(item, size, scales) for item in items]
  picture_page.write_page(examples, path, 'Glimpses: where they were, and what was read')


def _to_example(item: GlimpsePath, size: int, scales: int) -> picture_page.SteppedExample:
  """The example of a page: the picture with the path and its patches or regions, and each glimpse beside it."""
  sides = np.array(item.picture.shape[:2])
  centres = _centres(item)
  corners = np.round(centres) - size // 2
  boxes = [tuple(np.concatenate([corner[::-1], corner[::-1] + size]) / np.tile(sides[::-1], 2)) for corner in corners]
  if len(item.transforms):
    outlines = [(_outline(theta) + 1) / 2 for theta in item.transforms]
    boxes = [(*outline.min(axis=0), *outline.max(axis=0)) for outline in outlines]
  return picture_page.SteppedExample(
    name=item.title,
    steps=[f'glimpse {number}' for number in range(1, len(centres) + 1)],
    frames=[item.picture],
    boxes=[boxes, *([box] for box in boxes)],
    path=(centres / sides)[:, ::-1],
    details=[np.round(patch).astype(np.uint8) for patch in _patches(item, size, scales)],
  )


def _centres(item: GlimpsePath) -> np.ndarray:
  """Centres of the glimpses in pixels from the top left corner of the picture: [T, 2], row and column."""
  return (item.locations + 1) / 2 * np.array(item.picture.shape[:2])


def _write_picture(items: Sequence[GlimpsePath], path: str | Path, size: int, scales: int) -> None:
  from matplotlib.figure import Figure

  columns = 1 + max(len(item.locations) for item in items)
  figure = Figure(figsize=(SIDE * columns, (SIDE + 0.25) * len(items)), layout='constrained')
  panels = figure.subplots(len(items), columns, squeeze=False)
  for axes in panels.flat:
    axes.axis('off')
  for (path_axes, *glimpse_axes), item in zip(panels, items, strict=True):
    centres = _centres(item)
    _draw_path(path_axes, item, centres, size)
    framed_scales = range(0 if len(item.transforms) else scales - 1)  # the widest patch fills the panel
    for number, (axes, patch) in enumerate(zip(glimpse_axes, _patches(item, size, scales), strict=False), 1):
      _draw_patch(axes, patch, size, framed_scales)
      axes.set_title(str(number), fontsize=9)
  with write_atomic(path) as temporary:
    figure.savefig(temporary, format='png', dpi=110)


def _draw_path(axes, item: GlimpsePath, centres: np.ndarray, size: int) -> None:
  """Draws the image with the finest patch or the region of each glimpse, and the numbered path of their centres."""
  from matplotlib.patheffects import withStroke

  _draw_picture(axes, item.picture)
  for theta in item.transforms:
    _draw_outline(axes, theta, item.picture.shape)
  for top, left in [] if len(item.transforms) else np.round(centres) - size // 2:
    _draw_frame(axes, top, left, size, 0.5)
  points = centres - 0.5  # imshow draws pixel i from i - 0.5 to i + 0.5
  axes.plot(points[:, 1], points[:, 0], '-', color=LINE, linewidth=1.2)
  axes.scatter(points[:, 1], points[:, 0], s=10, color=LINE)
  outline = withStroke(linewidth=1.5, foreground='black')  # keeps numbers legible on white strokes
  for number, (row, column) in enumerate(points, 1):
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
  axes.set_title(item.title, fontsize=9, parse_math=False)


def _patches(item: GlimpsePath, size: int, scales: int) -> list[np.ndarray]:
  """The picture of each glimpse: the patches of the retina, or the region resampled to size x size pixels."""
  if len(item.transforms):
    picture = item.picture.astype(np.float32)
    return [np.asarray(bilinear_sample(picture, affine_grid(theta, size, size))) for theta in item.transforms]
  return [_glimpse(item.picture, centre, size, scales) for centre in _centres(item)]


def _draw_patch(axes, patch: np.ndarray, size: int, framed_scales: Sequence[int]) -> None:
  """Draws what is read, and a frame around the patch of each of these scales, whose side is size * 2**scale."""
  _draw_picture(axes, patch)
  for scale in framed_scales:
    width = size * 2**scale
    margin = len(patch) // 2 - width // 2  # patches of odd sides are not centred
    _draw_frame(axes, margin, margin, width, 0.6**scale)


def _glimpse(picture: np.ndarray, centre: np.ndarray, size: int, scales: int) -> np.ndarray:
  """The patches of the retina on top of each other: each covers twice the side at half the resolution."""
  widest = size * 2 ** (scales - 1)
  padded = np.pad(picture, [(widest, widest)] * 2 + [(0, 0)]).astype(float)
  padded_centre = np.round(centre).astype(int) + widest
  glimpse = np.zeros((widest, widest, picture.shape[-1]))
  for scale in reversed(range(scales)):
    cell = 2**scale
    width = size * cell
    top, left = padded_centre - width // 2
    patch = padded[top : top + width, left : left + width].reshape(size, cell, size, cell, -1).mean((1, 3))
    margin = widest // 2 - width // 2
    glimpse[margin : margin + width, margin : margin + width] = np.kron(patch, np.ones((cell, cell, 1)))
  return glimpse


def _outline(theta: np.ndarray) -> np.ndarray:
  """Corners (x, y) of the region that a transform reads, [4, 2]; the picture extends from -1 to 1."""
  return np.array([[-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]]) @ np.asarray(theta).T


def _draw_outline(axes, theta: np.ndarray, shape: Sequence[int]) -> None:
  """Draws the outline of the region that a transform reads from a picture of this shape."""
  from matplotlib.patches import Polygon

  pixels = (_outline(theta) + 1) / 2 * np.array([shape[1], shape[0]]) - 0.5
  axes.add_patch(Polygon(pixels, fill=False, edgecolor=LINE, linewidth=1))


def _draw_picture(axes, picture: np.ndarray) -> None:
  """Draws 1 channel in grey and 3 in colours; of any other number their mean, in grey."""
  drawn = picture if picture.shape[-1] in (1, 3) else picture.mean(-1, keepdims=True)
  axes.imshow(drawn / 255.0, cmap='gray', vmin=0, vmax=1)


def _draw_frame(axes, top: float, left: float, width: int, alpha: float) -> None:
  from matplotlib.patches import Rectangle

  corner = (left - 0.5, top - 0.5)
  axes.add_patch(Rectangle(corner, width, width, fill=False, edgecolor=LINE, linewidth=1, alpha=alpha))
