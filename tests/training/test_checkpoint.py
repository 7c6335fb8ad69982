"""Checkpoints come back whole or say why not; a folder belongs to one config; nothing is lost."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.folder import MUTABLE_FIELDS, check_folder, prepare_folder, read_config
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.state import TrainState
from attention_jax.training.writers import JsonLines, TensorBoard, read_metrics


def make_state(step, width=3, dtype=jnp.float32, value=1.0, running=None):
  params = {'dense': {'kernel': jnp.full((2, width), value, dtype)}, 'bias': jnp.arange(width, dtype=jnp.bfloat16)}
  return TrainState(jnp.int32(step), params, ({'mu': jnp.full((5,), value / 3)}, ()), (), running or {})


@pytest.fixture
def checkpoints(tmp_path):
  made = Checkpoints(tmp_path, keep=2)
  yield made
  made.close()


def test_round_trip_keeps_values_dtypes_and_shardings(checkpoints):
  state = replicate(make_state(7), make_mesh())
  host = {'best': 0.1 + 0.2, 'name': None}
  checkpoints.save(state, host)
  found, same = checkpoints.restore(state)
  assert same == host and type(found) is TrainState
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype and a.sharding == b.sharding
  abstract, _ = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
  jax.tree.map(np.testing.assert_array_equal, abstract, state)


def test_running_means_are_kept(checkpoints):
  means = {'accuracy': jnp.float32(0.25)}
  checkpoints.save(make_state(1, running=means), {})
  assert checkpoints.restore(make_state(0, running={'accuracy': jnp.float32(0)}))[0].running == means
  with pytest.raises(UserError, match=r'running/accuracy is float32\[\] there, absent in this config'):
    checkpoints.restore(make_state(0))


def test_latest_keeps_the_last_and_best_keeps_one(checkpoints, tmp_path):
  assert checkpoints.latest() is None and checkpoints.latest(BEST) is None
  for step in (10, 20, 30):
    checkpoints.save(make_state(step), {})
    checkpoints.save(make_state(step), {}, BEST)
  assert checkpoints.latest() == 30
  assert sorted(os.listdir(tmp_path / LATEST)) == ['20', '30'] and os.listdir(tmp_path / BEST) == ['30']


def test_a_later_best_from_an_interrupted_attempt_gives_way(checkpoints, tmp_path):
  """Data may have changed meanwhile: what is measured must be what this attempt found best."""
  checkpoints.save(make_state(30), {}, BEST)
  for step, value in ((20, 2.0), (30, 5.0), (30, 6.0)):
    checkpoints.save(make_state(step, value=value), {}, BEST)
    state, _ = checkpoints.restore(make_state(0), BEST)
    assert os.listdir(tmp_path / BEST) == [str(step)] and state.params['dense']['kernel'][0, 0] == value


@pytest.mark.parametrize(
  ('every', 'saved', 'kept'),
  [
    (10, (10, 20, 30), [20, 30]),
    (10, (10, 20, 23), [10, 20, 23]),
    (10, (10, 13, 20, 23, 27, 30), [20, 30]),  # interrupted three times
    (0, (7, 9), [9]),
  ],
)
def test_interruptions_do_not_change_which_states_stay(tmp_path, every, saved, kept):
  checkpoints = Checkpoints(tmp_path, 2, every)
  for step in saved:
    checkpoints.save(make_state(step), {})
  assert checkpoints.steps() == kept == sorted(int(name) for name in os.listdir(tmp_path / LATEST))
  checkpoints.close()


def test_a_state_that_is_not_finite_is_never_saved(checkpoints):
  checkpoints.save(make_state(1), {})
  with pytest.raises(UserError, match=r'not finite after step 2; not saved, the last good .*/checkpoints/1'):
    checkpoints.save(make_state(2, value=jnp.nan), {})
  assert checkpoints.latest() == 1


def test_reading_creates_and_cleans_nothing(checkpoints, tmp_path):
  checkpoints.save(make_state(1), {})
  unfinished = tmp_path / LATEST / '2.orbax-checkpoint-tmp'
  unfinished.mkdir()
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.restore(make_state(0))[0].step == 1 and unfinished.exists()
  reader.close()
  nothing = Checkpoints(tmp_path / 'none', read_only=True)
  with pytest.raises(UserError, match=r'no checkpoint in .*none/best'):
    nothing.restore(make_state(0), BEST)
  assert not (tmp_path / 'none').exists()
  nothing.close()


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


@pytest.mark.parametrize('damage', [empty_files, flip_a_bit, remove_host, remove_everything])
def test_damaged_checkpoint_is_told_and_left_alone(tmp_path, damage):
  with_two = Checkpoints(tmp_path, keep=2)
  for step in (10, 20):
    with_two.save(make_state(step), {})
  with_two.close()
  damage(tmp_path / LATEST / '20')
  again = Checkpoints(tmp_path)
  with pytest.raises(UserError, match=r'checkpoints/20: .*possible: move it away to go on from step 10') as error:
    again.restore(make_state(0))
  assert '\n' not in str(error.value) and (tmp_path / LATEST / '20').exists()
  again.close()
  (tmp_path / LATEST / '20').rename(tmp_path / 'damaged')  # doing what it says helps
  helped = Checkpoints(tmp_path)
  assert helped.restore(make_state(0))[0].step == 10
  helped.close()


@pytest.mark.parametrize(
  ('like', 'message'),
  [
    (make_state(0, width=4), r'params/bias is bfloat16\[3\] there, bfloat16\[4\] in this config'),
    (make_state(0, dtype=jnp.bfloat16), r'dense/kernel is float32\[2,3\] there, bfloat16\[2,3\]'),
    (make_state(0)._replace(average={'bias': jnp.ones(3)}), r'average/bias is absent there, float32\[3\]'),
    (make_state(0)._replace(opt_state=()), r'opt_state/0/mu is float32\[5\] there, absent'),
  ],
)
def test_another_model_is_told(checkpoints, like, message):
  checkpoints.save(make_state(1), {})
  with pytest.raises(UserError, match=message):
    checkpoints.restore(like)


CONFIG = {'model': {'features': 8, 'cell': 'luong'}, 'training': {'steps': 10, 'seed': 0}, 'buckets': ((5, 6), (7, 8))}


def changed(**fields):
  config = json.loads(json.dumps(CONFIG))
  for name, value in fields.items():
    section, field = name.split('_')
    config[section][field] = value
  return config


def test_folder_belongs_to_its_config(tmp_path):
  folder = prepare_folder(tmp_path / 'a' / 'run', CONFIG)
  assert read_config(folder) == json.loads(json.dumps(CONFIG))
  assert prepare_folder(folder, CONFIG) == folder
  content = (folder / 'config.json').read_bytes()
  with pytest.raises(UserError) as error:
    prepare_folder(folder, changed(model_features=9, training_seed=1, model_heads=2))
  for part in ('model.features is 8 there, 9 given', 'training.seed is 0 there, 1', 'model.heads is absent there'):
    assert part in str(error.value)
  assert '\n' not in str(error.value) and (folder / 'config.json').read_bytes() == content


def test_the_length_of_a_run_may_change(tmp_path):
  assert 'training.steps' in MUTABLE_FIELDS
  prepare_folder(tmp_path, CONFIG)
  prepare_folder(tmp_path, changed(training_steps=20))
  assert read_config(tmp_path)['training']['steps'] == 20


def test_a_run_from_before_there_was_a_field_goes_on(tmp_path):
  prepare_folder(tmp_path, CONFIG)
  complete = lambda stored: stored | {'model': {'dropout': (0.1, 0.2)} | stored['model']}
  newer = changed(model_dropout=(0.1, 0.2))
  with pytest.raises(UserError, match=r'model.dropout is absent there, \[0.1, 0.2\] given'):
    prepare_folder(tmp_path, newer)
  assert check_folder(tmp_path, newer, complete) and prepare_folder(tmp_path, newer, complete) == tmp_path
  with pytest.raises(UserError, match=r'model.dropout is \[0.1, 0.2\] there, 0.5 given'):
    prepare_folder(tmp_path, changed(model_dropout=0.5), complete)


def test_foreign_files_are_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('x')
  with pytest.raises(UserError, match=r'holds files \(thesis.tex\) but no config.json; possible: an empty or new'):
    prepare_folder(tmp_path, CONFIG)
  assert os.listdir(tmp_path) == ['thesis.tex']
  with pytest.raises(UserError, match=r'cannot use .*thesis.tex as the folder of a run'):
    prepare_folder(tmp_path / 'thesis.tex', CONFIG)


def test_unreadable_config_is_told(tmp_path):
  (tmp_path / 'config.json').write_text('{"model":')
  with pytest.raises(UserError, match=r'cannot read .*config.json'):
    prepare_folder(tmp_path, CONFIG)
  with pytest.raises(UserError, match=r'holds no config.json'):
    read_config(tmp_path / 'nowhere')


def test_a_truncated_last_line_is_repaired_and_whole_lines_stay(tmp_path):
  writer = JsonLines(tmp_path)
  for step in (5, 10):
    writer(step, {'train/loss': 1.0 / step})
  writer.close()
  whole = (tmp_path / 'metrics.jsonl').read_bytes()
  (tmp_path / 'metrics.jsonl').write_bytes(whole + b'{"step": 15, "tr')
  writer = JsonLines(tmp_path)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == whole
  writer(10, {'validation/signature': 'é', 'train/loss': 2.0})
  writer.close()
  assert read_metrics(tmp_path) == [
    {'step': 5, 'train/loss': 0.2},
    {'step': 10, 'train/loss': 2.0, 'validation/signature': 'é'},
  ]


def test_tensorboard_files_are_written(tmp_path):
  writer = TensorBoard(tmp_path, start=0)
  writer(5, {'train/loss': 1.5, 'validation/signature': 'words'})
  writer.close()
  (events,) = (tmp_path / 'tensorboard').iterdir()
  assert b'train/loss' in events.read_bytes()
