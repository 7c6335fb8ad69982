"""Sampling: filters, frequencies of tokens, and samples that depend on the seed and the number of a source alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding.compiled_search import compile_search
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.tokens import EOS
from tests.models.helpers import TARGET_WORDS, B, build_tiny, inputs
from tests.modules.helpers import assert_same, variables

LOGITS = jnp.log(jnp.asarray([0.4, 0.05, 0.3, 0.15, 0.1]))


@pytest.mark.long
@pytest.mark.parametrize(
  ('options', 'expected'),
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
  ids=str,
)
def test_filters_keep_the_expected_tokens(options, expected):
  filtered = Sampling(**options).filter_logits(LOGITS)
  assert np.flatnonzero(filtered > -np.inf).tolist() == expected
  ids = jnp.asarray(expected)
  np.testing.assert_allclose(filtered[ids], LOGITS[ids] / options.get('temperature', 1.0))


@pytest.mark.parametrize(
  'options', [{'top_p': 0.9}, {'top_p': 0.99}, {'top_k': 40}, {'top_k': 7, 'top_p': 0.6}], ids=str
)
def test_filters_of_a_large_vocabulary_equal_those_of_sorted_probabilities(options):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(3, 2, 500), scale=3.0).astype(np.float32)
  logits[0, 0, rng.integers(0, 500, 100)] = -np.inf
  logits[1] = 0.0  # all are equally likely: every token is as likely as the last one of the nucleus
  logits[2, :, 1:] -= 1e6
  filtered = jax.jit(Sampling(**options).filter_logits)(logits)
  descending = np.sort(logits.astype(np.float64), axis=-1)[..., ::-1]
  probs = np.exp(descending - descending[..., :1])
  probs /= probs.sum(-1, keepdims=True)
  kept = (np.cumsum(probs, -1) - probs < options.get('top_p', 2)) & (np.arange(500) < options.get('top_k', 500))
  lowest = np.where(kept, descending, np.inf).min(-1, keepdims=True)
  np.testing.assert_array_equal(filtered, np.where(logits >= lowest, logits, -np.inf))


@pytest.mark.long
@pytest.mark.parametrize('masked', [-1e9, -1e20, float(np.finfo(np.float32).min), -np.inf], ids=str)
@pytest.mark.parametrize('offset', [0.0, -1e9], ids=str)
def test_a_nucleus_does_not_depend_on_the_logits_of_masked_tokens(masked, offset):
  logits = offset + 1e3 * LOGITS if offset else LOGITS
  filtered = Sampling(top_p=0.75).filter_logits(jnp.append(logits, masked + offset))
  assert np.flatnonzero(filtered > -np.inf).tolist() == ([0] if offset else [0, 2, 3])


def draw_samples(model, params, model_inputs, sampling, seed=0, numbers=None):
  source, mask, _ = model_inputs
  numbers = jnp.arange(B) if numbers is None else jnp.asarray(numbers)
  run = compile_search(model, sampling, 4, DEFAULT_RANKING)
  return jax.device_get(run(params['params'], source, mask, (jnp.full((B,), seed), numbers)))


@pytest.mark.long
def test_first_tokens_are_as_frequent_as_they_are_likely():
  model = build_tiny('bahdanau')
  model_inputs = inputs()
  params = variables(model, *model_inputs, scale=2.0)
  hypotheses = draw_samples(model, params, model_inputs, Sampling(samples=3000, temperature=0.7))
  logits = jax.jit(model.apply)(params, *model_inputs).logits[:, 0]  # after BOS
  logits = logits.at[:, :EOS].set(-jnp.inf)  # PAD and BOS are never emitted
  expected = jax.nn.softmax(logits / 0.7)
  for b in range(B):
    frequencies = np.bincount(hypotheses.tokens[b, :, 0], minlength=TARGET_WORDS) / 3000
    np.testing.assert_allclose(frequencies, expected[b], atol=0.03)


@pytest.mark.long
def test_samples_depend_on_the_seed_and_on_the_number_of_the_source_alone():
  model = build_tiny('bahdanau')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  sampling = Sampling(samples=4)
  original = draw_samples(model, params, (source, mask, target), sampling)
  order = jnp.asarray([2, 0, 1])
  permuted = draw_samples(model, params, (source[order], mask[order], target), sampling, numbers=order)
  assert_same(permuted.tokens, original.tokens[np.asarray(order)])
  other_numbers = draw_samples(model, params, (source, mask, target), sampling, numbers=order)
  assert np.any(other_numbers.tokens != original.tokens)
  other_seed = draw_samples(model, params, (source, mask, target), sampling, seed=1)
  assert np.any(other_seed.tokens != original.tokens)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'samples': 0}, 'sampling.samples must be at least 1 and at most 10000, got 0'),
    ({'temperature': 0.0}, 'sampling.temperature must be at least 0.001 and at most 1000000.0, got 0.0'),
    ({'seed': 2**31}, 'sampling.seed must be at least 0 and at most 2147483647, got 2147483648'),
    ({'top_k': -1}, 'sampling.top_k must be at least 0, got -1'),
    ({'top_p': 0.0}, 'sampling.top_p must be greater than 0 and at most 1, got 0.0'),
    ({'min_p': 1.5}, 'sampling.min_p must be at least 0 and at most 1, got 1.5'),
  ],
)
def test_options_out_of_range_raise(options, message):
  with pytest.raises(UserError, match=message):
    Sampling(**options)
