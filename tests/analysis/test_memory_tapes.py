"""Where a memory is written and read: the slots of a ring that are used, and what the picture shows of them."""

import numpy as np
import pytest
from PIL import Image

from attention_jax.analysis import memory_tapes


@pytest.mark.parametrize(
  ('used', 'slots'),
  [([2, 3, 5], [2, 3, 4, 5]), ([0, 1, 7], [7, 0, 1]), ([6, 1], [6, 7, 0, 1]), ([4], [4]), ([], list(range(8)))],
)
def test_as_few_slots_as_can_be_are_shown(used, slots):
  assert memory_tapes.smallest_arc(np.isin(np.arange(8), used)).tolist() == slots


def test_panels_are_inputs_answers_and_heads():
  weights = np.zeros((5, 1, 8))
  weights[range(5), 0, [6, 7, 0, 1, 2]] = 1
  item = memory_tapes.MemoryTape(np.eye(2), np.ones((3, 2)), np.full((3, 2), 0.5), {'write': weights})
  (_, shown, _), (_, asked, _), (_, said, _), (title, written, rows) = memory_tapes._panels(item)
  assert shown.shape == asked.shape == said.shape == (2, 5)
  assert np.array_equal(shown[:, :2], np.eye(2)) and not shown[:, 2:].any() and not asked[:, :2].any()
  assert (said[:, 2:] == 0.5).all()
  assert title == 'write weights, slots 6 to 2' and rows.tolist() == [6, 7, 0, 1, 2]
  assert np.array_equal(written, np.eye(5))


def test_what_is_below_nothing_is_blue(tmp_path):
  shown = np.array([[1.0, -1.0], [0.0, 0.0]])
  memory_tapes.write([memory_tapes.MemoryTape(shown, np.zeros((1, 1)), np.zeros((1, 1)), {})], tmp_path / 'out.png')
  with Image.open(tmp_path / 'out.png') as picture:
    found = np.asarray(picture.convert('RGB')).astype(int)
  assert (np.abs(found - [0x1C, 0x7E, 0xD6]).sum(-1) < 30).sum() > 100
