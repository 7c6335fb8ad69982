"""Models with a latent alignment: the probability of an output is the marginal over all source positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.latent import chain_log_marginal
from attention_jax.tokens import UNK
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, T, build_tiny, with_params
from tests.modules.helpers import assert_close, assert_same

FULL_MASK = jnp.ones((B, T), bool)
CELLS = [('luong', 'rnn="gru", input_feeding=False'), ('luong', 'rnn="lstm"'), ('bahdanau', 'rnn="gru"')]


@pytest.mark.long
@pytest.mark.parametrize('cell', CELLS)
def test_output_is_the_marginal_and_posterior_is_monotonic(cell):
  model = build_tiny(*cell, alignment='latent_monotonic')
  params, args = with_params(model)
  outputs = jax.jit(model.apply)(params, *args)
  chosen = jnp.take_along_axis(outputs.logits, args[2][..., None], -1)[..., 0].sum(-1)
  scores = outputs.state.scores[:, :, 0]
  np.testing.assert_allclose(chosen, jax.jit(jax.vmap(chain_log_marginal))(scores, outputs.likelihood), rtol=1e-4)
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones((B, T)), rtol=1e-4)

  posterior = np.asarray(jax.jit(model.posterior)(outputs, FULL_MASK))
  np.testing.assert_allclose(posterior.sum(-1), np.ones((B, T)), rtol=1e-4)
  cumulative = np.cumsum(posterior, -1)
  assert np.all(np.diff(cumulative, axis=1) < 1e-4), 'the position must not move back'
  for b, length in enumerate(LENGTHS):
    assert np.all(posterior[b, :, length:] == 0)
  assert np.any(np.abs(posterior - np.asarray(outputs.weights)) > 1e-2)


@pytest.mark.long
def test_order_zero_posterior_is_prior_times_likelihood():
  model = build_tiny('bahdanau', 'rnn="gru"', alignment='latent')
  params, args = with_params(model)
  outputs = jax.jit(model.apply)(params, *args)
  joint = outputs.weights * jnp.exp(outputs.likelihood)
  np.testing.assert_allclose(
    model.posterior(outputs, FULL_MASK), joint / joint.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6
  )
  chosen = jnp.take_along_axis(outputs.logits, args[2][..., None], -1)[..., 0]
  np.testing.assert_allclose(chosen, jnp.log(joint.sum(-1)), rtol=1e-4, atol=1e-5)


def test_posterior_is_independent_of_tokens_after_the_end():
  model = build_tiny('luong', 'rnn="gru", input_feeding=False', alignment='latent_monotonic')
  params, (source, mask, target) = with_params(model)
  target_mask = FULL_MASK.at[:, 3:].set(False)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  changed = run(params, source, mask, target.at[:, 3:].set(0))
  posterior_of = jax.jit(model.posterior)
  posterior = np.asarray(posterior_of(outputs, target_mask))
  np.testing.assert_allclose(posterior_of(changed, target_mask), posterior, rtol=1e-4, atol=1e-6)
  assert np.all(posterior[:, 3:] == 0)
  unmasked_posterior = np.asarray(posterior_of(outputs, FULL_MASK))
  assert np.any(np.abs(posterior - unmasked_posterior)[:, :3] > 1e-3)


@pytest.mark.long
def test_out_of_vocabulary_words_of_the_target_are_unknown():
  model = build_tiny('bahdanau', 'rnn="gru"', alignment='latent_monotonic')
  params, (source, mask, target) = with_params(model)

  @jax.jit
  def run(id):
    tokens = target.at[0, 1].set(id)
    carry, memory = model.apply(params, source, mask, T, method='start')
    steps = []
    for t in range(2):
      carry, outputs = model.apply(params, carry, tokens[:, t], memory, method='step')
      steps.append(outputs.logits)
    return model.apply(params, source, mask, tokens)._replace(linear=()), steps

  assert_close(run(TARGET_WORDS + 2), run(UNK))


@pytest.mark.long
def test_posterior_without_latent_alignment_is_the_weights():
  model = build_tiny('bahdanau', 'rnn="gru"')
  params, args = with_params(model)
  outputs = jax.jit(model.apply)(params, *args)
  assert model.posterior(outputs, FULL_MASK) is outputs.weights and outputs.likelihood == ()


def test_only_latent_alignments_observe_and_one_of_order_zero_keeps_its_carry():
  latent, other = (aj.Attention('dot', name).bind({}) for name in ('latent', 'softmax'))
  carry = latent.init_carry(latent.remember(jnp.ones((2, 3, 4)), jnp.ones((2, 3), bool)))
  assert_same(latent.observe(carry, jnp.zeros((2, 3))), carry)
  with pytest.raises(aj.UserError, match="observe needs a latent alignment, such as latent_monotonic, got 'softmax'"):
    other.observe(carry, jnp.zeros((2, 3)))
