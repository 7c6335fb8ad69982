"""Which checkpoints are kept, and readers of what writers have saved; see also test_two_processes.py."""

from typing import NamedTuple

import orbax.checkpoint as ocp
import pytest

from attention_jax.training.checkpoint import CheckpointRetention, make_reader, make_writer


class Stored(NamedTuple):
  """A checkpoint, as orbax passes it to its policies."""

  step: int


@pytest.mark.parametrize(
  ('keep', 'every', 'pinned', 'steps', 'kept'),
  [
    (2, 10, None, [10, 20, 30], [20, 30]),
    (2, 10, None, [10, 20, 25], [10, 20, 25]),  # 25 was saved by an interruption
    (2, 10, None, [10, 20, 25, 30], [20, 30]),
    (1, 0, None, [7, 9], [9]),
    (1, 10, 10, [10, 20, 30], [10, 30]),
  ],
  ids=['uninterrupted', 'ends with an interruption', 'resumed after an interruption', 'no interval', 'pinned'],
)
def test_the_last_regular_states_the_very_last_and_the_pinned_one_are_kept(keep, every, pinned, steps, kept):
  retention = CheckpointRetention(keep, every, lambda: pinned)
  preserved = retention.should_preserve([Stored(step) for step in steps], context=None)
  assert [step for step, is_kept in zip(steps, preserved, strict=True) if is_kept] == kept


def test_a_reader_finds_what_a_writer_has_saved(tmp_path):
  folder = tmp_path / 'run' / 'best'
  assert make_reader(folder) is None
  writer = make_writer(folder, CheckpointRetention(1, 1, lambda: None))
  for step in (1, 2):
    writer.save(step, args=ocp.args.Composite(host=ocp.args.JsonSave({'step': step})), force=True)
    writer.wait_until_finished()
  reader = make_reader(folder)
  assert reader.all_steps() == [2]
  assert reader.restore(2, args=ocp.args.Composite(host=ocp.args.JsonRestore()))['host'] == {'step': 2}
  for manager in (writer, reader):
    manager.close()
