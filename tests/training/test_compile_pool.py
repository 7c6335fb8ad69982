"""Updates of later shapes are compiled in threads, each once, in the order of their use."""

import threading

import numpy as np
import pytest

from attention_jax.training.compile_pool import CompilePool


def batch(width):
  return {'source': np.zeros((2, width))}


def test_each_shape_is_compiled_once():
  compiled = []
  with CompilePool(lambda x: compiled.append(x['source'].shape[1]), map(batch, (3, 5, 3))) as pool:
    for width in (3, 5, 7, 3, 7):
      pool.wait(batch(width))
  assert sorted(compiled) == [3, 5, 7]


def test_an_error_of_the_compiler_is_raised_where_the_shape_is_needed():
  def compile_for(x):
    if x['source'].shape[1] == 5:
      raise ValueError('out of memory')

  with CompilePool(compile_for, map(batch, (3, 5))) as pool:
    pool.wait(batch(3))
    with pytest.raises(ValueError, match='out of memory'):
      pool.wait(batch(5))


def test_progress_names_the_shape():
  release = threading.Event()
  with CompilePool(lambda x: release.wait(), map(batch, (3, 5))) as pool:
    while pool.describe() != 'compiling shape 1 of 2':
      pass
    release.set()
    pool.wait(batch(3))
    pool.wait(batch(5))
    assert pool.describe() == ''


def test_several_processes_compile_when_an_update_is_made(monkeypatch):
  monkeypatch.setattr('jax.process_count', lambda: 2)
  with CompilePool(pytest.fail, map(batch, (3,))) as pool:
    pool.wait(batch(3))
