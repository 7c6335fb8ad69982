"""Several models as one, and outputs that begin as they are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.inference.predictor import BeamSearch, compile_search
from attention_jax.tokens import EOS, PAD
from tests.models.helpers import TARGET_WORDS, B, build_tiny, build_transformer, inputs
from tests.modules.helpers import assert_close, variables

GIVEN = inputs()
PREFIX = jnp.asarray([[5, 7, 4], [6, PAD, PAD], [PAD, PAD, PAD]])


def two():
  models = build_tiny('bahdanau', 'rnn="gru"'), build_transformer()
  return models, tuple(variables(model, *GIVEN, seed=i, scale=2.0)['params'] for i, model in enumerate(models))


def test_an_ensemble_says_the_mean_of_what_its_models_say():
  models, params = two()
  each = [model.apply({'params': own}, *GIVEN) for model, own in zip(models, params, strict=True)]
  outputs = Ensemble(models).apply({'params': params}, *GIVEN)
  expected = sum(np.asarray(jax.nn.softmax(one.logits)) for one in each) / 2
  assert_close(jnp.exp(outputs.logits), expected, rtol=1e-4)
  assert_close(outputs.weights, (each[0].weights + each[1].weights) / 2)


def test_what_attends_to_nothing_has_no_say_in_weights():
  model, _ = two()[0]
  plain = build_tiny('plain', 'rnn="gru"')
  params = tuple(variables(one, *GIVEN, scale=2.0)['params'] for one in (plain, model))
  both = Ensemble([plain, model])
  assert both.traits.attends
  assert_close(both.apply({'params': params}, *GIVEN).weights, model.apply({'params': params[1]}, *GIVEN).weights)
  assert not np.any(Ensemble([plain] * 2).apply({'params': params[:1] * 2}, *GIVEN).weights)


def test_steps_of_an_ensemble_are_what_it_says_at_once():
  models, params = two()
  both, target = Ensemble(models), GIVEN[2]
  outputs = both.apply({'params': params}, *GIVEN)
  carry, memory = both.apply({'params': params}, *GIVEN[:2], target.shape[1], method='start')
  step = jax.jit(lambda carry, token: both.apply({'params': params}, carry, token, memory, method='step'))
  token = jnp.full((B,), 1)
  for t in range(target.shape[1]):
    carry, one = step(carry, token)
    assert_close(one.logits, outputs.logits[:, t], rtol=1e-4, atol=1e-4)
    token = target[:, t]


def test_one_model_twice_is_that_model():
  models, params = two()
  alone = compile_search(models[0], BeamSearch(3), 5, DEFAULT_RANKING)(params[0], *GIVEN[:2])
  twice = compile_search(Ensemble([models[0]] * 2), BeamSearch(3), 5, DEFAULT_RANKING)((params[0],) * 2, *GIVEN[:2])
  np.testing.assert_array_equal(twice.tokens, alone.tokens)
  assert_close(twice.log_probs, alone.log_probs, rtol=1e-4)


def test_alignments_of_latent_models_are_told_afterwards():
  model = build_tiny('luong', 'rnn="gru"', alignment='latent')
  params = variables(model, *GIVEN, scale=2.0)['params']
  alone = compile_search(model, BeamSearch(2), 5, DEFAULT_RANKING)(params, *GIVEN[:2])
  twice = compile_search(Ensemble([model] * 2), BeamSearch(2), 5, DEFAULT_RANKING)((params,) * 2, *GIVEN[:2])
  np.testing.assert_array_equal(twice.tokens, alone.tokens)
  assert_close(twice.weights, alone.weights, rtol=1e-3, atol=1e-5)


def test_models_that_copy_and_models_that_do_not_are_no_ensemble():
  of = lambda output: build_tiny(sizes=(11, 11), output=output)
  with pytest.raises(UserError, match='some of the 2 models copy and some do not'):
    Ensemble([of('vocabulary'), of('pointer')])


@pytest.mark.parametrize('how', [BeamSearch(1), BeamSearch(4), BeamSearch(4, groups=2), Sampling(samples=3)])
def test_outputs_begin_with_their_prefix_and_go_on_as_the_model_does(how):
  model, steps = build_tiny('luong', 'rnn="gru"'), 6
  params = variables(model, *GIVEN, scale=2.0)
  drawn = (jnp.zeros((B,), jnp.int32), jnp.arange(B)) if isinstance(how, Sampling) else None
  found = compile_search(model, how, steps, DEFAULT_RANKING)(params['params'], *GIVEN[:2], drawn, PREFIX)
  forced = [model.apply(params, *GIVEN[:2], found.tokens[:, k]) for k in range(found.tokens.shape[1])]
  for b in range(B):
    begun = [id for id in PREFIX[b].tolist() if id != PAD]
    for k in range(found.tokens.shape[1]):
      tokens, length = found.tokens[b, k].tolist(), int(found.lengths[b, k])
      assert tokens[: len(begun)] == begun and tokens[length - 1] == EOS
      log_probs = np.asarray(jax.nn.log_softmax(forced[k].logits[b]))
      rest = sum(log_probs[t, tokens[t]] for t in range(len(begun), length))
      np.testing.assert_allclose(found.log_probs[b, k], rest, rtol=1e-3, atol=1e-4)


def test_a_word_that_only_the_source_knows_is_unknown_to_what_does_not_copy():
  model = build_tiny('luong', 'rnn="gru"')
  params = variables(model, *GIVEN)
  prefix = jnp.full((B, 1), TARGET_WORDS + 2)
  found = compile_search(model, BeamSearch(1), 4, DEFAULT_RANKING)(params['params'], *GIVEN[:2], None, prefix)
  assert np.all(found.tokens[:, 0, 0] == 3)
