"""PRNG keys that are arguments of attention."""

import jax
import pytest

from attention_jax.errors import UserError
from attention_jax.functional.params import init_params
from attention_jax.functional.rngs import check_rng, split_rng


def test_prng_keys_and_none_are_accepted_and_other_values_raise():
  for rng in (None, jax.random.key(0), jax.random.PRNGKey(0)):
    check_rng('attend', rng)
  for rng in (3, 'key'):
    with pytest.raises(UserError, match=r'^attend: rng must be a single PRNG key, such as jax.random.key\(0\), got '):
      check_rng('attend', rng)


def test_initial_parameters_need_a_key():
  with pytest.raises(UserError, match=r'^init_params: rng must be a single PRNG key, such as .*, got None'):
    init_params(None, score='additive', query=3, key=3, features=4)


def test_every_query_has_a_prng_key_of_its_own():
  assert split_rng(None, 3) is None
  keys = jax.random.key_data(split_rng(jax.random.key(1), 3))
  assert len({tuple(key) for key in keys.tolist()}) == 3
