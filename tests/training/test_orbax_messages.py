"""Messages of orbax are hidden within a block; afterwards they are shown again, except after an error."""

import logging
import sys

import pytest
from absl import logging as absl_logging

from attention_jax.training import orbax_messages
from attention_jax.training.orbax_messages import without_orbax_messages


@pytest.fixture(autouse=True)
def restored(monkeypatch):
  """Starts each test with nothing hidden, and restores the settings that an error leaves changed."""
  asyncio_log = logging.getLogger('asyncio')
  monkeypatch.setattr(asyncio_log, 'disabled', False)
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  monkeypatch.setattr(orbax_messages, '_hiding', orbax_messages._Hiding())


def test_logs_are_hidden_and_shown_again():
  before = (absl_logging.get_verbosity(), sys.unraisablehook)
  with without_orbax_messages():
    assert absl_logging.get_verbosity() == absl_logging.FATAL and logging.getLogger('asyncio').disabled
  assert (absl_logging.get_verbosity(), sys.unraisablehook) == before and not logging.getLogger('asyncio').disabled


def test_blocks_may_end_in_any_order():
  """Checkpoints of several seeds are written at once."""
  before = (absl_logging.get_verbosity(), sys.unraisablehook)
  first = without_orbax_messages()
  second = without_orbax_messages()
  first.__enter__()
  second.__enter__()
  first.__exit__(None, None, None)
  assert absl_logging.get_verbosity() == absl_logging.FATAL
  second.__exit__(None, None, None)
  assert (absl_logging.get_verbosity(), sys.unraisablehook) == before and not logging.getLogger('asyncio').disabled


def test_coroutines_that_were_never_awaited_are_no_warnings():
  async def read():
    pass

  with pytest.raises(OSError, match='full'), without_orbax_messages():
    read()  # freed at once; warnings are errors in tests
    raise OSError('full')


def test_messages_stay_hidden_after_an_error():
  before = sys.unraisablehook
  with pytest.raises(OSError, match='full'), without_orbax_messages():
    raise OSError('full')
  with without_orbax_messages():
    pass
  assert sys.unraisablehook is not before and logging.getLogger('asyncio').disabled
