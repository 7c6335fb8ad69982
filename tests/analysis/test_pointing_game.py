"""The pointing game on grids small enough to count by hand."""

import numpy as np
import pytest

from attention_jax.analysis.pointing_game import count_pointing_hits
from attention_jax.errors import UserError

LEFT, RIGHT = (0, 0, 4, 8), (4, 0, 8, 8)  # halves of a picture of 8 x 8, whose cells are 4 x 4
EVEN = np.array([2.0, 6.0]), np.array([2.0, 6.0])


def test_words_and_phrases():
  weights = np.zeros((5, 4))
  weights[0, 1] = 1.0  # a word that tells of nothing
  weights[1, [0, 1]] = 0.9, 0.1  # right
  weights[2, [2, 3]] = 0.4, 0.6  # wrong by itself, not with the word before
  weights[3, 3] = 1.0  # a relation
  weights[4, 0] = 1.0  # wrong
  boxes = [None, LEFT, LEFT, None, RIGHT]
  assert count_pointing_hits(weights, boxes, EVEN, merge_phrases=False) == (1, 3)
  assert count_pointing_hits(weights, boxes, EVEN, merge_phrases=True) == (1, 2)
  assert count_pointing_hits(weights[:1], [None], EVEN, merge_phrases=True) == (0, 0)


@pytest.mark.parametrize(('cell', 'hit'), [(0, False), (1, True), (2, False), (3, False)])
def test_a_cell_lies_where_its_middle_does(cell, hit):
  weights = np.eye(4)[cell : cell + 1]
  assert count_pointing_hits(weights, [(5, 1, 8, 3)], EVEN, merge_phrases=False) == (
    hit,
    1,
  )  # the middle of the cell is at 6, 2 ...
  assert count_pointing_hits(weights, [(6, 2, 7, 3)], EVEN, merge_phrases=False) == (hit, 1)
  assert count_pointing_hits(weights, [(6, 1, 7, 2)], EVEN, merge_phrases=False) == (
    0,
    1,
  )  # ... and its last row outside
  assert count_pointing_hits(weights, [(5, 3, 6, 4)], (EVEN[0] + 1, EVEN[1] - 1), merge_phrases=False) == (hit, 1)


def test_other_grids_are_refused():
  with pytest.raises(UserError, match=r'weights \[1, 3\] are not of 1 tokens over a grid of 2 x 2'):
    count_pointing_hits(np.ones((1, 3)), [LEFT], EVEN, merge_phrases=False)
