"""Readings: which measurements are maps, and the records of readings."""

import json

import numpy as np

from attention_jax.analysis.reading import Measurement, Reading, to_record

SOURCE = ['a', 'b', '</s>']
TARGET = ['x', '</s>']
WEIGHTS = np.array([[0.123456, 0.5, 0], [1 / 3, 0, 2 / 3]])
READING = Reading(
  'test 0',
  'a b',
  'x',
  SOURCE,
  TARGET,
  {'weights': WEIGHTS},
  gold=np.array([[0, 0]]),
  measurements={
    'map': Measurement(WEIGHTS - 1, (TARGET, SOURCE), is_map=True),
    'per target': Measurement(np.array([np.nan, 2.0]), (TARGET,)),
    'number': Measurement(np.array(0.5), ()),
  },
)


def test_only_measurements_with_is_map_are_maps():
  assert READING.maps.keys() == {'map'}
  square = {'self_attention': Measurement(np.eye(2), (TARGET, TARGET))}
  assert not READING._replace(source_tokens=TARGET, measurements=square).maps
  np.testing.assert_array_equal(READING.maps['map'], WEIGHTS - 1)


def test_records_are_json_with_rounded_numbers():
  record = json.loads(json.dumps(to_record(READING)))
  assert record['matrices']['weights'] == [[0.1235, 0.5, 0], [0.3333, 0, 0.6667]]
  assert record['gold'] == [[0, 0]]
  assert record['measurements']['per target'] == {'axes': [TARGET], 'values': [None, 2.0]}
  assert record['measurements']['number'] == {'axes': [], 'values': 0.5}
  assert to_record(READING._replace(gold=None))['gold'] is None
