"""Search with a shortlist of target tokens, against search over all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.lexicon import Lexicon
from attention_jax.data.vocab import word
from attention_jax.decoding.ensemble import Ensemble
from attention_jax.decoding.generate import IMPOSSIBLE_SCORE
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.inference.compiled_search import BeamSearch, compile_search
from attention_jax.inference.predictor import Predictor, check_shortlist
from attention_jax.models.encoder_decoder import Shortlist
from attention_jax.tokens import BOS, EOS, PAD
from tests.models.helpers import (
  SOURCE_WORDS,
  TARGET_WORDS,
  B,
  S,
  build_conv,
  build_tiny,
  build_transformer,
  inputs,
)
from tests.modules.helpers import assert_close, variables
from tests.sampled_cases import sample_cases

INPUTS = inputs()
IDS = jnp.asarray([0, 1, 2, 3, 5, 8, 9, 12])
MODELS = {
  'recurrent': functools.partial(build_tiny, 'bahdanau', 'rnn="gru"'),
  'tied': functools.partial(build_tiny, 'luong', 'rnn="gru"', output='tied'),
  'transformer': build_transformer,
  'bfloat16': functools.partial(build_tiny, 'bahdanau', 'rnn="gru"', dtype='bfloat16'),
  'convolutional': build_conv,
  'latent': functools.partial(build_tiny, 'luong', 'rnn="gru"', alignment='latent_monotonic'),
}
SHARED = word(['a b c d e f g'])  # 11 entries


# Half of the models always run; `make test-all` runs all of them.
@pytest.fixture(scope='module', params=sample_cases([(name,) for name in MODELS], 2))
def model_and_params(request):
  model = MODELS[request.param]()
  return model, variables(model, *INPUTS, scale=2.0)['params']


def test_logits_of_a_shortlist_are_columns_of_the_logits_of_all_tokens(model_and_params):
  model, params = model_and_params
  params = {'params': params}

  @jax.jit
  def step():
    carry, memory = model.apply(params, *INPUTS[:2], 4, method='start')
    shortlist = model.apply(params, IDS, method='make_shortlist')
    token = jnp.full((B,), BOS)
    _, full = model.apply(params, carry, token, memory, method='step')
    carry, short = model.apply(params, carry, token, memory, shortlist, method='step')
    # From here on, tokens are positions in the shortlist: 5 is the token IDS[5] = 8.
    _, second = model.apply(params, carry, jnp.full((B,), 5), memory, shortlist, method='step')
    full_carry, _ = model.apply(
      params, model.apply(params, *INPUTS[:2], 4, method='start')[0], token, memory, method='step'
    )
    _, full_second = model.apply(params, full_carry, jnp.full((B,), 8), memory, method='step')
    return (full, short), (full_second, second)

  for full, short in step():
    assert short.logits.shape == (B, len(IDS)) and short.logits.dtype == jnp.float32
    expected = full.logits[:, IDS]
    if model.traits.latent:  # log-probabilities, normalised over the shortlist at each position
      assert np.all(np.exp(short.logits).sum(-1) == pytest.approx(1, rel=1e-5))
      assert np.all(short.logits.argmax(-1) == expected.argmax(-1))
    else:
      assert_close(short.logits, expected, rtol=1e-6, atol=1e-6)
      np.testing.assert_array_equal(short.weights, full.weights)


def assert_the_whole_vocabulary_changes_nothing(model, params, strategy):
  search = compile_search(model, strategy, 5, DEFAULT_RANKING)
  rng_inputs = (jnp.zeros((B,), jnp.int32), jnp.arange(B)) if isinstance(strategy, Sampling) else None
  full = search(params, *INPUTS[:2], rng_inputs)
  short = search(params, *INPUTS[:2], rng_inputs, None, jnp.arange(TARGET_WORDS))
  jax.tree.map(np.testing.assert_array_equal, full, short)


# Quick forms for the other models: `test_logits_of_a_shortlist_are_columns_of_the_logits_of_all_tokens`,
# `test_every_strategy_supports_shortlists` and `test_hypotheses_are_restricted_to_the_shortlist`.
@pytest.mark.parametrize(
  'model_and_params',
  [name if name == 'latent' else pytest.param(name, marks=pytest.mark.long) for name in MODELS],
  indirect=True,
)
def test_the_whole_vocabulary_as_shortlist_changes_nothing(model_and_params):
  assert_the_whole_vocabulary_changes_nothing(*model_and_params, BeamSearch(3))


@pytest.mark.parametrize(
  'strategy',
  [pytest.param(BeamSearch(1), marks=pytest.mark.long), BeamSearch(4, groups=2), Sampling(2, temperature=0.7)],
  ids=str,
)
def test_every_strategy_supports_shortlists(strategy):
  model = MODELS['recurrent']()
  params = variables(model, *INPUTS, scale=2.0)['params']
  assert_the_whole_vocabulary_changes_nothing(model, params, strategy)


def test_hypotheses_are_restricted_to_the_shortlist(model_and_params):
  model, params = model_and_params
  beams = 3
  search = compile_search(model, BeamSearch(beams), 8, DEFAULT_RANKING)
  hypotheses = jax.device_get(search(params, *INPUTS[:2], None, None, IDS))
  jax.tree.map(np.testing.assert_array_equal, hypotheses, jax.device_get(search(params, *INPUTS[:2], None, None, IDS)))
  assert np.isin(hypotheses.tokens, IDS).all() and np.any(hypotheses.tokens > EOS)
  assert np.all(hypotheses.lengths > 0) and np.all(hypotheses.log_probs <= 0)
  assert np.all(hypotheses.scores > IMPOSSIBLE_SCORE)
  assert hypotheses.weights.shape == (B, beams, 8, S)
  if model.traits.latent:
    return
  # Log-probabilities are normalised over the shortlist, and weights are those of the same tokens by teacher forcing.
  run = jax.jit(lambda tokens: model.apply({'params': params}, *INPUTS[:2], tokens))
  is_bfloat16 = model.output.dtype == jnp.bfloat16
  for k in range(beams):
    outputs = run(hypotheses.tokens[:, k])
    log_probs = jax.nn.log_softmax(outputs.logits[..., IDS])
    tokens = np.searchsorted(IDS, hypotheses.tokens[:, k])
    is_real = hypotheses.tokens[:, k] != PAD
    expected = np.where(is_real, np.take_along_axis(np.asarray(log_probs), tokens[..., None], -1)[..., 0], 0).sum(-1)
    # A logit in bfloat16 is rounded by up to 2^-9 of its size, and each token's log-probability is a difference of two.
    rounding = float(jnp.abs(outputs.logits[..., IDS]).max()) * (2**-8 if is_bfloat16 else 2**-23)
    errors = np.abs(hypotheses.log_probs[:, k] - expected)
    assert np.all(errors <= hypotheses.lengths[:, k] * rounding + 1e-4 * np.abs(expected))
    weights = np.where(is_real[..., None], np.asarray(outputs.weights), 0)
    np.testing.assert_allclose(hypotheses.weights[:, k], weights, atol=0.05 if is_bfloat16 else 1e-4)


def test_all_models_of_an_ensemble_use_the_shortlist():
  models = (MODELS['recurrent'](), MODELS['tied']())
  params = tuple(variables(model, *INPUTS, scale=2.0)['params'] for model in models)
  search = compile_search(Ensemble(models), BeamSearch(2), 5, DEFAULT_RANKING)
  full = search(params, *INPUTS[:2])
  jax.tree.map(np.testing.assert_array_equal, full, search(params, *INPUTS[:2], None, None, jnp.arange(TARGET_WORDS)))
  assert np.isin(search(params, *INPUTS[:2], None, None, IDS).tokens, IDS).all()
  shortlists = jax.eval_shape(lambda: Ensemble(models).apply({'params': params}, IDS, method='make_shortlist'))
  assert all(isinstance(shortlist, Shortlist) for shortlist in shortlists)


def predictor_with(shortlist, **options):
  model = build_tiny('bahdanau', 'rnn="gru"', sizes=(len(SHARED),) * 2)
  params = variables(model, *inputs(sizes=(len(SHARED),) * 2), scale=2.0)['params']
  return Predictor(model, params, SHARED, SHARED, buckets=[(4, 4)], max_length=5, shortlist=shortlist, **options)


def test_predictions_use_the_shortlist_of_a_lexicon(monkeypatch):
  """The lexicon translates every source token as itself, and its most frequent target token is 'g'."""
  monkeypatch.setattr('attention_jax.data.lexicon.SHORTLIST_MULTIPLE', 1)
  size = len(SHARED)
  by_frequency = np.array([0, 1, 2, 3, *range(size - 1, 3, -1)], np.int32)
  lexicon = Lexicon(np.arange(size + 1), np.arange(size, dtype=np.int32), np.ones(size), by_frequency, '')
  lists = []

  def shortlist(source, prefix):
    lists.append(lexicon.shortlist(source, 1, prefix))
    return lists[-1]

  predictor = predictor_with(shortlist)
  (prediction,) = predictor(['a b'], beams=3)
  assert [SHARED.id_to_token(id) for id in lists[-1][EOS + 1 :]] == ['<unk>', 'a', 'b', 'g']
  assert {token for hypothesis in prediction.hypotheses for token in hypothesis.tokens} <= {'<unk>', 'a', 'b', 'g'}
  assert all(hypothesis.weights.shape == (len(hypothesis.tokens) + 1, 3) for hypothesis in prediction.hypotheses)
  prefixed = predictor(['a b'], beams=3, prefixes=['d Ulm'])[0].hypotheses
  assert [SHARED.id_to_token(id) for id in lists[-1][EOS + 1 :]] == ['<unk>', 'a', 'b', 'd', 'g']
  assert all(hypothesis.tokens[:2] == ['d', 'Ulm'] for hypothesis in prefixed)
  full = predictor_with(None)(['a b', 'c'], beams=3, prefixes=['d Ulm', ''])
  whole = predictor_with(lambda source, prefix: np.arange(size))(['a b', 'c'], beams=3, prefixes=['d Ulm', ''])
  for expected, prediction in zip(full, whole, strict=True):
    actual = [hypothesis[:4] for hypothesis in prediction.hypotheses]
    assert actual == [hypothesis[:4] for hypothesis in expected.hypotheses]


@pytest.mark.parametrize('output', ['pointer', 'pointer_generator', 'copynet'])
def test_layers_that_copy_have_no_shortlist(output):
  model = build_tiny('bahdanau', 'rnn="gru"', output=output, sizes=(SOURCE_WORDS, SOURCE_WORDS))
  with pytest.raises(
    UserError, match='does not copy from the source; expected shortlist=0, or one of: vocabulary, tied'
  ):
    check_shortlist(model)
  with pytest.raises(UserError, match='a shortlist needs'):
    Predictor(model, {}, SHARED, SHARED, buckets=[(4, 4)], shortlist=lambda source, prefix: IDS)
