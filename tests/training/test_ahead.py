"""Updates of later batch shapes are compiled in a thread, each once, and the numbers stay the same."""

import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from attention_jax.training.ahead import CompileAhead

from attention_jax.data.pipeline import first_of_each_shape
from attention_jax.training.partition import make_mesh, replicate, shard_batch
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step
from tests.compiled import record_compilations, shapes_of


class Batch(NamedTuple):
  x: np.ndarray
  links: np.ndarray | None = None


class Batches:
  """Batches of 1, 2 or 3 positions; the third shape occurs in step 5 first."""

  shapes = ((2, 1), (2, 2), (2, 3))
  shape_names = 'rows, positions'

  def __len__(self):
    return 8

  def shape(self, step):
    return 2, (1, 2, 1, 1, 2, 3, 1, 2)[step % 8]

  def __getitem__(self, step):
    return Batch(np.full(self.shape(step), 1.0, np.float32))


def widths(batches):
  return [batch.x.shape[1] for batch in batches]


def test_the_first_batch_of_each_shape_is_found_between_the_first_and_the_last_step():
  assert widths(first_of_each_shape(Batches(), 0, 100)) == [1, 2, 3]
  assert widths(first_of_each_shape(Batches(), 0, 5)) == [1, 2]
  assert widths(first_of_each_shape(Batches(), 4, 100)) == [2, 3, 1]


def make_step():
  mesh = make_mesh(jax.devices()[:1])
  optimizer = optax.sgd(0.1)

  def loss(params, batch, rngs, running, update_number):
    return {'loss': ((batch.x - params['w']) ** 2).sum(), 'tokens': np.float32(batch.x.size)}

  step = make_train_step(loss, optimizer, lambda step: 0.1, mesh, seed=0)
  return step, replicate(init_state({'w': np.float32(0)}, optimizer), mesh)


def test_an_update_uses_the_program_that_was_compiled_ahead():
  step, state = make_step()
  expected, _ = make_step()[0](make_step()[1], Batches()[5])
  step.compile_for(shapes_of(state), Batches()[5])
  batch = shard_batch(Batches()[5], step.mesh)
  with record_compilations() as compiled:
    new_state, _ = step.update(step.root, state, batch)
  assert not compiled
  np.testing.assert_array_equal(new_state.params['w'], expected.params['w'])


def test_each_shape_is_compiled_once():
  compiled = []

  def compile_for(batch, when_lowered):
    compiled.append(batch.x.shape[1])
    when_lowered()

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100)) as ahead:
    for step in range(8):
      ahead.prepare(Batches()[step])
  assert sorted(compiled) == [1, 2, 3]  # in any order: both threads compile
  assert ahead.describe() == ''


def test_the_thread_begins_when_the_first_shape_is_lowered():
  order = []
  later = threading.Event()

  def compile_for(batch, when_lowered):
    width = batch.x.shape[1]
    if width == 1:
      order.append('lowering')
      assert not later.wait(0.2)
      order.append('lowered')
      when_lowered()
      assert later.wait(60)  # the compilers of both run at the same time
    else:
      order.append(width)
      later.set()

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100)) as ahead:
    ahead.prepare(Batches()[0])
  assert order[:3] == ['lowering', 'lowered', 2]


def test_the_first_state_is_computed_while_the_first_shape_is_compiled():
  began = threading.Event()
  computed = threading.Event()

  def compile_for(batch, when_lowered):
    began.set()
    when_lowered()
    assert computed.wait(60)

  def make_state():
    assert began.wait(60)
    computed.set()
    return threading.current_thread().name

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100), make_state=make_state) as ahead:
    assert ahead.first_state() == 'compile ahead'


def test_the_first_state_is_returned_without_shapes_and_with_several_processes(monkeypatch):
  with CompileAhead(compile_at_once, (), make_state=lambda: 3) as ahead:
    assert ahead.first_state() == 3
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  shapes = []
  with CompileAhead(shapes.append, first_of_each_shape(Batches(), 0, 100), make_state=lambda: 3) as ahead:
    assert ahead.first_state() == 3
  assert not shapes


def test_an_error_of_the_first_state_is_raised():
  def fail():
    raise ValueError('no parameters')

  ahead = CompileAhead(compile_at_once, first_of_each_shape(Batches(), 0, 100), make_state=fail)
  with ahead, pytest.raises(ValueError, match='no parameters'):
    ahead.first_state()


