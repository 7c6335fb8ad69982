"""An update that is not finite is stored by training, and repeated by `replay`, which finds the row."""

import dataclasses
import shutil

import jax.numpy as jnp
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.replay import replay
from attention_jax.systems.translation import TranslationSystem
from attention_jax.training.incidents import stored_updates
from tests.systems.helpers import tiny_config, train_quietly, two_devices, write_pairs

BAD_ROW = 5


@pytest.fixture
def poisoned(monkeypatch):
  """Makes the loss of row BAD_ROW infinite after the second update."""
  healthy = TranslationSystem.loss.func

  def make_loss(system):
    loss = healthy(system)

    def fn(params, batch, rngs, running, update):
      sums = loss.fn(params, batch, rngs, running, update)
      is_bad = jnp.any(batch.index == BAD_ROW) & (update > 2)
      return {**sums, 'loss': sums['loss'] * jnp.where(is_bad, jnp.inf, 1.0)}

    return dataclasses.replace(loss, fn=fn)

  monkeypatch.setattr(TranslationSystem, 'loss', property(make_loss))


def test_the_row_of_a_stored_update_is_found(poisoned, tmp_path):
  config = tiny_config(write_pairs(tmp_path))
  with pytest.raises(UserError, match=r'loss is inf at step [34]; the last good .*/checkpoints/2; .*nonfinite/update_'):
    train_quietly(config, tmp_path / 'run')
  (update,) = stored_updates(tmp_path / 'run')
  with two_devices():
    result = replay(tmp_path / 'run')
  assert (result.update, result.start, result.rows, result.params) == (update, 2, [BAD_ROW], [])
  assert not jnp.isfinite(result.loss) and result.gradients
  with pytest.raises(UserError, match=rf"unknown update with a stored batch in .*: '1'.*; expected one of: {update}"):
    replay(tmp_path / 'run', 1)
  shutil.rmtree(tmp_path / 'run' / 'nonfinite')
  with pytest.raises(UserError, match=r'has no stored batch: every loss and gradient has been finite'):
    replay(tmp_path / 'run')


def test_changed_data_are_noticed(poisoned, tmp_path):
  config = tiny_config(write_pairs(tmp_path))
  with pytest.raises(UserError, match='loss is inf'):
    train_quietly(config, tmp_path / 'run')
  train = tmp_path / 'train.tsv'
  train.write_text('\n'.join(reversed(train.read_text('utf-8').splitlines())) + '\n', 'utf-8')
  with two_devices(), pytest.raises(UserError, match=r'the batch of update \d differs from the stored one in '):
    replay(tmp_path / 'run')
