"""The pointing game: whether the largest weight over an image lies in the gold box. Zhang et al. 2018, section 4.2."""

import itertools
from collections.abc import Sequence

import numpy as np

from attention_jax.errors import UserError

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are exclusive


def count_pointing_hits(
  weights: np.ndarray, boxes: Sequence[Box | None], cell_centres: tuple[np.ndarray, np.ndarray], *, merge_phrases: bool
) -> tuple[int, int]:
  """Counts the hits of one caption, per token with a gold box, or per phrase of such tokens.

  Args:
    weights: [T, S], over the cells of a grid, row by row.
    boxes: per token, None for a token without a gold box.
    cell_centres: (centres of the rows, centres of the columns) of the grid, in pixels. A cell lies in a box
      if its centre does.
    merge_phrases: whether consecutive tokens with the same box count as one, whose weights are added (Liu et al. 2017).

  Returns:
    The number of hits, and the number of tokens with a gold box, or of phrases. One whose weights are all zero is a
      miss.

  Raises:
    UserError: for weights over another grid, or fewer rows of weights than entries of `boxes`.
  """
  row_centres, column_centres = cell_centres
  rows = len(row_centres)
  columns = len(column_centres)
  if rows * columns != weights.shape[1] or len(weights) < len(boxes):
    raise UserError(
      f'pointing: weights must be [T, S] for T >= {len(boxes)} tokens over a grid of S = {rows} x {columns} cells, '
      f'got {list(weights.shape)}'
    )
  hits = 0
  total = 0
  for box, tokens in itertools.groupby(range(len(boxes)), key=lambda token: boxes[token]):
    if box is None:
      continue
    phrase_weights = weights[list(tokens)]
    if merge_phrases:
      phrase_weights = phrase_weights.sum(0, keepdims=True)
    total += len(phrase_weights)
    for cell in phrase_weights[phrase_weights.any(1)].argmax(1):
      row, column = divmod(int(cell), columns)
      hits += _contains(box, column_centres[column], row_centres[row])
  return hits, total


def _contains(box: Box, x: float, y: float) -> bool:
  left, top, right, bottom = box
  return left <= x < right and top <= y < bottom
