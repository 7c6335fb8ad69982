"""Weights in safetensors files: an exact round trip, and one line for every mismatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.parameter_files import flatten_names, load_weights, read_arrays, read_metadata, save_weights


@pytest.fixture
def params():
  module = aj.Attention('additive', 'softmax', features=6, heads=2)
  memory = jnp.ones((1, 3, 5)), jnp.ones((1, 3), bool)
  return module.init(jax.random.key(0), *memory, method=attend_once)['params']


def attend_once(module, encoded, mask):
  return module.parallel(jnp.ones((1, 2, 4)), module.remember(encoded, mask))


@pytest.mark.long
def test_a_round_trip_is_exact(params, tmp_path):
  path = tmp_path / 'a.safetensors'
  save_weights(params, path, {'steps': '7'})
  loaded = load_weights(path, jax.eval_shape(lambda: params))
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert read_metadata(path) == {'steps': '7'}


@pytest.mark.long
def test_a_round_trip_keeps_scalars_and_16_bit_numbers(tmp_path):
  path = tmp_path / 'a.safetensors'
  params = aj.init_params(jax.random.key(0), score='normed_additive', query=4, key=5, features=6)
  params = {'float32': params, 'bfloat16': jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)}
  save_weights(params, path)
  loaded = load_weights(path, params)
  assert loaded['float32']['score']['gain'].shape == ()
  assert jax.tree.map(lambda x: x.dtype, loaded) == jax.tree.map(lambda x: x.dtype, params)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_the_home_folder_is_expanded(params, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  save_weights(params, tmp_path / 'a.safetensors', {'steps': '7'})
  assert read_arrays('~/a.safetensors').keys() == flatten_names(params).keys()
  assert read_metadata('~/a.safetensors') == {'steps': '7'}


def test_names_are_paths(params):
  assert flatten_names(params).keys() == {
    'join.kernel',
    'key_kernel.kernel',
    'query_kernel.kernel',
    'score_params.v',
    'value_kernel.kernel',
  }


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda p: p | {'join': {}}, '1 of 5 weights are missing: join.kernel'),
    (lambda p: p | {'more': {'a': np.ones(1), 'b': np.ones(1)}}, '2 names are not of this model: more.a, more.b'),
    (lambda p: p | {'join': {'kernel': np.ones((6, 5))}}, r'join.kernel must be \[6, 6\], got \[6, 5\]'),
  ],
)
def test_mismatches_are_named_in_one_line(change, message, params, tmp_path):
  path = tmp_path / 'a.safetensors'
  save_weights(change(params), path)
  with pytest.raises(aj.UserError, match=f'^{path}: {message}$'):
    load_weights(path, params)


def test_unreadable_files_are_named(params, tmp_path):
  path = tmp_path / 'a.safetensors'
  with pytest.raises(aj.UserError, match=f'^{path}: cannot be read'):
    load_weights(path, params)
  path.write_bytes(b'no safetensors')
  with pytest.raises(aj.UserError, match=f'^{path}: not a safetensors file, or damaged'):
    load_weights(path, params)
