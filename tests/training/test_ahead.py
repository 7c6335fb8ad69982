"""Updates of a config that are compiled before there are data."""

import jax
import pytest

from attention_jax.errors import UserError
from attention_jax.training.ahead import updates
from attention_jax.training.config import default_config
from attention_jax.training.partition import make_mesh


def config(**data):
  given = default_config()
  given.model.encoder, given.model.decoder = 'birnn(features=4)', 'bahdanau(features=4, readout=4)'
  given.model.embedding = given.model.attention.features = 4
  given.training.auxiliary = 'guided'
  given.data.update({'buckets': ((6, 4),), 'batch_size': 64, 'batch_unit': 'tokens', **data})
  return given.to_dict()


def test_every_bucket_is_compiled_for_all_devices():
  found = list(updates(config(buckets=((6, 4), (8, 8))), 9, make_mesh(), 'cpu'))
  assert [one.shape for one in found] == [(8, 6, 4), (8, 8, 8)]
  assert found[0].parameters == found[1].parameters > 100
  assert all(one.compiled.memory_analysis().argument_size_in_bytes > 0 for one in found)
  assert len(jax.devices()) == len(found[0].compiled.input_shardings[0][2].source.device_set)


def test_rows_must_divide():
  with pytest.raises(UserError, match='a batch of 12 rows does not divide over 8 devices'):
    next(updates(config(batch_size=12, batch_unit='sentences'), 9, make_mesh(), 'cpu'))


@pytest.mark.parametrize('given', [default_config('classification').to_dict(), config() | {'seeds': 4}])
def test_what_is_not_compiled_ahead_says_so(given):
  with pytest.raises(UserError, match='possible ahead of time'):
    next(updates(given, 9, make_mesh(), 'cpu'))
