"""Laps exclude pauses, and the shares of all activities add up."""

import pytest

from attention_jax.training.clock import COMPILATION, EVALUATION, SAVING, TrainingClock


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
  assert timer.describe() == (
    'wall clock 50 s: updates 12 %, waiting for data 10 %, compiling 48 %, evaluating 10 %, saving 20 %'
  )
  assert timer.lap() == pytest.approx(11.0)  # waiting for data is part of the rates
