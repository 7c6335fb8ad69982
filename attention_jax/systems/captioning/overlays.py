"""Attention maps of captions: for each word the image lit by its weights, as a page, or as panels and an animation."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from attention_jax.analysis import fonts, picture_page
from attention_jax.analysis.picture_files import select_by_suffix
from attention_jax.atomic import write_atomic
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.predictor import Hypothesis
from attention_jax.errors import report_write_errors
from attention_jax.systems.captioning.data import Pictures, read_image
from attention_jax.systems.captioning.pointing_game import Box

SIDE = 1.6  # inches of a panel
GOLD = '#e8590c'
INK = '#24292f'
PALE_INK = '#57606a'
PER_ROW = 7  # panels
MAX_REFERENCES = 2
FRAME_SIDE = 320  # pixels of the longer side of the image in a frame of the animation
TEXT_HEIGHT = 64  # pixels below the image


IMAGE_SIZE = 224  # side of a plotted image file, in pixels
CellCentres = tuple[np.ndarray, np.ndarray]  # of the rows and of the columns of cells, from 0 to 1


class CaptionOverlay(NamedTuple):
  """An image, its predicted caption, and the weights of each word.

  Attributes:
    picture: [height, width, 3] uint8.
    words: words of the caption.
    maps: weights [words, rows, columns].
    title: title of the panel without weights, or the name of the example on a page; not part of the animation.
    boxes: gold box (left, top, right, bottom) in pixels, or None, for each word.
    cell_centres: centres of the rows and columns of the maps, from 0 to 1; None if cells divide the image evenly.
    references: reference captions; a page and the panels show the first MAX_REFERENCES.
    gold: gold boxes of a reference, outlined in the image without weights.
  """

  picture: np.ndarray
  words: Sequence[str]
  maps: np.ndarray
  title: str = ''
  boxes: Sequence[Box | None] | None = None
  cell_centres: tuple[np.ndarray, np.ndarray] | None = None
  references: Sequence[str] = ()
  gold: Sequence[Box] = ()


def write(items: Sequence[CaptionOverlay], path: str | epath.Path) -> None:
  """Writes a page (.html) with a slider over words, or pictures (.png).

  Pictures are one PNG with a panel for each word of each item, and beside it a GIF with a frame for each word.

  Raises:
    UserError: for a path that ends neither with .html nor with .png, or cannot be written.
  """
  write_items = select_by_suffix(path, {'.html': _write_page, '.png': _write_pictures})
  with report_write_errors(path):
    write_items(items, epath.Path(path))


def _write_page(items: Sequence[CaptionOverlay], path: epath.Path) -> None:
  picture_page.write_page(list(map(_to_example, items)), path, 'Attention of each word over its picture')


def _to_example(item: CaptionOverlay) -> picture_page.SteppedExample:
  """The example of a page: the picture with all gold boxes, then for each word the lit picture with its box."""
  lit = [blend_weights(item.picture, weights, item.cell_centres) for weights in item.maps]
  boxes = [item.gold]
  for index in range(len(item.words)):
    box = _box_of_word(item, index)
    boxes.append([] if box is None else [box])
  height, width = item.picture.shape[:2]
  sides = np.array([width, height, width, height])
  return picture_page.SteppedExample(
    name=item.title,
    steps=item.words,
    facts=[f'reference: {text}' for text in item.references[:MAX_REFERENCES]],
    frames=[item.picture, *((255 * frame).astype(np.uint8) for frame in lit)],
    boxes=[[tuple(np.array(box) / sides) for box in of_step] for of_step in boxes],
  )


def _write_pictures(items: Sequence[CaptionOverlay], path: epath.Path) -> None:
  _write_panels(items, path)
  _write_animation(items, path.with_suffix('.gif'))


def blend_weights(
  picture: np.ndarray, weights: np.ndarray, cell_centres: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
  """Returns the image, bright where weights are large and dark elsewhere.

  Args:
    picture: [height, width, 3], from 0 to 255.
    weights: [rows, columns], interpolated between the centres of cells.
    cell_centres: centres of the rows and of the columns, from 0 to 1; None if cells divide the image evenly.

  Returns:
    [height, width, 3] from 0 to 1.
  """
  row_centres, column_centres = cell_centres or [_even_centres(size) for size in weights.shape]
  rows = _interpolation(row_centres, picture.shape[0])
  columns = _interpolation(column_centres, picture.shape[1])
  light = (rows.T @ (weights / max(float(weights.max()), 1e-9)) @ columns)[..., None]
  return picture / 255.0 * (0.25 + 0.75 * light)


def _even_centres(size: int) -> np.ndarray:
  """Centres of `size` cells that divide [0, 1] evenly."""
  return (np.arange(size) + 0.5) / size


def _interpolation(centres: np.ndarray, size: int) -> np.ndarray:
  """[cells, size]: linear interpolation from cells to pixels."""
  return np.stack([np.interp(_even_centres(size), centres, unit) for unit in np.eye(len(centres))])


def _write_panels(items: Sequence[CaptionOverlay], path: epath.Path) -> None:
  from matplotlib.figure import Figure

  rows = [-(-(len(item.words) + 1) // PER_ROW) for item in items]
  heights = [
    (SIDE + 0.3) * count + 0.22 * len(item.references[:MAX_REFERENCES]) for item, count in zip(items, rows, strict=True)
  ]
  figure = Figure(figsize=(SIDE * PER_ROW, sum(heights)), layout='constrained')
  parts = figure.subfigures(len(items), 1, height_ratios=heights, squeeze=False)[:, 0]
  for part, item, count in zip(parts, items, rows, strict=True):
    _draw_item(part, item, count)
  with write_atomic(path) as temporary:
    figure.savefig(temporary, format='png', dpi=110)


def _draw_item(figure, item: CaptionOverlay, rows: int) -> None:
  """Draws the references, the image with all gold boxes, and a panel for each word."""
  panels = figure.subplots(rows, PER_ROW, squeeze=False)
  for axes in panels.flat:
    axes.axis('off')
  references = '\n'.join(abbreviate(f'reference: {text}', 150) for text in item.references[:MAX_REFERENCES])
  if references:
    family = fonts.font_families(references)
    figure.suptitle(references, x=0.01, ha='left', fontsize=9, color=GOLD, parse_math=False, family=family)
  panels = panels.flat
  _draw_panel(next(panels), item.picture / 255.0, item.title, item.gold)
  for index, (word, weights) in enumerate(zip(item.words, item.maps, strict=True)):
    box = _box_of_word(item, index)
    lit = blend_weights(item.picture, weights, item.cell_centres)
    _draw_panel(next(panels), lit, word, [] if box is None else [box])


def _box_of_word(item: CaptionOverlay, index: int) -> Box | None:
  return item.boxes[index] if item.boxes is not None and index < len(item.boxes) else None


def _draw_panel(axes, picture: np.ndarray, title: str, boxes: Sequence[Box]) -> None:
  from matplotlib.patches import Rectangle

  axes.imshow(picture, vmin=0, vmax=1)
  axes.set_title(abbreviate(title, 20), fontsize=9, color=INK, parse_math=False, family=fonts.font_families(title))
  for left, top, right, bottom in boxes:
    corner = (left - 0.5, top - 0.5)
    axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, edgecolor=GOLD, linewidth=1.5))


def abbreviate(text: str, max_length: int) -> str:
  """Shortens text to at most `max_length` characters; '…' replaces its middle."""
  if len(text) <= max_length:
    return text
  start = max_length // 2
  end = len(text) - (max_length - start - 1)
  return f'{text[:start]}…{text[end:]}'


def last_words(words: Sequence[str], max_length: int) -> str:
  """Returns the last word and as many words before it as fit into `max_length` characters; '… ' replaces the others."""
  start = max(len(words) - 1, 0)
  while start > 0 and len(_words_from(words, start - 1)) <= max_length:
    start -= 1
  return _words_from(words, start)


def _words_from(words: Sequence[str], start: int) -> str:
  ellipsis = '… ' if start > 0 else ''
  return ellipsis + ' '.join(words[start:])


def _write_animation(items: Sequence[CaptionOverlay], path: epath.Path) -> None:
  frames = [frame for item in items for frame in _render_frames(item)]
  with write_atomic(path) as temporary:
    frames[0].save(temporary, 'GIF', save_all=True, append_images=frames[1:], duration=600, loop=0)


def _render_frames(item: CaptionOverlay) -> Iterator:
  """One frame for each word; of an empty caption, the image alone."""
  from PIL import Image, ImageDraw, ImageOps

  if not len(item.words):
    item = item._replace(words=[''], maps=np.ones((1, 1, 1)), cell_centres=None)
  for index, weights in enumerate(item.maps):
    lit = Image.fromarray((255 * blend_weights(item.picture, weights, item.cell_centres)).astype(np.uint8))
    scaled = ImageOps.contain(lit, (FRAME_SIDE, FRAME_SIDE), Image.Resampling.BICUBIC)
    corner = tuple((FRAME_SIDE - side) // 2 for side in scaled.size)
    frame = Image.new('RGB', (FRAME_SIDE, FRAME_SIDE + TEXT_HEIGHT), 'white')
    frame.paste(scaled, corner)
    pen = ImageDraw.Draw(frame)
    if box := _box_of_word(item, index):
      edges = np.reshape(box, (2, 2)) * scaled.size / lit.size + corner
      pen.rectangle(edges.ravel().tolist(), outline=GOLD, width=2)
    word = item.words[index]
    caption = last_words(item.words[: index + 1], 42)
    pen.text((8, FRAME_SIDE + 6), word, fill=INK, font=_font(word, 18))
    pen.text((8, FRAME_SIDE + 34), caption, fill=PALE_INK, font=_font(caption, 13))
    yield frame


def _font(text: str, size: int):
  from PIL import ImageFont

  return ImageFont.truetype(fonts.font_file(text), size)


def weight_maps(hypothesis: Hypothesis, cell_centres: CellCentres) -> np.ndarray:
  """Returns the weights [tokens, rows, columns] of a hypothesis, without those of EOS."""
  return hypothesis.weights[: len(hypothesis.tokens)].reshape(-1, *map(len, cell_centres))


def overlay_files(
  files: Sequence[str], hypotheses: Sequence[Hypothesis], cell_centres: CellCentres
) -> list[CaptionOverlay]:
  """Returns the plots of image files, with one hypothesis each.

  Args:
    files: paths of the images, which are also the titles.
    hypotheses: one per file.
    cell_centres: the grid of the weights.

  Raises:
    UserError: for a file that is missing or cannot be read as an image.
  """
  return [
    CaptionOverlay(
      picture=read_image(file, IMAGE_SIZE, max_upscale=math.inf),
      words=hypothesis.tokens,
      maps=weight_maps(hypothesis, cell_centres),
      title=file,
      cell_centres=cell_centres,
    )
    for file, hypothesis in zip(files, hypotheses, strict=True)
  ]


def token_boxes(boxes: Sequence[Box | None], caption: str, vocabulary: Vocabulary) -> list[Box | None]:
  """Returns the gold box of each token of a caption; None for a token without one, such as white space.

  Args:
    boxes: the gold box of each word of the caption, None for words that have none.
    caption: the caption.
    vocabulary: cuts it into tokens.
  """
  return [boxes[word] if word >= 0 else None for word in vocabulary.word_ids(caption)]


def overlay_rows(
  pictures: Pictures,
  rows: Sequence[int],
  hypotheses: Sequence[Hypothesis],
  cell_centres: CellCentres,
  vocabulary: Vocabulary,
) -> list[CaptionOverlay]:
  """Returns the plots of pictures of a split: each with a hypothesis, its captions, and the boxes of its first caption.

  The boxes are assigned to the tokens of a hypothesis only if they are those of the first caption.

  Args:
    pictures: the split.
    rows: numbers of the pictures.
    hypotheses: one per row.
    cell_centres: the grid of the weights.
    vocabulary: cuts captions into tokens.
  """
  overlays = []
  for row, hypothesis in zip(rows, hypotheses, strict=True):
    captions = [i for i, picture in enumerate(pictures.picture_index) if picture == row]
    caption = pictures.captions[captions[0]]
    boxes = [] if pictures.boxes is None else pictures.boxes[captions[0]]
    is_reference = pictures.boxes is not None and vocabulary.tokenize(caption) == hypothesis.tokens
    if pictures.files is None:
      image = pictures.pictures[row]
    else:
      image = read_image(pictures.files[row], IMAGE_SIZE, max_upscale=math.inf)
    overlays.append(
      CaptionOverlay(
        picture=image,
        words=hypothesis.tokens,
        maps=weight_maps(hypothesis, cell_centres),
        title=pictures.names[row],
        boxes=token_boxes(boxes, caption, vocabulary) if is_reference else None,
        cell_centres=cell_centres,
        references=[pictures.captions[i] for i in captions],
        gold=list(dict.fromkeys(filter(None, boxes))),
      )
    )
  return overlays
