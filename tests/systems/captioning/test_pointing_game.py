"""The pointing game on grids small enough to count by hand."""

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.captioning.pointing_game import count_pointing_hits

# Halves of an image of 8 x 8 pixels, whose cells have 4 x 4.
LEFT = (0, 0, 4, 8)
RIGHT = (4, 0, 8, 8)
CENTRES = np.array([2.0, 6.0]), np.array([2.0, 6.0])


def test_merged_words_of_a_phrase_count_once_and_words_without_a_box_not_at_all():
  weights = np.zeros((5, 4))
  weights[0, 1] = 1.0  # a word without a box
  weights[1, [0, 1]] = 0.9, 0.1  # a hit
  weights[2, [2, 3]] = 0.4, 0.6  # a miss by itself, a hit merged with the word before
  weights[3, 3] = 1.0  # a word without a box
  weights[4, 0] = 1.0  # a miss
  boxes = [None, LEFT, LEFT, None, RIGHT]
  assert count_pointing_hits(weights, boxes, CENTRES, merge_phrases=False) == (1, 3)
  assert count_pointing_hits(weights, boxes, CENTRES, merge_phrases=True) == (1, 2)
  assert count_pointing_hits(weights[:1], [None], CENTRES, merge_phrases=True) == (0, 0)


@pytest.mark.parametrize('merge_phrases', [False, True])
def test_a_token_without_any_weight_is_a_miss(merge_phrases):
  weights = np.array([[0, 0, 0, 0], [0, 1, 0, 0]])  # the first cell, in the box, is as large as any other
  assert count_pointing_hits(weights, [LEFT, RIGHT], CENTRES, merge_phrases=merge_phrases) == (1, 2)


@pytest.mark.parametrize(
  ('box', 'row_centres', 'column_centres', 'hit_cell'),
  [
    ((5, 1, 8, 3), (2, 6), (2, 6), 1),
    ((6, 2, 7, 3), (2, 6), (2, 6), 1),  # the first row and column of a box lie in it
    ((6, 1, 7, 2), (2, 6), (2, 6), None),  # the row after its last does not
    ((5, 3, 6, 4), (3, 7), (1, 5), 1),
  ],
)
@pytest.mark.parametrize('cell', range(4))
def test_cell_is_in_a_box_if_its_centre_is(box, row_centres, column_centres, hit_cell, cell):
  weights = np.eye(4)[cell : cell + 1]
  centres = np.array(row_centres, float), np.array(column_centres, float)
  assert count_pointing_hits(weights, [box], centres, merge_phrases=False) == (cell == hit_cell, 1)


def test_another_grid_raises():
  message = r'T >= 1 tokens over a grid of S = 2 x 2 cells, got \[1, 3\]'
  with pytest.raises(UserError, match=message):
    count_pointing_hits(np.ones((1, 3)), [LEFT], CENTRES, merge_phrases=False)
