"""The pointing game: does the heaviest weight over a picture lie in the right box? Zhang et al. 2018, section 4.2."""

import itertools
from collections.abc import Sequence

import numpy as np

from attention_jax.errors import UserError

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two lie outside


def pointing(
  weights: np.ndarray, boxes: Sequence[Box | None], size: tuple[int, int], *, phrases: bool
) -> tuple[int, int]:
  """(hits, of how many) over the tokens of one caption that have a box, or over their phrases.

  Args:
    weights: [T, S], over the cells of a square grid, row by row.
    boxes: of each token, None where it tells of nothing that can be seen.
    size: height and width of the picture, pixels. A cell lies in a box when its middle does.
    phrases: tokens in a row with one box are one, whose weights are added up (Liu et al. 2017, for phrases).

  Raises: UserError for weights over anything but a square grid, or fewer weights than boxes.
  """
  rows = round(weights.shape[1] ** 0.5)
  if rows * rows != weights.shape[1] or len(weights) < len(boxes):
    raise UserError(f'pointing: weights {list(weights.shape)} are not of {len(boxes)} tokens over a square grid')
  hits = total = 0
  for box, tokens in itertools.groupby(range(len(boxes)), key=lambda token: boxes[token]):
    if box is None:
      continue
    own = weights[list(tokens)]
    for heaviest in (own.sum(0, keepdims=True) if phrases else own).argmax(1):
      row, column = divmod(int(heaviest), rows)
      x, y = ((place + 0.5) * side / rows for place, side in ((column, size[1]), (row, size[0])))
      hits, total = hits + (box[0] <= x < box[2] and box[1] <= y < box[3]), total + 1
  return hits, total
