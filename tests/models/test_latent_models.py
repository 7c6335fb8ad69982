"""Models with a latent alignment: their probabilities are sums over all positions of the source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.latent import chain_log_marginal
from tests.models.helpers import LENGTHS, B, T, build_tiny, inputs
from tests.modules.helpers import variables

ALL_REAL = jnp.ones((B, T), bool)
CELLS = [('luong', 'rnn="gru", input_feeding=False'), ('luong', 'rnn="lstm"'), ('bahdanau', 'rnn="gru"')]


@pytest.mark.parametrize('cell', CELLS)
def test_log_probs_are_marginal_and_posteriors_are_monotonic(cell):
  model = build_tiny(*cell, alignment='latent_monotonic')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  log_prob = jnp.take_along_axis(outputs.logits, target[..., None], -1)[..., 0].sum(-1)
  scores = outputs.state.scores[:, :, 0]
  np.testing.assert_allclose(log_prob, jax.vmap(chain_log_marginal)(scores, outputs.likelihood), rtol=1e-4)
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones((B, T)), rtol=1e-4)

  posterior = np.asarray(model.posterior(outputs, ALL_REAL))
  np.testing.assert_allclose(posterior.sum(-1), np.ones((B, T)), rtol=1e-4)
  cumulative = np.cumsum(posterior, -1)
  assert np.all(np.diff(cumulative, axis=1) < 1e-4), 'the position moves back'
  for b, length in enumerate(LENGTHS):
    assert np.all(posterior[b, :, length:] == 0)
  assert np.any(np.abs(posterior - np.asarray(outputs.weights)) > 1e-2)


def test_order_zero_posterior_is_proportional_to_prior_times_likelihood():
  model = build_tiny('bahdanau', 'rnn="gru"', alignment='latent')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  joint = outputs.weights * jnp.exp(outputs.likelihood)
  np.testing.assert_allclose(
    model.posterior(outputs, ALL_REAL), joint / joint.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6
  )
  log_prob = jnp.take_along_axis(outputs.logits, target[..., None], -1)[..., 0]
  np.testing.assert_allclose(log_prob, jnp.log(joint.sum(-1)), rtol=1e-4, atol=1e-5)


def test_masked_tokens_do_not_change_the_posterior():
  model = build_tiny('luong', 'rnn="gru", input_feeding=False', alignment='latent_monotonic')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  target_mask = ALL_REAL.at[:, 3:].set(False)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  other_padding = run(params, source, mask, target.at[:, 3:].set(0))
  posterior = np.asarray(model.posterior(outputs, target_mask))
  np.testing.assert_allclose(model.posterior(other_padding, target_mask), posterior, rtol=1e-4, atol=1e-6)
  assert np.all(posterior[:, 3:] == 0)
  assert np.any(np.abs(posterior - np.asarray(model.posterior(outputs, ALL_REAL)))[:, :3] > 1e-3)


def test_the_posterior_of_other_alignments_is_their_weights():
  model = build_tiny('bahdanau', 'rnn="gru"')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  assert model.posterior(outputs, ALL_REAL) is outputs.weights and outputs.likelihood == ()
