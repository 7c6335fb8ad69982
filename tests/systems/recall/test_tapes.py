"""Pictures of an external memory: the used slots of the ring, and the panels of an episode."""

import numpy as np
import pytest
from PIL import Image

from attention_jax.systems.recall import tapes as memory_tapes


def test_smallest_arc_contains_the_used_slots():
  arcs = {(2, 3, 5): [2, 3, 4, 5], (0, 1, 7): [7, 0, 1], (6, 1): [6, 7, 0, 1], (0, 4): [0, 1, 2, 3, 4], (): [*range(8)]}
  for used, slots in arcs.items():
    assert memory_tapes.smallest_arc(np.isin(np.arange(8), used)).tolist() == slots


def test_panels_are_inputs_targets_predictions_and_heads():
  weights = np.zeros((5, 1, 8))
  weights[range(5), 0, [6, 7, 0, 1, 2]] = 1
  item = memory_tapes.MemoryTape(np.eye(2), np.ones((3, 2)), np.full((3, 2), 0.5), {'write': weights}, 2)
  inputs, targets, predictions, writes = memory_tapes._panels(item)
  np.testing.assert_array_equal(inputs.picture, np.pad(np.eye(2), ((0, 0), (0, 3))))
  np.testing.assert_array_equal(targets.picture, [[0, 0, 1, 1, 1]] * 2)
  assert predictions.picture.shape == (2, 5) and (predictions.picture[:, 2:] == 0.5).all()
  assert writes.title == 'write weights, slots 6 to 2'
  assert writes.row_numbers.tolist() == [6, 7, 0, 1, 2]
  assert np.array_equal(writes.picture, np.eye(5))


@pytest.mark.long
def test_negative_inputs_are_blue(tmp_path):
  inputs = np.array([[1.0, -1.0], [0.0, 0.0]])
  item = memory_tapes.MemoryTape(inputs, np.zeros((1, 1)), np.zeros((1, 1)), {}, len(inputs))
  memory_tapes.write([item], tmp_path / 'out.png')
  with Image.open(tmp_path / 'out.png') as picture:
    pixels = np.asarray(picture.convert('RGB')).astype(int)
  assert (np.abs(pixels - [0x1C, 0x7E, 0xD6]).sum(-1) < 30).sum() > 100
