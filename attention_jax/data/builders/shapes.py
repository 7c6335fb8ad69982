"""Pictures of two or three things on a cluttered ground, and captions that cannot be told without looking.

  a small red striped square left of a large blue circle
  a large green cross above a small orange dotted triangle left of a small red circle

Things are told from left to right: 'X left of Y' where Y is further to the right than it is up or down, 'X above Y' or
'X below Y' else. In half of the pictures and more one thing covers from a tenth to a quarter of another. Strokes on the
ground mean nothing. Of the split 'unseen' every picture has a thing whose colour and shape stand together in no other
split.

Each word that tells of a thing has its box, in pixels: what a weight should lie in when the word is said.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from attention_jax.errors import choose

SIZES = {'train': 40000, 'validation': 500, 'test': 500, 'unseen': 500}
WIDTH = 64  # pixels, and as many rows
FINE = 4  # drawn so many times as large
COLOURS = {
  'red': (214, 39, 40),
  'green': (44, 160, 44),
  'blue': (31, 90, 200),
  'yellow': (235, 200, 30),
  'purple': (140, 60, 180),
  'orange': (240, 130, 20),
}
SHAPES = ('circle', 'square', 'triangle', 'cross')
RADII = {'small': (6.0, 7.5), 'large': (10.5, 12.5)}
TEXTURES = ('', 'striped', 'dotted')
UNSEEN_PAIRS = {('red', 'cross'), ('blue', 'triangle'), ('yellow', 'circle'), ('purple', 'square')}
APART = 4.0  # pixels by which an order or a relation is clear
HIDDEN = (0.1, 0.25)  # of a thing behind another one: at least, where pictures are drawn to have one; at most

Box = tuple[int, int, int, int]  # left, top, right, bottom; the last two lie outside


class DrawnShape(NamedTuple):
  """One thing, its middle and radius in pixels."""

  size: str
  colour: str
  texture: str
  shape: str
  x: float
  y: float
  radius: float

  @property
  def words(self) -> list[str]:
    return ['a', *(word for word in (self.size, self.colour, self.texture, self.shape) if word)]

  @property
  def box(self) -> Box:
    edges = self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius
    low, high = [max(0, math.floor(e)) for e in edges[:2]], [min(WIDTH, math.ceil(e)) for e in edges[2:]]
    return (*low, *high)


class Scene(NamedTuple):
  """A picture [WIDTH, WIDTH, 3] uint8, its caption, and for each word of it the box of its thing, or None."""

  picture: np.ndarray
  caption: str
  boxes: list[Box | None]


def generate(split: str, seed: int = 0) -> Iterator[Scene]:
  """Yields the scenes of a split, a pure function of (split, seed). Raises: UserError for an unknown split."""
  size = SIZES[choose(split, SIZES, 'split of shapes')]
  # Only random() is promised to stay the same from one Python version to the next, so every draw comes from it.
  draw = random.Random(f'shapes {split} {seed}').random
  for _ in range(size):
    things = _draw_things(draw, split == 'unseen')  # the last one in front
    words, boxes = tell(sorted(things, key=lambda thing: thing.x))
    yield Scene(_paint(draw, things), ' '.join(words), boxes)


def tell(things: list[DrawnShape]) -> tuple[list[str], list[Box | None]]:
  """The caption of things from left to right, and the box of each word; that of a relation is None."""
  words, boxes = [], []
  for i, thing in enumerate(things):
    if i:
      relation = _relation(things[i - 1], thing).split()
      words, boxes = words + relation, boxes + [None] * len(relation)
    words, boxes = words + thing.words, boxes + [None] + [thing.box] * (len(thing.words) - 1)
  return words, boxes


def _relation(one: DrawnShape, other: DrawnShape) -> str:
  across, down = other.x - one.x, other.y - one.y
  if across > abs(down):
    return 'left of'
  return 'above' if down > 0 else 'below'


def _draw_things(draw: Callable[[], float], unseen: bool) -> list[DrawnShape]:
  count, least = 2 + int(draw() * 2), HIDDEN[0] * (draw() < 0.5)
  while True:
    things = [_thing(draw) for _ in range(count)]
    told = sorted(things, key=lambda thing: thing.x)
    offsets = [(b.x - a.x, abs(b.y - a.y)) for a, b in itertools.pairwise(told)]
    clear = all(across >= APART and abs(across - down) >= APART for across, down in offsets)
    rare = any((thing.colour, thing.shape) in UNSEEN_PAIRS for thing in things)
    if clear and rare == unseen and least <= max(covered_shares(things)) <= HIDDEN[1]:
      return things


def covered_shares(things: list[DrawnShape]) -> list[float]:
  """The share of each thing that later ones cover."""
  shares, front = [], np.zeros((WIDTH, WIDTH), bool)
  for thing in reversed(things):
    covers = _cover(thing)
    shares.append(float((covers & front).sum() / covers.sum()))
    front |= covers
  return shares[::-1]


def _cover(thing: DrawnShape) -> np.ndarray:
  """[WIDTH, WIDTH] bool, the pixels of a thing."""
  from PIL import Image, ImageDraw

  outline = Image.new('1', (WIDTH, WIDTH), 0)
  OUTLINES[thing.shape](ImageDraw.Draw(outline), thing.x, thing.y, thing.radius)
  return np.asarray(outline)


def _thing(draw: Callable[[], float]) -> DrawnShape:
  one = lambda items: list(items)[int(draw() * len(items))]
  size = one(RADII)
  low, high = RADII[size]
  radius = low + draw() * (high - low)
  place = lambda: radius + draw() * (WIDTH - 2 * radius)
  return DrawnShape(size, one(COLOURS), one(TEXTURES), one(SHAPES), place(), place(), radius)


def _paint(draw: Callable[[], float], things: list[DrawnShape]) -> np.ndarray:
  from PIL import Image, ImageDraw

  size = WIDTH * FINE
  ground = tuple(int(200 + 40 * draw()) for _ in range(3))
  picture = Image.new('RGB', (size, size), ground)
  pen = ImageDraw.Draw(picture)
  for _ in range(8 + int(draw() * 8)):
    x, y, angle, length = draw() * size, draw() * size, draw() * math.tau, (2 + 7 * draw()) * FINE
    colour = tuple(int(255 * draw()) for _ in range(3))
    pen.line((x, y, x + length * math.cos(angle), y + length * math.sin(angle)), colour, FINE)
  for thing in things:
    _draw_thing(picture, thing)
  small = picture.resize((WIDTH, WIDTH), Image.Resampling.BOX)
  return np.asarray(small, np.uint8)


def _draw_thing(picture, thing: DrawnShape) -> None:
  from PIL import Image, ImageDraw

  x, y, r = (value * FINE for value in (thing.x, thing.y, thing.radius))
  left, top, side = int(x - r) - 1, int(y - r) - 1, int(2 * r) + 4
  x, y = x - left, y - top
  outline = Image.new('L', (side, side), 0)
  OUTLINES[thing.shape](ImageDraw.Draw(outline), x, y, r)
  filled = Image.new('RGB', (side, side), COLOURS[thing.colour])
  pen, step = ImageDraw.Draw(filled), 4 * FINE
  starts = range(int(-r // step) * step, int(r) + step, step)
  if thing.texture == 'striped':
    for at in starts:
      pen.line((x - r, y + at, x + r, y + at), 'white', int(1.5 * FINE))
  if thing.texture == 'dotted':
    for across in starts:
      for down in starts:
        pen.ellipse((x + across - FINE, y + down - FINE, x + across + FINE, y + down + FINE), 'white')
  picture.paste(filled, (left, top), outline)


def _cross(pen, x: float, y: float, r: float) -> None:
  thin = 0.38 * r
  pen.rectangle((x - r, y - thin, x + r, y + thin), 255)
  pen.rectangle((x - thin, y - r, x + thin, y + r), 255)


OUTLINES: dict[str, Callable] = {
  'circle': lambda pen, x, y, r: pen.ellipse((x - r, y - r, x + r, y + r), 255),
  'square': lambda pen, x, y, r: pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), 255),
  'triangle': lambda pen, x, y, r: pen.polygon(((x, y - r), (x + r, y + 0.9 * r), (x - r, y + 0.9 * r)), 255),
  'cross': _cross,
}
