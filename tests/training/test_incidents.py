"""Batches of incidents are stored as they were, and spikes of the loss stand out from noise."""

import numpy as np
import pytest
from attention_jax.training.incidents import (
  MAX_SPIKES,
  SPIKE_WINDOW,
  BatchRecorder,
  SpikeDetector,
  batch_path,
  named_arrays,
  read_batch,
  stored_updates,
)

from attention_jax.errors import UserError
from tests.training import helpers


def test_a_stored_batch_has_all_arrays_and_names_its_rows(tmp_path):
  recorder = BatchRecorder(tmp_path, helpers.stream)
  assert recorder.store(5) == batch_path(tmp_path, 5)
  with np.load(batch_path(tmp_path, 5)) as stored:
    expected = named_arrays(next(helpers.stream(4, 5)))
    assert set(stored) == set(expected) >= {'source', 'target', 'index'}
    for name, array in expected.items():
      np.testing.assert_array_equal(stored[name], array)
  assert recorder.rows(5) == list(range(16))


def test_files_of_other_names_are_no_stored_batches(tmp_path):
  recorder = BatchRecorder(tmp_path, helpers.stream)
  for update in (10, 9):
    recorder.store(update)
  (tmp_path / 'nonfinite' / 'update_9 (copy).npz').write_bytes(b'')
  assert stored_updates(tmp_path) == [9, 10]


def test_damaged_and_missing_batches_are_errors_in_one_line(tmp_path):
  (tmp_path / 'nonfinite').mkdir()
  with open(batch_path(tmp_path, 1), 'wb') as file:
    np.save(file, np.arange(3))  # one array, not an archive
  np.savez_compressed(batch_path(tmp_path, 2), x=np.arange(3000))
  content = bytearray(batch_path(tmp_path, 2).read_bytes())
  content[200] ^= 255  # in the compressed data
  batch_path(tmp_path, 2).write_bytes(content)
  for update in (1, 2, 3):
    with pytest.raises(UserError, match=f'cannot read .*update_{update}.npz: ') as error:
      read_batch(tmp_path, update)
    assert '\n' not in str(error.value)


def test_batches_without_row_numbers_have_no_rows(tmp_path):
  recorder = BatchRecorder(tmp_path, lambda start, stop: ({'x': np.ones(3)} for _ in range(start, stop)))
  assert recorder.rows(1) == []


def test_a_loss_far_above_its_recent_mean_is_a_spike_and_noise_is_not():
  noise = np.random.default_rng(0).normal(size=400)
  detector = SpikeDetector()
  decreasing = [3.0 * 0.99**i + 0.1 * x for i, x in enumerate(noise)]
  assert not any(detector(loss) for loss in decreasing)
  mean = detector(5.0)
  assert mean is not None and abs(mean - np.mean(decreasing[-SPIKE_WINDOW:])) < 1e-9
  assert detector(5.0) == mean  # the first spike is no part of the mean


def test_a_spike_exceeds_a_multiple_of_the_mean_even_without_noise():
  detector = SpikeDetector()
  assert [detector(loss) for loss in [2.0] * SPIKE_WINDOW] == [None] * SPIKE_WINDOW
  assert detector(2.9) is None
  assert detector(3.2) == pytest.approx(2.0 + 0.9 / SPIKE_WINDOW)


def test_only_the_first_losses_at_a_new_level_are_spikes():
  detector = SpikeDetector()
  levels = [1.0, 7.0, 30.0]
  spikes = [[detector(level + 0.01 * (i % 3)) for i in range(200)] for level in levels]
  assert [sum(mean is not None for mean in means) for means in spikes] == [0, MAX_SPIKES, MAX_SPIKES]
  assert spikes[2][0] == pytest.approx(7.01, abs=0.01)


def test_the_first_updates_are_no_spikes():
  detector = SpikeDetector()
  assert not any(detector(loss) for loss in [1.0, 100.0, 1e6])
