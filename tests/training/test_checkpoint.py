"""Checkpoints are read back exactly or with a clear error, and none that could be needed is deleted."""

import contextlib
import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints, updates_made
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.state import TrainState


def make_state(step, width=3, dtype=jnp.float32, value=1.0, running=None):
  params = {'dense': {'kernel': jnp.full((2, width), value, dtype)}, 'bias': jnp.arange(width, dtype=jnp.bfloat16)}
  return TrainState(jnp.int32(step), params, ({'mu': jnp.full((5,), value / 3)}, ()), (), running or {})


@pytest.fixture
def checkpoints(tmp_path):
  manager = Checkpoints(tmp_path, keep=2)
  yield manager
  manager.close()


def test_round_trip_keeps_values_dtypes_and_shardings(checkpoints):
  state = replicate(make_state(7), make_mesh())
  host = {'best': 0.1 + 0.2, 'name': None}
  checkpoints.save(state, host)
  restored, restored_host = checkpoints.restore(state)
  assert restored_host == host and type(restored) is TrainState
  for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype and a.sharding == b.sharding
  from_shapes, _ = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
  jax.tree.map(np.testing.assert_array_equal, from_shapes, state)


@pytest.mark.long
def test_updates_made_counts_a_best_state_after_the_latest_one(checkpoints, tmp_path):
  assert updates_made(tmp_path / 'absent') == updates_made(tmp_path) == 0
  checkpoints.save(make_state(20), {})
  checkpoints.save(make_state(10), {}, BEST)
  checkpoints.wait()
  assert updates_made(tmp_path) == 20
  checkpoints.save(make_state(30), {}, BEST)
  checkpoints.wait()
  assert updates_made(tmp_path) == 30


def test_running_means_are_stored(checkpoints):
  means = {'accuracy': jnp.float32(0.25)}
  checkpoints.save(make_state(1, running=means), {})
  assert checkpoints.restore(make_state(0, running={'accuracy': jnp.float32(0)}))[0].running == means
  with pytest.raises(UserError, match=r'running/accuracy is float32\[\] in the checkpoint, absent in this config'):
    checkpoints.restore(make_state(0))


@pytest.mark.long
def test_the_next_update_may_overwrite_a_state_that_is_being_written(checkpoints):
  """The update reuses the memory of the state at once, as training steps do; the file has the earlier values."""
  update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)

  def make_large_state():  # so that writing takes longer than the update
    return replicate(make_state(1)._replace(average={'large': jnp.zeros(4_000_000)}), make_mesh())

  update(make_large_state())  # compiles the update
  state = make_large_state()
  shapes = jax.eval_shape(lambda: state)
  checkpoints.save(state, {})
  updated = update(state)
  assert checkpoints.is_writing() and updated.step == 2
  restored, _ = checkpoints.restore(shapes)
  assert not checkpoints.is_writing()
  assert restored.step == 1 and not np.any(restored.average['large'])


def test_a_checkpoint_that_could_not_be_written_is_an_error_of_the_next_call(checkpoints, tmp_path, monkeypatch):
  checkpoints.save(make_state(1), {})
  checkpoints.wait()

  def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(type(checkpoints._managers[LATEST]), '_wait_for_checkpointers', fail)
  checkpoints.save(make_state(2), {})
  message = rf'cannot save checkpoint {tmp_path}/checkpoints/2: No space left on device; .* {tmp_path}/checkpoints/1$'
  with pytest.raises(UserError, match=message):
    checkpoints.save(make_state(3), {})
  assert checkpoints.latest() == 1


@pytest.mark.long
def test_a_later_best_state_of_an_interrupted_run_is_replaced(checkpoints, tmp_path):
  """The data may have changed meanwhile: the best state must be one of the resumed run."""
  checkpoints.save(make_state(30), {}, BEST)
  for step, value in ((20, 2.0), (30, 5.0), (30, 6.0)):
    checkpoints.save(make_state(step, value=value), {}, BEST)
    state, _ = checkpoints.restore(make_state(0), BEST)
    assert os.listdir(tmp_path / BEST) == [str(step)] and state.params['dense']['kernel'][0, 0] == value


