"""Messages of orbax are hidden for a time; afterwards all is as before, except after an error."""

import logging
import sys

import pytest
from absl import logging as absl_logging

from attention_jax.training.orbax_messages import without_orbax_messages


@pytest.fixture
def restored(monkeypatch):
  """Undoes what stays after an error."""
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  yield
  logging.getLogger('asyncio').disabled = False


def test_logs_are_hidden_and_shown_again():
  before = (absl_logging.get_verbosity(), sys.unraisablehook)
  with without_orbax_messages():
    assert absl_logging.get_verbosity() == absl_logging.FATAL and logging.getLogger('asyncio').disabled
  assert (absl_logging.get_verbosity(), sys.unraisablehook) == before and not logging.getLogger('asyncio').disabled


def test_coroutines_that_were_never_awaited_are_no_warnings(restored):
  async def read():
    pass

  with pytest.raises(OSError, match='full'), without_orbax_messages():
    read()  # freed at once; warnings are errors in tests
    raise OSError('full')


def test_threads_that_end_after_an_error_stay_silent(restored):
  before = sys.unraisablehook
  with pytest.raises(OSError, match='full'), without_orbax_messages():
    raise OSError('full')
  assert sys.unraisablehook is not before and logging.getLogger('asyncio').disabled
