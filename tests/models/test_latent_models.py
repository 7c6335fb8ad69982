"""Models with a latent alignment: what they say of an output is the sum over all positions it may be read at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.latent import chain_log_marginal
from tests.models.helpers import LENGTHS, B, T, build_tiny, inputs
from tests.modules.helpers import variables

ALL = jnp.ones((B, T), bool)
CELLS = [('luong', 'rnn="gru", input_feeding=False'), ('luong', 'rnn="lstm"'), ('bahdanau', 'rnn="gru"')]


@pytest.mark.parametrize('cell', CELLS)
def test_the_output_is_a_marginal_and_the_posterior_knows_it(cell):
  model = build_tiny(*cell, alignment='latent_monotonic')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  chosen = jnp.take_along_axis(outputs.logits, target[..., None], -1)[..., 0].sum(-1)
  scores = outputs.state.scores[:, :, 0]
  np.testing.assert_allclose(chosen, jax.vmap(chain_log_marginal)(scores, outputs.likelihood), rtol=1e-4)
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones((B, T)), rtol=1e-4)

  posterior = np.asarray(model.posterior(outputs, ALL))
  np.testing.assert_allclose(posterior.sum(-1), np.ones((B, T)), rtol=1e-4)
  expected = np.cumsum(posterior, -1)
  assert np.all(np.diff(expected, axis=1) < 1e-4), 'a position that never moves back'
  for b, length in enumerate(LENGTHS):
    assert np.all(posterior[b, :, length:] == 0)
  assert np.any(np.abs(posterior - np.asarray(outputs.weights)) > 1e-2)


def test_order_zero_posterior_is_prior_times_likelihood():
  model = build_tiny('bahdanau', 'rnn="gru"', alignment='latent')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  joint = outputs.weights * jnp.exp(outputs.likelihood)
  np.testing.assert_allclose(model.posterior(outputs, ALL), joint / joint.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
  chosen = jnp.take_along_axis(outputs.logits, target[..., None], -1)[..., 0]
  np.testing.assert_allclose(chosen, jnp.log(joint.sum(-1)), rtol=1e-4, atol=1e-5)


def test_what_comes_after_the_end_changes_no_posterior():
  model = build_tiny('luong', 'rnn="gru", input_feeding=False', alignment='latent_monotonic')
  source, mask, target = inputs()
  params, real = variables(model, source, mask, target), ALL.at[:, 3:].set(False)
  run = jax.jit(model.apply)
  one, other = (run(params, source, mask, tokens) for tokens in (target, target.at[:, 3:].set(0)))
  found = np.asarray(model.posterior(one, real))
  np.testing.assert_allclose(model.posterior(other, real), found, rtol=1e-4, atol=1e-6)
  assert np.all(found[:, 3:] == 0) and np.any(np.abs(found - np.asarray(model.posterior(one, ALL)))[:, :3] > 1e-3)


def test_what_is_not_latent_has_its_weights_for_a_posterior():
  model = build_tiny('bahdanau', 'rnn="gru"')
  source, mask, target = inputs()
  outputs = jax.jit(model.apply)(variables(model, source, mask, target), source, mask, target)
  assert model.posterior(outputs, ALL) is outputs.weights and outputs.likelihood == ()
