"""Configs that need more memory than there is are reported before anything is allocated, with the bytes."""

import dataclasses
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batches
from attention_jax.errors import UserError
from attention_jax.systems import size_checks
from attention_jax.systems.classification.batches import DocumentBatches, EncodedDocuments
from attention_jax.systems.config import default_run_config


@pytest.fixture
def config(monkeypatch):
  monkeypatch.setattr(size_checks, 'available_bytes', lambda: 1000)
  return default_run_config('translation')


def test_the_available_memory_is_that_of_all_processes(monkeypatch):
  single = size_checks.available_bytes()
  assert 2**28 < single < 2**50
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert size_checks.available_bytes() == 2 * single


@pytest.mark.parametrize(('average', 'rows', 'is_valid'), [(0.0, 62, True), (0.0, 63, False), (0.9, 61, False)])
def test_a_state_larger_than_the_memory_raises(config, average, rows, is_valid):
  """Memory holds parameters, gradients, two more arrays of Adam, and counters of 4 bytes of Adam and the schedule."""
  training = dataclasses.replace(config.training, average=average, optimizer='adam')
  params = {'embedding': jax.ShapeDtypeStruct((rows,), jnp.float32)}
  message = r'need at least 1,\d+ bytes .* the largest array is embedding \[6\d\]; lower the sizes of config.model'
  with nullcontext() if is_valid else pytest.raises(UserError, match=message):
    size_checks.check_state_memory(dataclasses.replace(config, training=training), params)


@pytest.mark.parametrize(
  ('shape', 'message'),
  [
    ((10, 10, 10), None),
    ((10, 10, 11), r'\(10, 10, 11\) needs at least 1,050 bytes .*; lower config.data.batch_size or'),
    ((3, 70, 1), r'\(3, 70, 1\) needs at least 1,065 bytes'),  # fewer pairs of positions, but more ids
  ],
)
def test_a_batch_larger_than_the_memory_raises(config, shape, message):
  """A position has an id of 4 bytes and a mask of 1 byte."""
  names = {name: getattr(Batches, name) for name in ('shape_names', 'min_row_positions')}
  batches = types.SimpleNamespace(shapes=[(5, 10, 10), (10, 10, 10), shape], **names)
  with pytest.raises(UserError, match=rf'\(rows, source, target\) {message}') if message else nullcontext():
    size_checks.check_batch_memory(config, batches)


def test_batches_of_documents_have_ids_of_every_word_of_every_sentence(config):
  document = EncodedDocuments(np.ones(1, np.int32), np.array([0, 1]), np.array([0, 1]), np.zeros(1, np.int32), 0)
  size_checks.check_batch_memory(config, DocumentBatches(document, [(10, 10)], 2))
  with pytest.raises(UserError, match=r'\(rows, sentences, words\) \(3, 10, 10\) needs at least 1,500 bytes'):
    size_checks.check_batch_memory(config, DocumentBatches(document, [(10, 10)], 3))
