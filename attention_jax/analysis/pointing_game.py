"""The pointing game: does the heaviest weight over a picture lie in the right box? Zhang et al. 2018, section 4.2."""

import itertools
from collections.abc import Sequence

import numpy as np

from attention_jax.errors import UserError

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two lie outside


def count_pointing_hits(
  weights: np.ndarray, boxes: Sequence[Box | None], cell_centres: tuple[np.ndarray, np.ndarray], *, merge_phrases: bool
) -> tuple[int, int]:
  """(hits, of how many) over the tokens of one caption that have a box, or over their phrases.

  Args:
    weights: [T, S], over the cells of a grid, row by row.
    boxes: of each token, None where it tells of nothing that can be seen.
    cell_centres: of rows and of columns of cells, pixels. A cell lies in a box when its middle does.
    merge_phrases: tokens in a row with one box are one, whose weights are added up (Liu et al. 2017, for phrases).

  Raises: UserError for weights over another grid, or fewer weights than boxes.
  """
  rows, columns = map(len, cell_centres)
  if rows * columns != weights.shape[1] or len(weights) < len(boxes):
    of = f'{len(boxes)} tokens over a grid of {rows} x {columns}'
    raise UserError(f'pointing: weights {list(weights.shape)} are not of {of}')
  hits = total = 0
  for box, tokens in itertools.groupby(range(len(boxes)), key=lambda token: boxes[token]):
    if box is None:
      continue
    own = weights[list(tokens)]
    for heaviest in (own.sum(0, keepdims=True) if merge_phrases else own).argmax(1):
      row, column = divmod(int(heaviest), columns)
      y, x = cell_centres[0][row], cell_centres[1][column]
      hits, total = hits + (box[0] <= x < box[2] and box[1] <= y < box[3]), total + 1
  return hits, total