@pytest.mark.long
def test_interruptions_do_not_change_which_regular_states_are_kept(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path, 2, 10)) as checkpoints:
    for step in (10, 20, 23):
      checkpoints.save(make_state(step), {})
    assert checkpoints.steps() == [10, 20, 23]
    for step in (27, 30):
      checkpoints.save(make_state(step), {})
    assert checkpoints.steps() == [20, 30] == sorted(int(name) for name in os.listdir(tmp_path / LATEST))


def test_a_state_that_is_not_finite_is_never_saved(checkpoints):
  checkpoints.save(make_state(1), {})
  with pytest.raises(UserError, match=r'not finite after step 2; not saved, the last good .*/checkpoints/1'):
    checkpoints.save(make_state(2, value=jnp.nan), {})
  assert checkpoints.latest() == 1


def test_read_only_creates_and_deletes_nothing(checkpoints, tmp_path):
  checkpoints.save(make_state(1), {})
  checkpoints.wait()
  unfinished = tmp_path / LATEST / '2.orbax-checkpoint-tmp'
  unfinished.mkdir()
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.restore(make_state(0))[0].step == 1 and unfinished.exists()
  reader.close()
  empty_reader = Checkpoints(tmp_path / 'none', read_only=True)
  with pytest.raises(UserError, match=r'no checkpoint in .*none/best'):
    empty_reader.restore(make_state(0), BEST)
  assert not (tmp_path / 'none').exists()
  empty_reader.close()


def empty_files(path):
  for file in path.rglob('*'):
    if file.is_file():
      file.write_bytes(b'')


def flip_a_bit(path):
  for file in path.glob('state/**/d/*'):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_host(path):
  (path / 'host' / 'metadata').unlink()


def remove_everything(path):
  for file in sorted(path.rglob('*'), reverse=True):
    file.rmdir() if file.is_dir() else file.unlink()


@pytest.fixture(scope='module')
def saved_once(tmp_path_factory):
  folder = tmp_path_factory.mktemp('saved')
  with contextlib.closing(Checkpoints(folder, keep=2)) as writer:
    for step in (10, 20):
      writer.save(make_state(step, value=step), {'step': step})
    writer.save(make_state(10, value=10), {}, BEST)
  return folder


@pytest.fixture
def saved(saved_once, tmp_path):
  """A run folder with checkpoints after steps 10 and 20, and the best one after step 10."""
  return shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def open_saved(saved):
  """Returns a function that opens the checkpoints of `saved`, which a test may damage before."""
  with contextlib.ExitStack() as stack:
    yield lambda **options: stack.enter_context(contextlib.closing(Checkpoints(saved, **options)))


@pytest.mark.long
@pytest.mark.parametrize('damage', [empty_files, flip_a_bit, remove_host, remove_everything])
def test_a_damaged_checkpoint_is_an_error_that_names_the_others_for_readers_and_is_set_aside(saved, open_saved, damage):
  damage(saved / LATEST / '20')
  with pytest.raises(UserError, match=r'/20 cannot .*; others can be read by --checkpoint: best, 10$') as error:
    open_saved(read_only=True).restore(make_state(0))
  assert '\n' not in str(error.value) and (saved / LATEST / '20').exists()
  lines = []
  checkpoints = open_saved()
  state, host = checkpoints.resume(lambda: make_state(0), lines.append)
  assert state.step == 10 and host == {'step': 10} and checkpoints.steps() == [10]
  aside = saved / 'damaged-20-1'
  assert aside.is_dir() and f'; moved to {aside}; resuming from step 10' in lines[0] and len(lines) == 1
  checkpoints.save(make_state(20, value=20), {'step': 20})
  assert checkpoints.resume(lambda: make_state(0), lines.append)[1] == {'step': 20} and len(lines) == 1


def test_a_checkpoint_of_the_same_step_that_was_set_aside_before_is_not_overwritten(saved, open_saved):
  earlier = saved / 'damaged-20-2'  # damaged-20-1 was deleted
  earlier.mkdir()
  (earlier / 'file').touch()
  empty_files(saved / LATEST / '20')
  open_saved().resume(lambda: make_state(0), [].append)
  assert (earlier.parent / 'damaged-20-1').is_dir() and (earlier / 'file').exists()


