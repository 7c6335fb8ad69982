"""Training stores the batch of an update that is not finite; `replay` repeats the update and finds the row."""

import dataclasses
import shutil

import jax.numpy as jnp
import pytest
from attention_jax.training.incidents import stored_updates
from attention_jax.training.remote_folder import RemoteFolder

from attention_jax.errors import UserError
from attention_jax.systems.replay import replay
from attention_jax.systems.translation import TranslationSystem
from tests.systems.helpers import tiny_config, train_quietly, two_devices, write_pairs

BAD_ROW = 5
LIGHT = {'model__encoder': 'embedded', 'training__evaluate_every': 0}  # fields of a config that compiles faster


@pytest.fixture(scope='module')
def poisoned():
  """Makes the loss of batches with row BAD_ROW infinite after the second update."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(TranslationSystem, 'loss', property(poison(TranslationSystem.loss.func)))
    yield


def poison(healthy):
  """Wraps a function system -> loss: after the second update, the loss of batches with row BAD_ROW is infinite."""

  def make_loss(system):
    loss = healthy(system)

    def fn(params, batch, rngs, running, update):
      sums = loss.fn(params, batch, rngs, running, update)
      is_bad = jnp.any(batch.index == BAD_ROW) & (update > 2)
      return {**sums, 'loss': sums['loss'] * jnp.where(is_bad, jnp.inf, 1.0)}

    return dataclasses.replace(loss, fn=fn)

  return make_loss


@pytest.fixture(scope='module')
def stopped_run(poisoned, tmp_path_factory):
  """The folder of the data, and the folder of a run on these data that stopped at an infinite loss."""
  data = write_pairs(tmp_path_factory.mktemp('data'))
  run = tmp_path_factory.mktemp('stopped') / 'run'
  with pytest.raises(UserError, match=r'loss is inf at step [34]; the last good .*/checkpoints/2; .*nonfinite/update_'):
    train_quietly(tiny_config(data, **LIGHT), run)
  return data, run


def test_the_row_of_a_stored_update_is_found(stopped_run, tmp_path):
  shutil.copytree(stopped_run[1], tmp_path / 'run')
  (update,) = stored_updates(tmp_path / 'run')
  with two_devices():
    result = replay(tmp_path / 'run')
  assert (result.update, result.start, result.rows, result.params) == (update, 2, [BAD_ROW], [])
  assert not jnp.isfinite(result.loss) and result.gradients
  with pytest.raises(UserError, match=rf"unknown update with a stored batch in .*: '1'.*; expected one of: {update}"):
    replay(tmp_path / 'run', 1)
  shutil.rmtree(tmp_path / 'run' / 'nonfinite')
  with pytest.raises(
    UserError, match=r'has no stored batch; expected a run with a loss or gradient that was not finite'
  ):
    replay(tmp_path / 'run')


def test_a_run_behind_a_url_is_repeated(stopped_run, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  url = f'file://{tmp_path}/bucket/run'
  run = tmp_path / 'run'
  shutil.copytree(stopped_run[1], run)
  RemoteFolder(url, run).push(run)
  (update,) = stored_updates(run)
  with pytest.raises(UserError, match=rf"unknown update with a stored batch in .*: '1'.*; expected one of: {update}"):
    replay(url, 1)


def test_the_run_of_several_seeds_that_is_not_finite_is_repeated(poisoned, tmp_path):
  data = write_pairs(tmp_path)
  with pytest.raises(UserError, match=r'loss of seed \d is inf at step [34]; .*nonfinite/update_'):
    train_quietly(tiny_config(data, seeds=2, **LIGHT), tmp_path / 'run')
  (update,) = stored_updates(tmp_path / 'run')
  with two_devices():
    result = replay(tmp_path / 'run')
    other = replay(tmp_path / 'run', update, 1 - result.seed)
    with pytest.raises(UserError, match=r"unknown seed in .*: '2'"):
      replay(tmp_path / 'run', seed=2)
    with pytest.raises(UserError, match='those of several seeds are in '):
      replay(tmp_path / 'run' / 'seed_0')
  assert (result.update, result.start, result.rows) == (update, 2, [BAD_ROW]) and not result.is_finite
  assert (other.update, other.start, {result.seed, other.seed}) == (update, 2, {0, 1})
  assert other.is_finite == (BAD_ROW not in other.rows)


def test_annealed_parameters_have_no_gradient(poisoned, tmp_path):
  anneal = {'model__attention__alignment': 'entmax', 'training__anneal': 'alpha: constant(rate=1.5)'}
  with pytest.raises(UserError, match='is inf at step'):
    train_quietly(tiny_config(write_pairs(tmp_path), **anneal, **LIGHT), tmp_path / 'run')
  with two_devices():
    result = replay(tmp_path / 'run')
  assert result.gradients and not any(name.endswith('alpha') for name in result.gradients)


def test_changed_data_are_noticed(stopped_run):
  data, run = stopped_run
  train = data / 'train.tsv'
  content = train.read_text('utf-8')
  train.write_text('\n'.join(reversed(content.splitlines())) + '\n', 'utf-8')
  try:
    with two_devices(), pytest.raises(UserError, match=r'the batch of update \d differs from the stored one in '):
      replay(run)
  finally:
    train.write_text(content, 'utf-8')
