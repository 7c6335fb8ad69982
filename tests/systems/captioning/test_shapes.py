"""Generated pictures of shapes agree with their boxes and captions."""

import itertools
import random

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.captioning import shapes

SCENES = list(itertools.islice(shapes.generate('train'), 60))


def test_scenes_are_a_function_of_split_and_seed():
  again = list(itertools.islice(shapes.generate('train'), 3))
  for first, second in zip(SCENES, again, strict=False):
    assert np.array_equal(first.picture, second.picture) and first[1:] == second[1:]
  assert next(shapes.generate('train', seed=1)).caption != SCENES[0].caption
  assert SCENES[0].picture.shape == (64, 64, 3) and SCENES[0].picture.dtype == np.uint8


def test_each_shape_has_its_colour_in_its_box():
  for scene in SCENES:
    words = scene.caption.split()
    assert len(words) == len(scene.boxes)
    for word, box in zip(words, scene.boxes, strict=True):
      assert (box is None) == (word in ('a', 'left', 'of', 'above', 'below'))
      if word in shapes.COLOURS:
        left, top, right, bottom = box
        distance = np.abs(scene.picture[top:bottom, left:right].astype(int) - shapes.COLOURS[word]).sum(-1)
        assert (distance < 30).sum() > 8


@pytest.mark.long
def test_covered_shares_count_later_shapes_and_are_at_most_a_quarter_in_scenes():
  def shares_of(*centres):
    """Covered shares of squares with sides of 17.6 pixels."""
    return shapes.covered_shares([shapes.DrawnShape('large', 'red', '', 'square', x, y, 10.0) for x, y in centres])

  assert shares_of((20, 20), (28.8, 20)) == [pytest.approx(0.5, abs=0.06), 0]
  *covered, last = shares_of((28.8, 20), (28.8, 28.8), (20, 20))
  assert covered == pytest.approx([0.75, 0.25], abs=0.06) and last == 0
  draw = random.Random(0).random
  shares = [max(shapes.covered_shares(shapes._draw_shapes(draw, unseen=False))) for _ in range(100)]
  assert max(shares) <= 0.25 and sum(share >= 0.1 for share in shares) > 45


def test_relations_agree_with_the_boxes():
  for scene in SCENES:
    words = scene.caption.split()
    centres = [box and ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in scene.boxes]
    for i, word in enumerate(words):
      if word in ('left', 'above', 'below'):
        (x, y), (u, v) = centres[i - 1], centres[i + (3 if word == 'left' else 2)]
        assert u > x
        assert {'left': u - x > abs(v - y), 'above': v - y > u - x, 'below': y - v > u - x}[word]


def test_unseen_pairs_occur_in_no_other_split():
  def pairs(scene):
    words = scene.caption.split()
    positions = [i for i, word in enumerate(words) if word in shapes.COLOURS]
    return {(words[i], next(word for word in words[i:] if word in shapes.FORMS)) for i in positions}

  assert not any(pairs(scene) & shapes.UNSEEN_PAIRS for scene in SCENES)
  assert all(pairs(scene) & shapes.UNSEEN_PAIRS for scene in itertools.islice(shapes.generate('unseen'), 20))
  with pytest.raises(UserError, match="unknown split of shapes 'dev'"):
    next(shapes.generate('dev'))
