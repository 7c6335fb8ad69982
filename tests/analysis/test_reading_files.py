"""Files of readings: the format is that of the suffix, and pictures contain weights and maps."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from attention_jax.analysis import reading_files
from attention_jax.analysis.reading import Measurement
from attention_jax.errors import UserError
from tests.analysis.test_reading import READING, SOURCE, TARGET


def width_of(reading, path):
  """Returns the width of the picture of a reading."""
  reading_files.write([reading], path)
  return imread(path).shape[1]


def test_pictures_show_weights_maps_and_layers_and_leave_out_lists_and_numbers(tmp_path):
  square = {'rollout': Measurement(np.eye(3), (SOURCE, SOURCE))}
  zeros = {'zeros': Measurement(np.zeros((2, 3)), (TARGET, SOURCE), is_map=True)}
  alone = width_of(READING._replace(measurements={}), tmp_path / 'weights.png')
  assert width_of(READING, tmp_path / 'both.png') == 2 * alone
  assert width_of(READING._replace(measurements=zeros), tmp_path / 'zeros.png') > 1.8 * alone
  assert width_of(READING._replace(measurements=square), tmp_path / 'square.png') > 1.8 * alone
  layers = READING.matrices | {f'layer 0, head {head}': READING.weights for head in range(2)}  # replace the weights
  layered = READING._replace(matrices=layers, measurements={})
  assert 1.8 < width_of(layered, tmp_path / 'layers.png') / alone < 2.8
  readings = [READING, READING._replace(measurements=READING.measurements | square)]
  unwritten = [reading_files.unwritten_measurements(readings, f'x.{suffix}') for suffix in ('png', 'html', 'json')]
  assert unwritten == [['per target', 'number'], [], []]


@pytest.mark.long
def test_relative_colours_do_not_depend_on_the_size_of_the_weights(tmp_path):
  small = READING._replace(matrices={'weights': READING.weights / 100}, measurements={})
  reading_files.write([small], tmp_path / 'absolute.png')
  reading_files.write([small], tmp_path / 'relative.png', relative=True)
  darkest = [imread(tmp_path / f'{name}.png')[..., 0].min() for name in ('absolute', 'relative')]
  cells = [(imread(tmp_path / f'{name}.png')[..., 0] < 0.1).sum() for name in ('absolute', 'relative')]
  assert darkest[1] <= darkest[0] and cells[1] > cells[0] + 1000
  reading_files.write([READING._replace(measurements={})], tmp_path / 'large.png', relative=True)
  # Without the labels of the colour bar, which begin at pixel 323.
  heatmaps = [imread(tmp_path / f'{name}.png')[:, :300] for name in ('relative', 'large')]
  np.testing.assert_allclose(*heatmaps, atol=0.01)


def test_json_holds_the_records_of_readings(tmp_path):
  reading_files.write([READING], tmp_path / 'readings.json')
  (record,) = json.loads((tmp_path / 'readings.json').read_text('utf-8'))
  assert record['source'] == 'a b' and record['target_tokens'] == TARGET


def test_other_formats_and_paths_raise(tmp_path):
  with pytest.raises(UserError, match=r"unknown format of .*weights.svg: '.svg'.*expected one of"):
    reading_files.write([READING], tmp_path / 'weights.svg')
  with pytest.raises(UserError, match=r'weights.json: cannot be written \(No such file'):
    reading_files.write([READING], tmp_path / 'missing' / 'weights.json')
