"""Configs that need more memory than there is are reported before anything is allocated, with the bytes."""

import dataclasses
import types

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


def test_the_available_memory_of_this_machine_is_plausible():
  assert 2**28 < size_checks.available_bytes() < 2**50


def test_the_memory_of_several_processes_is_added_up(monkeypatch):
  single = size_checks.available_bytes()
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert size_checks.available_bytes() == 2 * single


@pytest.mark.parametrize(('average', 'rows', 'is_valid'), [(0.0, 62, True), (0.0, 63, False), (0.9, 61, False)])
def test_a_state_larger_than_the_memory_raises(config, average, rows, is_valid):
  """Memory holds parameters, gradients, two more arrays of Adam, and counters of 4 bytes of Adam and the schedule."""
  training = dataclasses.replace(config.training, average=average, optimizer='adam')
  config = dataclasses.replace(config, training=training)
  params = {'embedding': jax.ShapeDtypeStruct((rows,), jnp.float32)}
  if is_valid:
    size_checks.check_state_memory(config, params)
  else:
    message = r'need at least 1,\d+ bytes .* the largest array is embedding \[6\d\]; lower the sizes of config.model'
    with pytest.raises(UserError, match=message):
      size_checks.check_state_memory(config, params)


def test_a_batch_larger_than_the_memory_raises(config):
  """A position has an id of 4 bytes and a mask of 1 byte."""
  shapes = [(5, 10, 10), (10, 10, 10), (10, 10, 11)]
  batches = types.SimpleNamespace(
    shapes=shapes, shape_names=Batches.shape_names, min_row_positions=Batches.min_row_positions
  )
  message = r'\(rows, source, target\) \(10, 10, 11\) needs at least 1,050 bytes .*; lower config.data.batch_size or'
  with pytest.raises(UserError, match=message):
    size_checks.check_batch_memory(config, batches)
  batches.shapes.pop()
  size_checks.check_batch_memory(config, batches)
  batches.shapes.append((3, 70, 1))  # fewer pairs of positions than (10, 10, 10), but more ids
  with pytest.raises(UserError, match=r'\(3, 70, 1\) needs at least 1,065 bytes'):
    size_checks.check_batch_memory(config, batches)


def test_batches_of_documents_have_ids_of_every_word_of_every_sentence(config):
  document = EncodedDocuments(np.ones(1, np.int32), np.array([0, 1]), np.array([0, 1]), np.zeros(1, np.int32), 0)
  size_checks.check_batch_memory(config, DocumentBatches(document, [(10, 10)], 2))
  with pytest.raises(UserError, match=r'\(rows, sentences, words\) \(3, 10, 10\) needs at least 1,500 bytes'):
    size_checks.check_batch_memory(config, DocumentBatches(document, [(10, 10)], 3))
