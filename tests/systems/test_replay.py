"""`replay` repeats an update that was not finite, and finds the row."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.replay import replay
from attention_jax.systems.translation.system import TranslationSystem
from tests.systems.helpers import tiny_config, train_quietly, two_devices, write_pairs

BAD_ROW = 5
LIGHT = {'model__encoder': 'embedded', 'training__evaluate_every': 0}  # fields of a config that compiles faster


@pytest.fixture(scope='module')
def poisoned():
  """Makes the loss of batches with row BAD_ROW infinite after the second update."""
  healthy = TranslationSystem.loss.func

  def make_loss(system):
    loss = healthy(system)

    def fn(params, batch, rngs, running, update):
      sums = loss.fn(params, batch, rngs, running, update)
      is_bad = jnp.any(batch.index == BAD_ROW) & (update > 2)
      return {**sums, 'loss': sums['loss'] * jnp.where(is_bad, jnp.inf, 1.0)}

    return dataclasses.replace(loss, fn=fn)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(TranslationSystem, 'loss', property(make_loss))
    yield


def train_until_it_stops(config, folder):
  """Trains until the loss is infinite; returns the number of that update and the seed, if the message names one."""
  message = r'^loss(?: of seed (\d))? is inf at step ([34]); the last good .*/checkpoints/2; .*replay --step='
  with pytest.raises(UserError, match=message) as error:
    train_quietly(config, folder)
  seed, update = re.match(message, str(error.value)).groups()
  return int(update), seed


@pytest.fixture(scope='module')
def stopped_run(poisoned, tmp_path_factory):
  """The folder of the data, that of a run on these data that stopped at an infinite loss, and the update."""
  data = write_pairs(tmp_path_factory.mktemp('data'))
  run = tmp_path_factory.mktemp('stopped') / 'run'
  return data, run, train_until_it_stops(tiny_config(data, **LIGHT), run)[0]


@pytest.mark.long
def test_the_row_of_an_update_is_found(stopped_run):
  _, run, update = stopped_run
  with two_devices():
    result = replay(run, update)
    healthy = replay(run, 1)  # before the first checkpoint
  assert (result.update, result.start, result.rows, result.params) == (update, 2, [BAD_ROW], [])
  assert not jnp.isfinite(result.loss) and result.gradients
  assert (healthy.start, healthy.rows, healthy.gradients) == (0, [], []) and jnp.isfinite(healthy.loss)
  with pytest.raises(UserError, match=r'the update must be 1 to \d+, the steps of the run, got 1000'):
    replay(run, 1000)


@pytest.mark.long
def test_a_run_of_several_seeds_is_repeated_in_its_own_folder(poisoned, tmp_path):
  config = tiny_config(write_pairs(tmp_path), seeds=2, **LIGHT)
  update, seed = train_until_it_stops(config, tmp_path / 'run')
  with two_devices():
    with pytest.raises(UserError, match='expected the folder of one of them: seed_0, seed_1'):
      replay(tmp_path / 'run', update)
    result = replay(tmp_path / 'run' / f'seed_{seed}', update)
  assert (result.update, result.start, result.rows) == (update, 2, [BAD_ROW])


@pytest.mark.long
def test_annealed_parameters_have_no_gradient(poisoned, tmp_path):
  anneal = {'model__attention__alignment': 'entmax', 'training__anneal': 'alpha: constant(rate=1.5)'}
  config = tiny_config(write_pairs(tmp_path), **anneal, **LIGHT)
  update, _ = train_until_it_stops(config, tmp_path / 'run')
  with two_devices():
    result = replay(tmp_path / 'run', update)
  assert result.gradients and not any(name.endswith('alpha') for name in result.gradients)


def test_changed_data_are_noticed(stopped_run):
  data, run, update = stopped_run
  train = data / 'train.tsv'
  content = train.read_text('utf-8')
  train.write_text('\n'.join(reversed(content.splitlines())) + '\n', 'utf-8')
  try:
    with two_devices(), pytest.raises(UserError, match='was trained on other data: '):
      replay(run, update)
  finally:
    train.write_text(content, 'utf-8')
