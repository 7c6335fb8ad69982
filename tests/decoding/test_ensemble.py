"""Ensembles, and prefix-constrained decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, PAD, UNK
from tests.models.helpers import TARGET_WORDS, B, build_tiny, build_transformer, inputs
from tests.modules.helpers import assert_close, variables

INPUTS = inputs()
PREFIX = jnp.asarray([[5, 7, 4], [6, PAD, PAD], [PAD, PAD, PAD]])


def two_models():
  models = (build_tiny('bahdanau', 'rnn="gru"'), build_transformer())
  params = tuple(variables(model, *INPUTS, seed=i, scale=2.0)['params'] for i, model in enumerate(models))
  return models, params


@pytest.mark.long
def test_outputs_are_the_mean_over_models():
  models, params = two_models()
  outputs = jax.jit(Ensemble(models).apply)({'params': params}, *INPUTS)
  by_model = [
    jax.jit(model.apply)({'params': model_params}, *INPUTS) for model, model_params in zip(models, params, strict=True)
  ]
  expected = sum(np.asarray(jax.nn.softmax(model_outputs.logits)) for model_outputs in by_model) / 2
  assert_close(jnp.exp(outputs.logits), expected, rtol=1e-4)
  assert_close(outputs.weights, (by_model[0].weights + by_model[1].weights) / 2)


@pytest.mark.long
def test_weights_of_models_without_attention_do_not_count():
  model = two_models()[0][0]
  plain = build_tiny('plain', 'rnn="gru"')
  params = tuple(variables(member, *INPUTS, scale=2.0)['params'] for member in (plain, model))
  ensemble = Ensemble([plain, model])
  assert ensemble.traits.attends
  expected = jax.jit(model.apply)({'params': params[1]}, *INPUTS).weights
  outputs = jax.jit(ensemble.apply)({'params': params}, *INPUTS)
  assert_close(outputs.weights, expected)
  assert_close(ensemble.posterior(outputs, np.ones(INPUTS[2].shape, bool)), expected)
  assert not np.any(jax.jit(Ensemble([plain] * 2).apply)({'params': params[:1] * 2}, *INPUTS).weights)


@pytest.mark.long
def test_stepping_equals_the_call_over_all_steps():
  models, params = two_models()
  ensemble = Ensemble(models)
  target = INPUTS[2]
  outputs = jax.jit(ensemble.apply)({'params': params}, *INPUTS)

  def start(params):
    return ensemble.apply({'params': params}, *INPUTS[:2], target.shape[1], method='start')

  carry, memory = jax.jit(start)(params)
  step = jax.jit(lambda carry, token: ensemble.apply({'params': params}, carry, token, memory, method='step'))
  token = jnp.full((B,), 1)
  for t in range(target.shape[1]):
    carry, step_outputs = step(carry, token)
    assert_close(step_outputs.logits, outputs.logits[:, t], rtol=1e-4, atol=1e-4)
    assert_close(step_outputs.weights, outputs.weights[:, t], rtol=1e-4, atol=1e-4)
    token = target[:, t]


@pytest.mark.parametrize(
  ('cell', 'alignment', 'constraints'),
  [
    pytest.param('bahdanau', 'softmax', NO_CONSTRAINTS, marks=pytest.mark.long),
    pytest.param('bahdanau', 'softmax', Constraints(no_repeat_ngram_size=1, min_length=2), marks=pytest.mark.long),
    ('luong', 'latent', NO_CONSTRAINTS),
  ],
)
def test_an_ensemble_of_one_model_twice_equals_the_model(cell, alignment, constraints):
  model = build_tiny(cell, 'rnn="gru"', alignment=alignment)
  params = variables(model, *INPUTS, scale=2.0)['params']
  single, ensembled = (
    compile_search(searched, BeamSearch(3), 5, DEFAULT_RANKING, constraints=constraints)(its_params, *INPUTS[:2])
    for searched, its_params in ((model, params), (Ensemble([model] * 2), (params,) * 2))
  )
  np.testing.assert_array_equal(ensembled.tokens, single.tokens)
  assert_close(ensembled.log_probs, single.log_probs, rtol=1e-4)
  assert_close(ensembled.weights, single.weights, rtol=1e-3, atol=1e-5)


def test_an_ensemble_in_which_only_some_models_copy_raises():
  models = [build_tiny(sizes=(11, 11), output=output) for output in ('vocabulary', 'pointer')]
  with pytest.raises(UserError, match='all models must copy or none, got 1 of 2 models that copy'):
    Ensemble(models)


@pytest.mark.long
@pytest.mark.parametrize(
  'strategy',
  [
    pytest.param(BeamSearch(1), marks=pytest.mark.long),
    pytest.param(BeamSearch(4), marks=pytest.mark.long),
    BeamSearch(4, groups=2),
    pytest.param(Sampling(samples=3), marks=pytest.mark.long),
  ],
  ids=['one_beam', 'four_beams', 'two_groups', 'sampling'],
)
def test_hypotheses_begin_with_their_prefix_and_are_scored_by_the_tokens_after_it(strategy):
  model = build_tiny('luong', 'rnn="gru"')
  params = variables(model, *INPUTS, scale=2.0)
  rng_inputs = (jnp.zeros((B,), jnp.int32), jnp.arange(B)) if isinstance(strategy, Sampling) else None
  search = compile_search(model, strategy, 6, DEFAULT_RANKING)
  hypotheses = search(params['params'], *INPUTS[:2], rng_inputs, PREFIX)
  count = hypotheses.tokens.shape[1]
  score = jax.jit(lambda tokens: jax.nn.log_softmax(model.apply(params, *INPUTS[:2], tokens).logits))
  forced = [np.asarray(score(hypotheses.tokens[:, k])) for k in range(count)]
  for b in range(B):
    prefix = [id for id in PREFIX[b].tolist() if id != PAD]
    for k in range(count):
      tokens = hypotheses.tokens[b, k].tolist()
      length = int(hypotheses.lengths[b, k])
      assert tokens[: len(prefix)] == prefix and tokens[length - 1] == EOS
      expected = sum(forced[k][b, t, tokens[t]] for t in range(len(prefix), length))
      np.testing.assert_allclose(hypotheses.log_probs[b, k], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_copy_ids_of_a_prefix_become_unk_for_a_model_that_does_not_copy():
  model = build_tiny('luong', 'rnn="gru"')
  params = variables(model, *INPUTS)
  prefix = jnp.full((B, 1), TARGET_WORDS + 2)
  search = compile_search(model, BeamSearch(1), 4, DEFAULT_RANKING)
  hypotheses = search(params['params'], *INPUTS[:2], None, prefix)
  assert np.all(hypotheses.tokens[:, 0, 0] == UNK)
