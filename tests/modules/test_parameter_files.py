"""Weights in safetensors files: an exact round trip, and one line for every mismatch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.parameter_files import flatten_names, load_weights, read_arrays, read_metadata, save_weights
from tests.modules.helpers import attend_all


@pytest.fixture
def params():
  module = aj.Attention('additive', 'softmax', features=6, heads=2)
  return module.init(jax.random.key(0), jnp.ones((1, 2, 4)), jnp.ones((1, 3, 5)), None, method=attend_all)['params']


@pytest.mark.long
def test_a_round_trip_is_exact_and_keeps_scalars_and_16_bit_numbers(params, tmp_path):
  path = tmp_path / 'a.safetensors'
  of_scalar = aj.init_params(jax.random.key(0), score='normed_additive', query=4, key=5, features=6)
  assert of_scalar['score']['gain'].shape == ()
  params = {'a': params, 'float32': of_scalar, 'bfloat16': jax.tree.map(lambda x: x.astype(jnp.bfloat16), of_scalar)}
  save_weights(params, path, {'steps': '7'})
  loaded = load_weights(path, jax.eval_shape(lambda: params))
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), loaded, params)
  assert read_metadata(path) == {'steps': '7'}


def test_names_are_paths_and_the_home_folder_is_expanded(params, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  save_weights(params, tmp_path / 'a.safetensors', {'steps': '7'})
  kernels = {f'{name}.kernel' for name in ('join', 'key_kernel', 'query_kernel', 'value_kernel')}
  assert read_arrays('~/a.safetensors').keys() == flatten_names(params).keys() == kernels | {'score_params.v'}
  assert read_metadata('~/a.safetensors') == {'steps': '7'}


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
