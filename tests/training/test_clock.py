"""Laps exclude pauses, and the shares of all activities add up."""

import pytest

from attention_jax.errors import UserError
from attention_jax.training.clock import (
  COMPILATION,
  EVALUATION,
  GOODPUT,
  SAVING,
  Goodput,
  TrainingClock,
  read_goodput,
  write_goodput,
)


def test_laps_exclude_pauses(time):
  timer = TrainingClock()
  time.now = 3.0
  with timer.paused(SAVING):
    time.now = 10.0
  time.now = 11.0
  assert timer.lap() == 4.0
  time.now = 13.0
  assert timer.lap() == 2.0
  assert timer.lap() > 0  # rates are finite even if no time has passed


def test_the_shares_of_all_activities_add_up_to_the_wall_clock(time):
  timer = TrainingClock()
  shapes = set()

  def stream(start, stop):
    for step in range(start, stop):
      time.now += 1.0
      yield step

  for batch in timer.timed_stream(stream)(4, 9):
    with timer.paused(COMPILATION):
      time.now += 0.0 if batch % 2 in shapes else 12.0
    shapes.add(batch % 2)
    time.now += 1.2
  with timer.paused(EVALUATION):
    time.now += 5.0
  with timer.paused(SAVING):
    time.now += 10.0
  shares = 'updates 12 %, waiting for data 10 %, compiling 48 %, evaluating 10 %, saving 20 %'
  goodput = timer.goodput(Goodput(starts=1))
  assert goodput.describe() == f'wall clock 50 s: {shares}'
  again = timer.goodput(goodput._replace(starts=2, repeated_updates=7))
  assert again.describe() == f'wall clock 100 s: {shares}; 2 starts, 7 updates repeated'
  assert timer.lap() == pytest.approx(11.0)  # waiting for data is part of the rates


def test_the_goodput_of_a_folder_is_that_of_a_new_run_or_the_stored_one(tmp_path):
  assert read_goodput(tmp_path) == Goodput()
  for content in ('', '[1]', '{"other": 1}'):
    (tmp_path / GOODPUT).write_text(content)
    with pytest.raises(UserError, match=f'cannot read {tmp_path}/{GOODPUT}: .*; delete it to count from now on'):
      read_goodput(tmp_path)
  goodput = Goodput(3, 4, {'updates': 1.5})
  write_goodput(tmp_path, goodput)
  assert read_goodput(tmp_path) == goodput
