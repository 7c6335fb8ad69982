"""What a captioner looks at while it says a word: maps over the picture, side by side and as an animation."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.analysis import fonts
from attention_jax.errors import UserError

SIDE, GOLD, INK = 1.6, '#e8590c', '#24292f'  # inches of a panel
PER_ROW, REFERENCES = 7, 2


class CaptionOverlay(NamedTuple):
  """A picture [height, width, 3] uint8, the words said of it, and where was looked: weights [words, rows, columns].

  boxes: of each word the gold box (left, top, right, bottom) in pixels, or None.
  references: captions that others have given; as many as there is room for are written above.
  gold: every box of them.
  cell_centres: of the rows and of the columns of the maps, from 0 to 1; None where cells share the picture evenly.
  """

  picture: np.ndarray
  words: Sequence[str]
  maps: np.ndarray
  title: str = ''
  boxes: Sequence | None = None
  cell_centres: tuple[np.ndarray, np.ndarray] | None = None
  references: Sequence[str] = ()
  gold: Sequence = ()


def write(items: Sequence[CaptionOverlay], path: str | Path) -> None:
  """One PNG with a panel for each word of each item, and beside it the same as a GIF with a frame for each word.

  Raises: UserError for a path that does not end with .png or cannot be written.
  """
  path = Path(path)
  if path.suffix.lower() != '.png':
    raise UserError(f'{path}: pictures are PNG; give a path that ends with .png')
  try:
    _grid(items, path)
    _animate(items, path.with_suffix('.gif'))
  except OSError as error:
    raise UserError(f'{path}: cannot write the picture: {error.strerror}') from error


def blend_weights(picture: np.ndarray, weights: np.ndarray, cell_centres=None) -> np.ndarray:
  """The picture, lit where the weights are heavy and dark elsewhere: [height, width, 3] from 0 to 1."""
  even = [(np.arange(size) + 0.5) / size for size in weights.shape]
  rows, columns = (
    np.stack([np.interp((np.arange(size) + 0.5) / size, at, unit) for unit in np.eye(len(at))])
    for size, at in zip(picture.shape, cell_centres or even, strict=False)
  )
  light = (rows.T @ (weights / max(float(weights.max()), 1e-9)) @ columns)[..., None]
  return picture / 255.0 * (0.25 + 0.75 * light)


def _grid(items: Sequence[CaptionOverlay], path: Path) -> None:
  from matplotlib.figure import Figure

  lines = [-(-(len(item.words) + 1) // PER_ROW) for item in items]
  heights = [
    (SIDE + 0.3) * count + 0.22 * len(item.references[:REFERENCES]) for item, count in zip(items, lines, strict=True)
  ]
  figure = Figure(figsize=(SIDE * PER_ROW, sum(heights)), layout='constrained')
  parts = figure.subfigures(len(items), 1, height_ratios=heights, squeeze=False)[:, 0]
  for part, item, count in zip(parts, items, lines, strict=True):
    panels = part.subplots(count, PER_ROW, squeeze=False)
    for axes in panels.flat:
      axes.axis('off')
    given = '\n'.join(abbreviate(f'given: {reference}', 150) for reference in item.references[:REFERENCES])
    if given:
      part.suptitle(
        given, x=0.01, ha='left', fontsize=9, color=GOLD, parse_math=False, family=fonts.font_families(given)
      )
    places = panels.flat
    _panel(next(places), item.picture / 255.0, item.title, item.gold)
    for word, (text, weights) in enumerate(zip(item.words, item.maps, strict=True)):
      _panel(next(places), blend_weights(item.picture, weights, item.cell_centres), text, [_box(item, word)])
  figure.savefig(path, dpi=110)


def _box(item: CaptionOverlay, word: int):
  return item.boxes[word] if item.boxes is not None and word < len(item.boxes) else None


def _panel(axes, picture: np.ndarray, title: str, boxes: Sequence) -> None:
  from matplotlib.patches import Rectangle

  axes.imshow(picture, vmin=0, vmax=1)
  axes.set_title(abbreviate(title, 20), fontsize=9, color=INK, parse_math=False, family=fonts.font_families(title))
  for box in filter(None, boxes):
    (left, upper, right, lower), style = box, {'fill': False, 'edgecolor': GOLD, 'linewidth': 1.5}
    axes.add_patch(Rectangle((left - 0.5, upper - 0.5), right - left, lower - upper, **style))


def abbreviate(title: str, most: int) -> str:
  """At most so many characters; what is left out in the middle is '…'."""
  keep = most // 2
  return title if len(title) <= most else f'{title[:keep]}…{title[-(most - keep - 1) :]}'


def last_words(words: Sequence[str], most: int) -> str:
  """As many whole words from the end as fit into so many characters; '…' stands for those before."""
  start = len(words) - 1
  while start > 0 and len(' '.join(words[start - 1 :])) + 2 * (start > 1) <= most:
    start -= 1
  return '… ' * (start > 0) + ' '.join(words[max(start, 0) :])


def _animate(items: Sequence[CaptionOverlay], path: Path) -> None:
  from PIL import Image, ImageDraw, ImageFont

  size, frames = 320, []
  font = lambda text, size: ImageFont.truetype(fonts.font_file(text), size)
  for item in items:
    if not len(item.words):  # nothing is said: the picture alone
      item = item._replace(words=[''], maps=np.ones((1, 1, 1)), cell_centres=None)
    for word, weights in enumerate(item.maps):
      lit = Image.fromarray((255 * blend_weights(item.picture, weights, item.cell_centres)).astype(np.uint8))
      frame = Image.new('RGB', (size, size + 64), 'white')
      frame.paste(lit.resize((size, size), Image.Resampling.BICUBIC), (0, 0))
      pen = ImageDraw.Draw(frame)
      if box := _box(item, word):
        pen.rectangle([edge * size / side for edge, side in zip(box, 2 * lit.size, strict=True)], outline=GOLD, width=2)
      said, so_far = item.words[word], last_words(item.words[: word + 1], 42)
      pen.text((8, size + 6), said, fill=INK, font=font(said, 18))
      pen.text((8, size + 34), so_far, fill='#57606a', font=font(so_far, 13))
      frames.append(frame)
  frames[0].save(path, save_all=True, append_images=frames[1:], duration=600, loop=0)
