"""Laps exclude pauses, and the shares of all activities add up."""

from attention_jax.training.clock import EVALUATION, SAVING, TrainingClock


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


def test_shares_of_the_wall_clock(time):
  timer = TrainingClock()
  shapes = set()

  def stream(start, stop):
    for step in range(start, stop):
      time.now += 1.0
      yield step

  def train_step(shape):
    time.now += 2.0 if shape in shapes else 12.0
    shapes.add(shape)
    return shape

  step = timer.timed_step(train_step, lambda: len(shapes))
  batches = timer.timed_stream(stream)(4, 9)
  assert [step(batch % 2) for batch in batches] == [0, 1, 0, 1, 0]
  with timer.paused(EVALUATION):
    time.now += 5.0
  with timer.paused(SAVING):
    time.now += 10.0
  assert timer.describe() == (
    'wall clock 50 s: updates 12 %, waiting for data 10 %, compiling 48 %, evaluating 10 %, saving 20 %'
  )
  assert timer.lap() == 35.0  # waiting and compiling are part of the rates
