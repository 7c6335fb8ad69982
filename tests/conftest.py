"""Settings of all tests: 8 virtual CPU devices, rank promotion raises.

The tests compile hundreds of small programs and run each of them once. They therefore compile without optimisation,
unless XLA_FLAGS is set: `make test-all` compiles with the defaults of XLA, and enforces the jaxtyping annotations
of every call (ENFORCE_ANNOTATIONS), which takes a tenth of the time of the suite. `make test` enforces them in
tests/functional/test_annotations.py only.
"""

import gc
import os
from pathlib import Path

from tests.xla_flags import QUICK_FLAGS

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', QUICK_FLAGS)
os.environ['XLA_FLAGS'] += (
  ' --xla_force_host_platform_device_count=8'
  # On a busy machine the threads of eight devices may take longer than the default of 40 s to reach a collective.
  ' --xla_cpu_collective_call_terminate_timeout_seconds=600'
)
# Number of threads of XLA. By default there is one for each of the eight devices: if all but one wait in a collective
# while the last one is busy with another program, such as a transfer, training stands still.
os.environ.setdefault('NPROC', '24')

import hypothesis
import jax
import pytest

from tests.annotations import enforce_annotations

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_traceback_in_locations_limit', 0)  # lowering is faster without line numbers

# Without a deadline, no example fails because the machine is busy. `make test-all` draws 100 examples.
max_examples = 100 if os.environ.get('ENFORCE_ANNOTATIONS') else 25
hypothesis.settings.register_profile('untimed', deadline=None, max_examples=max_examples)
hypothesis.settings.load_profile('untimed')

# Tracing creates many long-lived objects: with the default thresholds, a tenth of the time goes to cyclic garbage
# collection.
gc.set_threshold(100_000, 50, 100)

if os.environ.get('ENFORCE_ANNOTATIONS'):  # before the first import of the package
  enforce_annotations()


from attention_jax.functional import programs  # noqa: E402 - after the annotations


@pytest.fixture(scope='module', autouse=True)
def clear_large_caches():
  """Clears the caches of jax before the process reaches 65530 memory maps, of which each program needs several."""
  yield
  maps = Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > 20_000:
    jax.clear_caches()


@pytest.fixture
def rng():
  """A PRNG key."""
  return jax.random.key(7)


@pytest.fixture
def restored_tables():
  """Removes the rows that plug-ins add during a test."""
  from attention_jax.data.tasks import TASKS
  from attention_jax.decoding.metrics import METRICS
  from attention_jax.functional.alignments import ALIGNMENTS
  from attention_jax.functional.scores import SCORES
  from attention_jax.models.decoders import DECODERS
  from attention_jax.models.encoders import ENCODERS
  from attention_jax.modules.outputs import OUTPUTS
  from attention_jax.modules.recurrent import RECURRENCES
  from attention_jax.training.optim import OPTIMIZERS
  from attention_jax.training.writers import TRACKERS

  tables = (SCORES, ALIGNMENTS, RECURRENCES, DECODERS, ENCODERS, OUTPUTS, TASKS, METRICS, OPTIMIZERS, TRACKERS)
  initial = [dict(table) for table in tables]
  yield
  for table, rows in zip(tables, initial, strict=True):
    table.clear()
    table.update(rows)


@pytest.fixture(autouse=True)
def programs_of_a_test_that_patches_constants(request):
  """A program that an earlier test has made has the values of its constants, such as the sizes of blocks."""
  patches = 'monkeypatch' in request.fixturenames
  if patches:
    programs.forget_programs()
  yield
  if patches:
    programs.forget_programs()
