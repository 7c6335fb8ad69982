"""The cost of updates on a pod: memory, FLOP and a bound of the time, and meshes that fit."""

import types

import jax
import pytest

from attention_jax.errors import UserError
from attention_jax.training.partition import MeshConfig
from lab.ahead_of_time import DoesNotFitError
from lab.pods import CHIPS, Attempt, Chip, chip_of, count_chips, try_meshes, update_costs
from tests.lab.test_ahead_of_time import ENTRIES, make_config

CHIP = Chip(flops=1e9, memory=2**30, bandwidth=1e9)


@pytest.mark.long
def test_an_update_has_the_analyses_of_the_compiler_and_a_bound_of_its_time():
  config = make_config(buckets=((6, 4), (4, 4)))
  (cost,) = update_costs(config, jax.devices()[:8], CHIP, 'cpu', vocabulary_size=50, largest=True)
  assert cost.shape == (8, 6, 4)
  moments = 2 * cost.parameters  # of Adam
  assert cost.parameters > 1000 and moments < cost.optimizer < moments + 64  # and counters
  assert cost.memory == cost.parameters + cost.optimizer + cost.temporary
  assert cost.seconds == cost.flop / CHIP.flops > 0
  assert cost.analysis['flops'] > 0 and cost.analysis['bytes accessed'] > cost.parameters


def test_meshes_are_tried_until_one_fits(monkeypatch):
  costs = {4: types.SimpleNamespace(memory=4), 1: types.SimpleNamespace(memory=1)}

  def fake_costs(config, *args, vocabulary_size, largest):
    if config.mesh.fsdp == 8:
      raise DoesNotFitError('does not fit into a device')
    yield costs[4 if config.mesh.fsdp == 1 else 1]

  monkeypatch.setattr('lab.pods.update_costs', fake_costs)
  chip = CHIP._replace(memory=1)
  assert list(try_meshes(make_config(), jax.devices()[:8], chip, 'cpu', vocabulary_size=ENTRIES)) == [
    Attempt(MeshConfig(), costs[4], 'needs 0.00 KiB'),
    Attempt(MeshConfig(fsdp=8), None, 'does not fit into a device'),
    Attempt(MeshConfig(fsdp=2, tensor=4), costs[1], ''),
  ]


def test_a_mistake_in_the_config_ends_the_trials():
  with pytest.raises(UserError, match="unknown encoder 'birn'"):
    list(try_meshes(make_config({'model.encoder': 'birn'}), jax.devices()[:8], CHIP, 'cpu', vocabulary_size=ENTRIES))


def test_every_chip_has_a_rate_and_memory_and_an_unknown_chip_is_an_error():
  assert all(amount > 0 for chip in CHIPS.values() for amount in chip)
  with pytest.raises(UserError, match="unknown chip 'cpu'"):
    chip_of(jax.devices())


def test_a_core_has_its_share_of_a_chip():
  cores = [types.SimpleNamespace(id=i, coords=[i // 2, 0, 0], device_kind='TPU v4') for i in range(8)]
  assert count_chips(cores) == 4
  assert chip_of(cores) == Chip(*(amount / 2 for amount in CHIPS['TPU v4']))
  assert chip_of(cores[::2]) == CHIPS['TPU v4']
