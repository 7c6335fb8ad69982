"""Sampling: what is left to draw from, how often it is drawn, and that a source is drawn by its number alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.inference.predictor import compile_beam_search, compile_search
from attention_jax.tokens import EOS, PAD
from tests.models.helpers import TARGET_WORDS, B, S, build_tiny, build_transformer, inputs
from tests.modules.helpers import assert_same, variables

LOGITS = jnp.log(jnp.asarray([0.4, 0.05, 0.3, 0.15, 0.1]))


@pytest.mark.parametrize(
  ('options', 'kept'),
  [
    ({}, [0, 1, 2, 3, 4]),
    ({'top_k': 2}, [0, 2]),
    ({'top_k': 9}, [0, 1, 2, 3, 4]),
    ({'top_p': 0.39}, [0]),
    ({'top_p': 0.69}, [0, 2]),
    ({'top_p': 0.75}, [0, 2, 3]),
    ({'min_p': 0.3}, [0, 2, 3]),
    ({'min_p': 1.0}, [0]),
    ({'top_k': 3, 'top_p': 0.5}, [0, 2]),
    ({'temperature': 0.1, 'top_p': 0.9}, [0]),
    ({'temperature': 9.0, 'min_p': 0.3}, [0, 1, 2, 3, 4]),
  ],
)
def test_what_is_left(options, kept):
  left = Sampling(**options).filter_logits(LOGITS)
  assert np.flatnonzero(left > -np.inf).tolist() == kept
  np.testing.assert_allclose(left[jnp.asarray(kept)], LOGITS[jnp.asarray(kept)] / options.get('temperature', 1.0))


def draws(model, params, given, sampling, seed=0, numbers=None):
  source, mask, _ = given
  rows = jnp.arange(B) if numbers is None else jnp.asarray(numbers)
  run = compile_search(model, sampling, 4, DEFAULT_RANKING)
  return jax.device_get(run(params['params'], source, mask, (jnp.full((B,), seed), rows)))


def test_tokens_come_as_often_as_they_are_likely():
  model, given = build_tiny('bahdanau'), inputs()
  params = variables(model, *given, scale=2.0)
  found = draws(model, params, given, Sampling(samples=3000, temperature=0.7))
  first = model.apply(params, *given).logits[:, 0]  # after BOS
  first = first.at[:, :EOS].set(-jnp.inf)  # neither PAD nor BOS may come
  expected = jax.nn.softmax(first / 0.7)
  for b in range(B):
    often = np.bincount(found.tokens[b, :, 0], minlength=TARGET_WORDS) / 3000
    np.testing.assert_allclose(often, expected[b], atol=0.03)


@pytest.mark.parametrize('build', [build_tiny, build_transformer])
def test_log_probabilities_are_the_models_own(build):
  model, given = build(), inputs()
  params = variables(model, *given)
  found = draws(model, params, given, Sampling(samples=2, temperature=3.0))
  for k in range(2):
    log_probs = jax.nn.log_softmax(model.apply(params, given[0], given[1], jnp.asarray(found.tokens[:, k])).logits)
    chosen = jnp.take_along_axis(log_probs, jnp.asarray(found.tokens[:, k, :, None]), -1)[..., 0]
    total = jnp.where(found.tokens[:, k] != PAD, chosen, 0.0).sum(-1)
    np.testing.assert_allclose(found.log_probs[:, k], total, rtol=1e-4, atol=1e-5)
  ends = np.take_along_axis(found.tokens, found.lengths[..., None] - 1, -1)
  assert np.all(ends == EOS) and found.weights.shape == (B, 2, 4, S)


def test_the_likeliest_alone_is_greedy_search():
  model, given = build_tiny('luong'), inputs()
  params = variables(model, *given, scale=2.0)
  greedy = compile_beam_search(model, 1, 4)(params['params'], *given[:2])
  np.testing.assert_array_equal(draws(model, params, given, Sampling(top_k=1)).tokens, greedy.tokens)


def test_a_source_is_drawn_by_seed_and_number_whatever_stands_beside_it():
  model, (source, mask, target) = build_tiny('bahdanau'), inputs()
  params, sampling = variables(model, source, mask, target), Sampling(samples=4)
  found = draws(model, params, (source, mask, target), sampling)
  order = jnp.asarray([2, 0, 1])
  moved = draws(model, params, (source[order], mask[order], target), sampling, numbers=order)
  assert_same(moved.tokens, found.tokens[np.asarray(order)])
  assert np.any(draws(model, params, (source, mask, target), sampling, seed=1).tokens != found.tokens)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'samples': 0}, 'samples=0; possible: 1 or more'),
    ({'temperature': 0.0}, 'temperature=0.0; possible: 0.001 or more, and finite'),
    ({'seed': 2**31}, 'seed=2147483648; possible: from 0 to 2147483647'),
    ({'top_k': -1}, 'top_k=-1; possible: 0 or more'),
    ({'top_p': 0.0}, 'top_p=0.0; possible: greater than 0, up to 1'),
    ({'min_p': 1.5}, 'min_p=1.5; possible: from 0 to 1'),
  ],
)
def test_mistakes_are_named(options, message):
  with pytest.raises(UserError, match=message):
    Sampling(**options)
