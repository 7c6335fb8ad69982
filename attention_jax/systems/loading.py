"""Loading a system in several processes that train together: vocabularies are made once, and configs are compared."""

import tempfile
from pathlib import Path

import jax

from attention_jax.systems.base import System
from attention_jax.systems.config import RunConfig, flatten_config
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training import peers


def comparable_fields(config: RunConfig) -> dict[str, str]:
  """Returns the fields of a config as text, by dotted name, as peers.check_agreement compares them."""
  return {f'config.{name}': repr(value) for name, value in flatten_config(config).items()}


def load_once(config: RunConfig, folder: str | None, initial: System | None = None) -> System:
  """Loads a system so that of several processes only the first one makes vocabularies; the others receive its files.

  Args:
    config: the whole config of the run.
    folder: a run folder whose stored vocabularies are used; None for a new run.
    initial: a system whose vocabularies a new run uses.

  Raises:
    UserError: in every process, if loading fails in any of them.
  """
  load = SYSTEMS[config.system].load
  if not initial and (folder or jax.process_count() == 1):
    with peers.fail_together():
      return load(config, folder)
  with tempfile.TemporaryDirectory() as files:
    system = None
    with peers.fail_together():
      if initial:
        initial.save(files)
      elif jax.process_index() == 0:
        system = load(config, None)
        system.save(files)
    if not initial:
      peers.copy_from_first(Path(files))
    with peers.fail_together():
      return system or load(config, files)
