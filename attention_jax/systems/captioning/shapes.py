"""Generated pictures of two or three shapes on a cluttered background, with captions that depend on every shape.

  a small red striped square left of a large blue circle
  a large green cross above a small orange dotted triangle left of a small red circle

Shapes are described from left to right: 'X left of Y' if the horizontal distance is larger than the vertical one, else
'X above Y' or 'X below Y'. At most a quarter of each shape is covered by other shapes; with a probability of one half,
at least a tenth of one must be covered. Strokes on the background have no meaning. Every picture of the split 'unseen'
has a shape whose pair of colour and form occurs in no other split.

Each word that describes a shape has the box of that shape, in pixels: the region that the model should attend to when
it emits the word.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from attention_jax.errors import choose

Item = TypeVar('Item')
Draw = Callable[[], float]

SIZES = {'train': 40000, 'validation': 500, 'test': 500, 'unseen': 500}
WIDTH = 64  # and height, pixels
OVERSAMPLING = 4  # factor by which pictures are drawn larger
COLOURS = {
  'red': (214, 39, 40),
  'green': (44, 160, 44),
  'blue': (31, 90, 200),
  'yellow': (235, 200, 30),
  'purple': (140, 60, 180),
  'orange': (240, 130, 20),
}
FORMS = ('circle', 'square', 'triangle', 'cross')
RADII = {'small': (6.0, 7.5), 'large': (10.5, 12.5)}
TEXTURES = ('', 'striped', 'dotted')
UNSEEN_PAIRS = {('red', 'cross'), ('blue', 'triangle'), ('yellow', 'circle'), ('purple', 'square')}
# Pixels: minimum of the horizontal distance of neighbours, and of its difference from their vertical distance.
MIN_MARGIN = 4.0
OVERLAP_PROBABILITY = 0.5  # probability that MIN_OVERLAP applies to a picture
MIN_OVERLAP = 0.1  # in those pictures, at least this share of one shape is covered
MAX_OVERLAP = 0.25  # in all pictures, at most this share of each shape is covered

Box = tuple[int, int, int, int]  # left, top, right, bottom; right and bottom are exclusive


class DrawnShape(NamedTuple):
  """One shape; x, y (its centre) and radius in pixels. The texture '' is plain."""

  size: str
  colour: str
  texture: str
  form: str
  x: float
  y: float
  radius: float

  @property
  def words(self) -> list[str]:
    """Description of the shape."""
    return ['a', *(word for word in (self.size, self.colour, self.texture, self.form) if word)]

  @property
  def box(self) -> Box:
    """The box of whole pixels around the square of side 2 * radius that contains the shape.

    Circles and crosses touch all sides of that square; squares and triangles are smaller.
    """
    left = max(0, math.floor(self.x - self.radius))
    top = max(0, math.floor(self.y - self.radius))
    right = min(WIDTH, math.ceil(self.x + self.radius))
    bottom = min(WIDTH, math.ceil(self.y + self.radius))
    return left, top, right, bottom


class CaptionedScene(NamedTuple):
  """A picture [WIDTH, WIDTH, 3] uint8, its caption, and the box of the shape of each word of the caption, or None."""

  picture: np.ndarray
  caption: str
  boxes: list[Box | None]


def generate(split: str, seed: int = 0) -> Iterator[CaptionedScene]:
  """Yields the scenes of a split, a pure function of (split, seed).

  Raises:
    UserError: for an unknown split.
  """
  size = SIZES[choose(split, SIZES, 'split of shapes')]
  # Every draw is made with random(), the only method whose values are guaranteed across Python versions.
  draw = random.Random(f'shapes {split} {seed}').random
  for _ in range(size):
    shapes = _draw_shapes(draw, split == 'unseen')  # from back to front
    words, boxes = describe(_left_to_right(shapes))
    yield CaptionedScene(_paint(draw, shapes), ' '.join(words), boxes)


def describe(shapes: list[DrawnShape]) -> tuple[list[str], list[Box | None]]:
  """Returns the caption of shapes from left to right, and the box of each word; None for articles and relations."""
  words = []
  boxes = []
  for i, shape in enumerate(shapes):
    if i:
      relation = _relation(shapes[i - 1], shape).split()
      words += relation
      boxes += [None] * len(relation)
    words += shape.words
    boxes += [None] + [shape.box] * (len(shape.words) - 1)
  return words, boxes


def _left_to_right(shapes: Iterable[DrawnShape]) -> list[DrawnShape]:
  return sorted(shapes, key=lambda shape: shape.x)


def _relation(left: DrawnShape, right: DrawnShape) -> str:
  horizontal = right.x - left.x
  vertical = right.y - left.y
  if horizontal > abs(vertical):
    return 'left of'
  return 'above' if vertical > 0 else 'below'


def _draw_shapes(draw: Draw, unseen: bool) -> list[DrawnShape]:
  """Draws shapes until relations are unambiguous, colours and forms suit the split, and the overlap is in range."""
  count = 2 + int(draw() * 2)
  min_overlap = MIN_OVERLAP if draw() < OVERLAP_PROBABILITY else 0.0
  while True:
    shapes = [_draw_shape(draw) for _ in range(count)]
    neighbours = itertools.pairwise(_left_to_right(shapes))
    offsets = [(right.x - left.x, abs(right.y - left.y)) for left, right in neighbours]
    is_unambiguous = all(
      horizontal >= MIN_MARGIN and abs(horizontal - vertical) >= MIN_MARGIN for horizontal, vertical in offsets
    )
    has_unseen_pair = any((shape.colour, shape.form) in UNSEEN_PAIRS for shape in shapes)
    if is_unambiguous and has_unseen_pair == unseen and min_overlap <= max(covered_shares(shapes)) <= MAX_OVERLAP:
      return shapes


def covered_shares(shapes: list[DrawnShape]) -> list[float]:
  """Returns the share of each shape that later ones cover."""
  shares = []
  front = np.zeros((WIDTH, WIDTH), bool)
  for shape in reversed(shapes):
    pixels = _pixels(shape)
    shares.append(float((pixels & front).sum() / pixels.sum()))
    front |= pixels
  return shares[::-1]


def _pixels(shape: DrawnShape) -> np.ndarray:
  """The pixels of a shape, [WIDTH, WIDTH] bool."""
  from PIL import Image, ImageDraw

  outline = Image.new('1', (WIDTH, WIDTH), 0)
  OUTLINES[shape.form](ImageDraw.Draw(outline), shape.x, shape.y, shape.radius)
  return np.asarray(outline)


def _pick(draw: Draw, items: Iterable[Item]) -> Item:
  items = list(items)
  return items[int(draw() * len(items))]


def _draw_position(draw: Draw, radius: float) -> float:
  """A coordinate of the centre of a shape that lies inside the picture."""
  return radius + draw() * (WIDTH - 2 * radius)


def _draw_shape(draw: Draw) -> DrawnShape:
  size = _pick(draw, RADII)
  low, high = RADII[size]
  radius = low + draw() * (high - low)
  colour = _pick(draw, COLOURS)
  texture = _pick(draw, TEXTURES)
  form = _pick(draw, FORMS)
  x = _draw_position(draw, radius)
  y = _draw_position(draw, radius)
  return DrawnShape(size, colour, texture, form, x, y, radius)


def _paint(draw: Draw, shapes: list[DrawnShape]) -> np.ndarray:
  """The picture of shapes from back to front on a random background with random strokes, [WIDTH, WIDTH, 3] uint8."""
  from PIL import Image, ImageDraw

  size = WIDTH * OVERSAMPLING
  background_colour = tuple(int(200 + 40 * draw()) for _ in range(3))
  picture = Image.new('RGB', (size, size), background_colour)
  pen = ImageDraw.Draw(picture)
  for _ in range(8 + int(draw() * 8)):
    x = draw() * size
    y = draw() * size
    angle = draw() * math.tau
    length = (2 + 7 * draw()) * OVERSAMPLING
    colour = tuple(int(255 * draw()) for _ in range(3))
    pen.line((x, y, x + length * math.cos(angle), y + length * math.sin(angle)), colour, OVERSAMPLING)
  for shape in shapes:
    _paint_shape(picture, shape)
  small = picture.resize((WIDTH, WIDTH), Image.Resampling.BOX)
  return np.asarray(small, np.uint8)


def _paint_shape(picture, shape: DrawnShape) -> None:
  """Pastes a shape with its texture into an oversampled picture."""
  from PIL import Image, ImageDraw

  x, y, r = (value * OVERSAMPLING for value in (shape.x, shape.y, shape.radius))
  left = int(x - r) - 1
  top = int(y - r) - 1
  side = int(2 * r) + 4
  x -= left
  y -= top
  outline = Image.new('L', (side, side), 0)
  OUTLINES[shape.form](ImageDraw.Draw(outline), x, y, r)
  filled = Image.new('RGB', (side, side), COLOURS[shape.colour])
  pen = ImageDraw.Draw(filled)
  step = 4 * OVERSAMPLING
  offsets = range(int(-r // step) * step, int(r) + step, step)
  if shape.texture == 'striped':
    for dy in offsets:
      pen.line((x - r, y + dy, x + r, y + dy), 'white', int(1.5 * OVERSAMPLING))
  if shape.texture == 'dotted':
    dot = OVERSAMPLING
    for dx, dy in itertools.product(offsets, offsets):
      pen.ellipse((x + dx - dot, y + dy - dot, x + dx + dot, y + dy + dot), 'white')
  picture.paste(filled, (left, top), outline)


def _circle(pen, x: float, y: float, r: float) -> None:
  pen.ellipse((x - r, y - r, x + r, y + r), 255)


def _square(pen, x: float, y: float, r: float) -> None:
  pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), 255)


def _triangle(pen, x: float, y: float, r: float) -> None:
  pen.polygon(((x, y - r), (x + r, y + 0.9 * r), (x - r, y + 0.9 * r)), 255)


def _cross(pen, x: float, y: float, r: float) -> None:
  width = 0.38 * r
  pen.rectangle((x - r, y - width, x + r, y + width), 255)
  pen.rectangle((x - width, y - r, x + width, y + r), 255)


OUTLINES: dict[str, Callable] = {'circle': _circle, 'square': _square, 'triangle': _triangle, 'cross': _cross}
