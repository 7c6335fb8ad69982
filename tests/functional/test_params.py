"""Initial parameters: their shapes, and errors of their sizes. Checks of params: tests/kernels/test_api, test_steps."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax.functional.params import normalize_params

SIZES = {'query': 3, 'key': 5, 'features': 4}


@pytest.mark.long
def test_the_shapes_follow_the_sizes():
  params = aj.init_params(jax.random.key(0), score='additive', **SIZES)
  shapes = jax.tree.map(jnp.shape, params)
  assert shapes == {'score': {'v': (4,)}, 'alignment': {}, 'query': (3, 4), 'key': (5, 4)}
  assert aj.init_params(jax.random.key(0), score='dot', **SIZES) == {'score': {}, 'alignment': {}}


@pytest.mark.parametrize(('name', 'size'), [('query', '4'), ('key', 0), ('features', 2.0), ('value', 0)])
def test_an_invalid_size_raises(name, size):
  with pytest.raises(aj.UserError, match=f'init_params: {name} must be a whole number of at least 1, got {size!r}'):
    aj.init_params(jax.random.key(0), score='additive', **SIZES | {name: size})


def test_missing_entries_become_empty():
  assert normalize_params('attend', None) == {'score': {}, 'alignment': {}}
  assert normalize_params('attend', {'score': {'v': 1}}) == {'score': {'v': 1}, 'alignment': {}}