def test_progress_names_the_shape():
  begin = threading.Event()
  entered = threading.Event()

  def compile_for(batch, when_lowered):
    when_lowered()
    if batch.x.shape[1] == 2:
      entered.set()
      begin.wait(60)

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100)) as ahead:
    ahead.prepare(Batches()[0])
    entered.wait(60)
    assert ahead.describe() == 'compiling shape 2 of 3'
    begin.set()


def test_no_progress_once_all_shapes_are_compiled():
  last = threading.Event()

  def compile_for(batch, when_lowered):
    when_lowered()
    if batch.x.shape[1] == 3:
      last.set()

  def describe_when_compiled(_):
    ahead.prepare(Batches()[0])
    assert last.wait(60)
    for shape in first_of_each_shape(Batches(), 0, 100):
      ahead.prepare(shape)
    return ahead.describe()  # the thread waits for this evaluation

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100), lambda is_stopped: None) as ahead:
    assert ahead.wrap_evaluation(describe_when_compiled)('state') == ''


def test_progress_of_an_evaluation_before_the_first_update():
  with CompileAhead(compile_at_once, first_of_each_shape(Batches(), 0, 100)) as ahead:
    assert ahead.wrap_evaluation(lambda _: ahead.describe())('state') == 'evaluating'


def test_an_error_in_the_thread_is_left_to_the_update():
  failed = threading.Event()

  def compile_for(batch, when_lowered):
    when_lowered()
    if batch.x.shape[1] == 2:
      failed.set()
      raise ValueError('wrong shape')

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100)) as ahead:
    ahead.prepare(Batches()[0])
    failed.wait(60)
    ahead.prepare(Batches()[1])  # returns; the update compiles this shape again


def test_an_error_of_a_later_batch_is_left_to_the_training_thread():
  def read_batches():
    yield Batches()[0]
    raise OSError('cannot read a picture')

  with CompileAhead(compile_at_once, read_batches()) as ahead:
    ahead.prepare(Batches()[0])
    ahead._thread.join()  # pytest fails for an error that a thread does not handle
    ahead.prepare(Batches()[1])
    assert ahead.describe() == ''


def compile_at_once(batch, when_lowered):
  when_lowered()


def test_the_evaluation_is_compiled_after_the_updates_until_an_evaluation_begins():
  shapes = []
  begun = threading.Event()
  stopped = threading.Event()

  def compile_for(batch, when_lowered):
    when_lowered()
    shapes.append(batch.x.shape[1])

  def compile_evaluation(is_stopped):
    assert sorted(shapes) == [1, 2, 3] and not is_stopped()
    begun.set()
    while not is_stopped():
      time.sleep(0.01)
    stopped.set()

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100), compile_evaluation) as ahead:
    evaluate = ahead.wrap_evaluation(lambda state: (state, stopped.is_set()))
    ahead.prepare(Batches()[0])
    assert begun.wait(60) and ahead.describe() == 'compiling the evaluation'
    assert evaluate('state') == ('state', True)  # the compilation has stopped
    assert ahead.describe() == ''


def test_an_evaluation_that_begins_before_its_compilation_is_not_compiled_in_the_thread():
  later = threading.Event()
  compiled = []

  def compile_for(batch, when_lowered):
    when_lowered()
    if batch.x.shape[1] == 2:
      later.wait(60)

  with CompileAhead(compile_for, first_of_each_shape(Batches(), 0, 100), compiled.append) as ahead:
    ahead.prepare(Batches()[0])
    assert ahead.wrap_evaluation(lambda state: state)(1) == 1
    later.set()
  assert not compiled


def test_an_error_of_the_evaluation_is_left_to_the_training_thread():
  def fail(is_stopped):
    raise ValueError('no such metric')

  with CompileAhead(compile_at_once, first_of_each_shape(Batches(), 0, 100), fail) as ahead:
    ahead.prepare(Batches()[0])
    ahead._thread.join()
    assert ahead.wrap_evaluation(lambda state: state)(1) == 1


@pytest.mark.parametrize('batches', [0, 1])
def test_closing_ends_the_thread(batches):
  ahead = CompileAhead(compile_at_once, first_of_each_shape(Batches(), 0, 100))
  with ahead:
    for step in range(batches):
      ahead.prepare(Batches()[step])
  assert not ahead._thread.is_alive()
