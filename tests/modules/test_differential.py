"""Differential attention against a literal loop over pairs of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.encoders import TransformerEncoder
from attention_jax.modules.differential import EPSILON, INITIAL_LAMBDA, lambda_of_layer
from tests.modules.helpers import assert_close, draw
from tests.modules.test_attention import ENCODED, LENGTHS, MASK, QUERY, B, S, T, parameters, run_both_ways

FEATURES = 12
HEADS = 4


@pytest.mark.long
@pytest.mark.parametrize('fields', [{}, {'gate': True}, {'bias': True}])
def test_differences_of_pairs_of_softmaxes_are_normalised_and_joined(fields):
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, HEADS, differential=True, **fields)
  query, encoded = draw(B, T, QUERY), draw(B, S, ENCODED)
  params = parameters(module, query, encoded)
  attended, stepped = run_both_ways(module, params, query, encoded, MASK)
  assert_close(stepped, attended)
  assert attended.weights.shape == (B, HEADS, T, S)

  learned, query, encoded = jax.tree.map(lambda x: np.asarray(x, np.float64), (params['params'], query, encoded))

  def project(x, name, n):
    return x @ learned[name]['kernel'][n] + learned[name].get('bias', np.zeros((HEADS, 1)))[n]

  vectors = learned['difference']
  first, second = (np.exp(vectors[f'query_{i}'] @ vectors[f'key_{i}']) for i in (1, 2))
  for b, length in enumerate(LENGTHS):
    for t in range(T):
      parts = []
      for pair in range(HEADS // 2):
        weights = []
        for n in (2 * pair, 2 * pair + 1):
          scores = project(encoded[b, :length], 'key_kernel', n) @ project(query[b, t], 'query_kernel', n)
          exponentials = np.exp(scores / np.sqrt(FEATURES / HEADS))
          weights.append(exponentials / exponentials.sum())
          np.testing.assert_allclose(attended.weights[b, n, t, :length], weights[-1], rtol=1e-4, atol=1e-5)
        weight = weights[0] - (first - second + INITIAL_LAMBDA) * weights[1]
        part = weight @ project(encoded[b, :length], 'value_kernel', pair)
        part = part / np.sqrt(np.mean(part**2) + EPSILON) * vectors['norm']['scale'] * (1 - INITIAL_LAMBDA)
        if module.gate:
          part = part / (1 + np.exp(-project(query[b, t], 'gate_kernel', pair)))
        parts.append(part)
      joined = np.concatenate(parts) @ learned['join']['kernel'] + learned['join'].get('bias', 0.0)
      np.testing.assert_allclose(attended.context[b, t], joined, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'heads': 3}, 'expected even heads and kv_heads=0, got heads=3 and kv_heads=0'),
    ({'heads': 4, 'kv_heads': 1}, 'kv_heads must be even, .* got heads=4 and kv_heads=1'),
  ],
)
def test_heads_without_a_partner_are_an_error(fields, message):
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, differential=True, **fields)
  with pytest.raises(aj.UserError, match=message):
    parameters(module, draw(B, T, QUERY), draw(B, S, ENCODED))


@pytest.mark.long
def test_heads_that_share_keys_are_paired_over_two_keys():
  """The first heads of the pairs read keys 0 and 2, their partners keys 1 and 3; each pair of keys has one value."""
  options = {'features': FEATURES, 'heads': 8, 'differential': True, 'head_dim': 3, 'initial_lambda': 0.2}
  shared = aj.Attention('scaled_dot', 'softmax', kv_heads=4, **options)
  query, encoded = draw(B, T, QUERY), draw(B, S, ENCODED)
  params = parameters(shared, query, encoded)
  learned = params['params']
  attended, stepped = run_both_ways(shared, params, query, encoded, MASK)
  assert_close(stepped, attended)
  # The same with a key for each head, whose heads are in the order of pairs.
  order = jnp.array([0, 2, 1, 3, 4, 6, 5, 7])
  kernels = {
    'query_kernel': learned['query_kernel']['kernel'][order],
    'key_kernel': jnp.repeat(learned['key_kernel']['kernel'], 2, 0)[order],
    'value_kernel': jnp.repeat(learned['value_kernel']['kernel'], 2, 0),
  }
  unshared = {'params': learned | {name: {'kernel': kernel} for name, kernel in kernels.items()}}
  expected, _ = run_both_ways(aj.Attention('scaled_dot', 'softmax', **options), unshared, query, encoded, MASK)
  assert_close(attended.context, expected.context)
  assert_close(attended.weights[:, order], expected.weights)


def test_lambda_may_depend_on_the_layer():
  np.testing.assert_allclose([lambda_of_layer(layer) for layer in (1, 2, 12)], [0.2, 0.3555, 0.7779], atol=1e-4)

  def lambdas(**options):
    encoder = TransformerEncoder(embedding=None, differential=True, layers=3, **options).bind({})
    return [block.attention.initial_lambda for block in encoder.blocks]

  assert lambdas() == [INITIAL_LAMBDA] * 3
  assert lambdas(lambda_by_layer=True) == [lambda_of_layer(layer) for layer in (1, 2, 3)]