def test_the_only_checkpoint_is_not_set_aside(saved, open_saved):
  for step in ('10', '20'):
    empty_files(saved / LATEST / step)
  lines = []
  with pytest.raises(UserError, match=r'checkpoints/10 cannot be read: .*; choose another folder, or delete'):
    open_saved().resume(lambda: make_state(0), lines.append)
  assert (saved / LATEST / '10').exists() and len(lines) == 1


@pytest.mark.long
def test_a_flipped_byte_of_each_file_is_noticed_or_changes_nothing(saved, open_saved):
  """Orbax does not read some of the files, and the frames of a compressed block have unused bits."""
  reader = open_saved(read_only=True)
  expected = reader.restore(make_state(0))
  random = np.random.default_rng(0)
  outcomes = []
  for file in sorted(path for path in (saved / LATEST / '20').rglob('*') if path.is_file()):
    content = file.read_bytes()
    for position in random.integers(len(content), size=1):
      flipped = bytearray(content)
      flipped[position] ^= random.integers(1, 256)
      file.write_bytes(flipped)
      try:
        outcome = reader.restore(make_state(0))
        jax.tree.map(np.testing.assert_array_equal, outcome, expected)
        outcomes.append('equal')
      except UserError:
        outcomes.append('error')
    file.write_bytes(content)
  assert outcomes.count('error') > len(outcomes) / 4


def test_wrong_values_in_an_intact_file_are_noticed(saved, open_saved):
  """Exchanges the states of two checkpoints, whose files are all intact."""
  for name in ('10', '20'):
    (saved / LATEST / name / 'state').rename(saved / f'state-{name}')
  for name, other in (('10', '20'), ('20', '10')):
    (saved / f'state-{name}').rename(saved / LATEST / other / 'state')
  with pytest.raises(
    UserError, match=r'checkpoints/20 cannot be read: \d of \d arrays differ from their checksums, such as step'
  ):
    open_saved(read_only=True).restore(make_state(0))


def test_a_run_without_latest_checkpoints_starts_again(saved, open_saved):
  shutil.rmtree(saved / LATEST)
  assert open_saved().resume(lambda: pytest.fail('there is no checkpoint')) is None


def test_host_values_are_those_of_the_last_checkpoint(saved, open_saved):
  checkpoints = open_saved()
  assert checkpoints.host_values() == checkpoints.restore(make_state(0))[1]
  shutil.rmtree(saved / BEST)
  assert open_saved().host_values(BEST) is None


@pytest.mark.parametrize('remove', [shutil.rmtree, remove_everything])
def test_saving_succeeds_or_is_an_error_after_earlier_checkpoints_were_removed(saved, open_saved, remove):
  """The new checkpoint can be restored, or saving it raises a UserError."""
  checkpoints = open_saved()
  remove(saved / LATEST / '20')
  remove(saved / LATEST / '10')
  try:
    checkpoints.save(make_state(30), {})
    assert checkpoints.restore(make_state(0))[0].step == 30
  except UserError as error:
    assert f'cannot save checkpoint {saved}/checkpoints/30' in str(error)


def test_a_folder_in_which_nothing_can_be_saved_is_an_error(saved, open_saved):
  checkpoints = open_saved()
  shutil.rmtree(saved / LATEST)
  (saved / LATEST).write_text('')
  with pytest.raises(UserError, match=r'cannot save checkpoint .*checkpoints/30: .*; the last good'):
    checkpoints.save(make_state(30), {})


@pytest.mark.long
@pytest.mark.parametrize(
  ('like', 'message'),
  [
    (make_state(0, width=4), r'params/bias is bfloat16\[3\] in the checkpoint, bfloat16\[4\] in this config'),
    (make_state(0, dtype=jnp.bfloat16), r'dense/kernel is float32\[2,3\] in the checkpoint, bfloat16\[2,3\]'),
    (make_state(0)._replace(average={'bias': jnp.ones(3)}), r'average/bias is absent in the checkpoint, float32\[3\]'),
    (make_state(0)._replace(opt_state=()), r'opt_state/0/mu is float32\[5\] in the checkpoint, absent'),
  ],
)
def test_the_checkpoint_of_another_model_is_an_error(checkpoints, like, message):
  checkpoints.save(make_state(1), {})
  with pytest.raises(UserError, match=message):
    checkpoints.restore(like)
