"""Transformers: the formulas of the paper in NumPy, steps with a cache, and every option."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.decoding import search
from attention_jax.decoding.compiled_search import compile_beam_search
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import shift_right
from attention_jax.models.encoders import TransformerEncoder
from attention_jax.modules.embedding import Embedding
from attention_jax.modules.positions import POSITIONS
from attention_jax.modules.transformer import ACTIVATIONS, NORMS, self_attention_mask
from attention_jax.tokens import BOS, UNK
from tests.models.helpers import (
  LENGTHS,
  TARGET_WORDS,
  TRANSFORMER_FEATURES,
  B,
  S,
  T,
  build_conv,
  build_transformer,
  inputs,
  run,
  run_steps,
  with_params,
)
from tests.modules.helpers import assert_close, assert_same, variables
from tests.sampled_cases import sample_cases

# Cases with each row of every table at least once, in encoder and decoder; the scores and alignments are those of both
# self-attention and cross-attention.
ALIGNMENTS = [name for name, row in aj.ALIGNMENTS.items() if row.trains_by_backprop]
_TABLES = (list(aj.SCORES), ALIGNMENTS, list(POSITIONS), list(NORMS), list(ACTIVATIONS), (False, True), (0, 2))
CASES = list(itertools.islice(zip(*map(itertools.cycle, _TABLES), strict=False), len(ALIGNMENTS)))
# The test replaces scores that 'rope' does not support.
CASES += [(score, alignment, 'none', *options) for score, alignment, position, *options in CASES if position == 'rope']
OPTIONS = ('score', 'alignment', 'position', 'norm', 'activation', 'norm_first', 'window')


@pytest.mark.parametrize(OPTIONS, sample_cases(CASES, 16))
def test_steps_equal_the_call_and_masked_tokens_have_no_effect(
  score, alignment, position, norm, activation, norm_first, window
):
  if position == 'rope' and not aj.SCORES[score].rotation_invariant:
    score = 'cosine'
  options = (
    f'score="{score}", alignment="{alignment}", position="{position}", norm="{norm}", activation="{activation}", '
    f'norm_first={norm_first}, window={window}, sinks={int(window > 0)}, kv_heads={2 if norm_first else 0}, '
    f'gate={not norm_first}, differential={not norm_first and position != "shaw"}'
  )
  model = build_transformer(options, options, score=score, alignment=alignment, heads=1 if window else 4)
  params, (source, mask, target) = with_params(model)
  outputs = run(model, params, source, mask, target)
  heads = model.decoder.attention.heads
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.layers.shape == (B, T, 2, heads, S)
  assert np.all(outputs.layers[~np.broadcast_to(mask[:, None, None, None], outputs.layers.shape)] == 0)
  assert_close(run_steps(model, params, source, mask, target), outputs)
  assert_same(run(model, params, jnp.where(mask, source, 3), mask, target), outputs)
  changed = run(model, params, source, mask, target.at[:, 3:].set(5))
  assert_same(changed.logits[:, :3], outputs.logits[:, :3])


@pytest.mark.long
def test_layer_dropout_skips_layers_for_whole_batches_during_training():
  source, mask, target = inputs()
  half = build_transformer(*['layer_dropout=0.5'] * 2)
  without = build_transformer(*['layer_dropout=0.0'] * 2)
  params = variables(half, source, mask, target)
  assert_same(*(run(model, params, source, mask, target).logits for model in (half, without)))

  def sample_logits(model, samples):
    def train_logits(rng):
      return model.apply(params, source, mask, target, False, rngs={'dropout': rng}).logits

    rngs = jax.random.split(jax.random.key(0), samples)
    return np.asarray(jax.jit(lambda: jax.vmap(train_logits)(rngs))())

  # Each of two layers on either side is skipped or not. Without decoder layers, those of the encoder have no effect.
  distinct = np.unique(np.round(sample_logits(half, 200), 4), axis=0)
  assert len(distinct) == 4 * 3 + 1
  without_layers = sample_logits(build_transformer(*['layer_dropout=0.999999'] * 2), 1)[0]
  assert any(np.allclose(without_layers, logits, atol=1e-3) for logits in distinct)
  bound = half.bind(params)
  features = bound.decoder.embed_inputs(bound.embedding(shift_right(target)), jnp.arange(T))
  assert_close(bound.output(features).logits(), without_layers)


@pytest.mark.long
def test_layers_that_are_computed_again_have_the_same_gradients():
  source, mask, target = inputs()
  results = []
  for options in ('dropout=0.3', 'dropout=0.3, remat=True'):
    model = build_transformer(options, options)
    params = variables(model, source, mask, target)['params']

    def loss(params, model=model):
      rngs = {'dropout': jax.random.key(3)}
      return model.apply({'params': params}, source, mask, target, deterministic=False, rngs=rngs).logits.sum()

    results.append(jax.jit(jax.value_and_grad(loss))(params))
    assert ('remat' in str(jax.make_jaxpr(jax.grad(loss))(params))) == ('remat' in options)
  assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_dropout_of_sublayers_and_of_weights_is_active_in_training():
  source, mask, target = inputs()
  options = 'norm_first=True, attention_dropout=0.5'
  model = build_transformer('attention_dropout=0.5', options)
  params = variables(model, source, mask, target)

  @functools.partial(jax.jit, static_argnums=0)
  def train_logits(model, rngs):
    return model.apply(params, source, mask, target, False, rngs=rngs).logits

  def make_rngs(dropout, attention):
    return {'dropout': jax.random.key(dropout), 'attention': jax.random.key(attention)}

  logits = train_logits(model, make_rngs(0, 0))
  assert_same(train_logits(model, make_rngs(1, 0)), logits)
  assert np.any(train_logits(model, make_rngs(0, 1)) != logits)
  # All results of the sublayers of the decoder are dropped.
  without_sublayers = train_logits(build_transformer('', 'norm_first=True, dropout=0.999999'), make_rngs(0, 0))
  bound = model.bind(params)
  features = bound.decoder.embed_inputs(bound.embedding(shift_right(target)), jnp.arange(T))
  assert_close(bound.output(bound.decoder.finalize(features)).logits(), without_sublayers)


@pytest.mark.long
@pytest.mark.parametrize('norm_first', [False, True])
def test_deep_encoders_preserve_differences_between_positions_at_initialisation(norm_first):
  embedding = Embedding(50, 32)
  encoder = TransformerEncoder(features=32, layers=6, heads=4, hidden=64, norm_first=norm_first, embedding=embedding)
  source = jax.random.randint(jax.random.key(0), (16, 12), UNK + 1, 50)
  mask = jnp.ones(source.shape, bool)
  encoded, _ = jax.jit(lambda: encoder.init_with_output(jax.random.key(0), source, mask, True))()
  memory = np.asarray(encoded.memory)
  # The ratio is about 2 / 3 for embeddings with positions; with plain Glorot kernels, six layers lower it to 1 to 6 %.
  assert memory.var(1).mean() > 0.4 * (memory**2).mean()


@pytest.mark.long
def test_gradients_reach_every_parameter():
  options = 'layers=1, position="shaw", norm_first=True, activation="swiglu", kv_heads=2'
  model = build_transformer(options, options, score='additive', alignment='entmax15')
  params, (source, mask, target) = with_params(model)
  mask = mask.at[1].set(False)  # a filler row

  def loss(params):
    return -jnp.mean(jax.nn.log_softmax(model.apply(params, source, mask, target).logits)[0, ..., 5])

  for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
    assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


# ------------------------------------------------------------------------------------------- the formulas of the paper


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def layer_norm(x, p):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p['scale'] + p['bias']


def attention(p, queries, memory, mask):
  """Equation 1 for each head, and section 3.2.2; queries [T, D], memory [S, D], mask [T, S]."""
  contexts = []
  for q, k, v in zip(*(p[f'{side}_kernel']['kernel'] for side in ('query', 'key', 'value')), strict=True):
    scores = (queries @ q) @ (memory @ k).T / np.sqrt(q.shape[1])
    contexts.append(softmax(np.where(mask, scores, -np.inf)) @ (memory @ v))
  return np.concatenate(contexts, 1) @ p['join']['kernel']


def feed_forward(p, x):
  hidden = np.maximum(0, x @ p['Dense_0']['kernel'] + p['Dense_0']['bias'])
  return hidden @ p['Dense_1']['kernel'] + p['Dense_1']['bias']


def positions(size):
  angles = np.arange(size)[:, None] / 10000 ** (2 * np.arange(TRANSFORMER_FEATURES // 2) / TRANSFORMER_FEATURES)
  return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def literal_logits(params, source, target):
  """Returns the logits of one pair of sentences without padding; norms follow the residual connections."""
  encoder = params['encoder']
  decoder = params['decoder']
  root = np.sqrt(TRANSFORMER_FEATURES)

  def norm(p, i):
    return p[f'residuals_{i}']['LayerNorm_0']

  x = encoder['embedding']['table']['embedding'][source] * root + positions(len(source))
  no_mask = np.ones((len(source), len(source)), bool)
  for i in range(2):
    p = encoder[f'blocks_{i}']
    x = layer_norm(x + attention(p['attention'], x, x, no_mask), norm(p, 0))
    x = layer_norm(x + feed_forward(p['feed'], x), norm(p, 1))
  shifted = [BOS, *target[:-1]]
  y = params['embedding']['table']['embedding'][np.asarray(shifted)] * root + positions(len(target))
  for i in range(2):
    p = decoder[f'blocks_{i}']
    y = layer_norm(y + attention(p['attention'], y, y, np.tri(len(target), dtype=bool)), norm(p, 0))
    y = layer_norm(y + attention(p['cross'], y, x, np.ones((len(target), len(source)), bool)), norm(p, 1))
    y = layer_norm(y + feed_forward(p['feed'], y), norm(p, 2))
  return y @ params['output']['kernel'] + params['output']['bias']


@pytest.mark.long
def test_logits_equal_the_formulas():
  model = build_transformer()
  params, (source, mask, target) = with_params(model)
  outputs = run(model, params, source, mask, target)
  params64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  for i, size in enumerate(LENGTHS):
    expected = literal_logits(params64, np.asarray(source[i, :size]), np.asarray(target[i]))
    np.testing.assert_allclose(outputs.logits[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_self_attention_mask_contains_the_window_and_the_sinks():
  causal = self_attention_mask(causal=True, window=1, sinks=1).dense(6, 6).astype(int)
  assert causal[4].tolist() == [1, 0, 0, 1, 1, 0] and causal[0].tolist() == [1, 0, 0, 0, 0, 0]
  bidirectional = self_attention_mask(causal=False, window=2).dense(6, 6).astype(int)
  assert bidirectional[1].tolist() == [1, 1, 1, 1, 0, 0]
  assert self_attention_mask(causal=False).dense(1, 4).all()


# ------------------------------------------------------------------------------------- search, encoders and decoders


@pytest.mark.long
@pytest.mark.parametrize(
  'model', [build_transformer('position="rope"', 'position="t5", norm_first=True'), build_conv()], ids=['', 'conv']
)
def test_scores_of_beam_search_equal_those_of_the_call(model):
  params, (source, mask, _) = with_params(model)
  hypotheses = compile_beam_search(model, 3, 6, search.Ranking(alpha=0.0))(params['params'], source, mask)
  for k in range(3):
    log_probs = jax.nn.log_softmax(run(model, params, source, mask, hypotheses.tokens[:, k]).logits)
    token_log_probs = jnp.take_along_axis(log_probs, hypotheses.tokens[:, k, :, None], -1)[..., 0]
    is_real = jnp.arange(6)[None] < hypotheses.lengths[:, k, None]
    expected = jnp.where(is_real, token_log_probs, 0).sum(-1)
    np.testing.assert_allclose(hypotheses.log_probs[:, k], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  ('build', 'layer', 'heads'), [(build_conv, 0, 2), *((build_transformer, layer, 4) for layer in (0, 1, -1, -2))]
)
def test_weights_layer_selects_the_layer_of_the_weights(build, layer, heads):
  model = build(decoder=f'weights_layer={layer}', heads=heads)
  params, args = with_params(model)
  outputs = run(model, params, *args)
  assert_close(outputs.weights, outputs.layers[:, :, layer].mean(2))


@pytest.mark.long
@pytest.mark.parametrize(
  'side', [{'encoder_spec': 'birnn(features=8)'}, {'decoder_spec': 'bahdanau(features=8, readout=9)'}]
)
def test_encoders_and_decoders_can_be_combined(side):
  model = build_transformer(score='general', heads=1, **side)
  params, args = with_params(model)
  assert np.all(np.isfinite(run(model, params, *args).logits))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'encoder': 'position="rop"'}, r"unknown position 'rop' \(did you mean 'rope'\?\); expected one of: alibi, "),
    ({'decoder': 'norm="batch"'}, "unknown norm 'batch'; expected one of: layer, rms"),
    ({'encoder': 'activation="elu"'}, "unknown activation 'elu'"),
    ({'decoder': 'alignment="latent"'}, "'latent' needs a sum over positions, which only recurrent decoders support"),
    ({'alignment': 'hard'}, "transformer: the alignment must train by .* 'hard' needs the auxiliary loss 'reinforce'"),
    ({'decoder': 'kv_heads=3'}, 'attention: kv_heads must be 0 or a divisor of heads=4, got kv_heads=3'),
    ({'encoder': 'position="rope", score="general"'}, "positions need a score .* got 'general'; expected one of: dot"),
    ({'encoder': 'position="rope(max_positions=9)"'}, "unknown option of position 'rope': 'max_positions'"),
    ({'encoder': 'position="t5(buckets=2)"'}, "position 't5': buckets must be at least 4 .* got buckets=2 and max_d"),
    ({'encoder': 'position="shaw", differential=True'}, 'does not support positions that are added to contexts'),
    ({'encoder': 'position="shaw(max_distance=0)"'}, "position 'shaw': option max_distance must be at least 1, got 0"),
    ({'encoder': 'lambda_by_layer=True'}, 'lambda_by_layer must be False without differential=True'),
    ({'decoder': 'sinks=2'}, r'transformer: sinks must be 0 without a window \(window=0\), got sinks=2'),
    ({'decoder': 'weights_layer=2'}, 'transformer: weights_layer must be from -2 to 1, got 2'),
    ({'encoder': 'heads=5'}, 'transformer: heads must be at least 1 and divide features, got features=8 and heads=5'),
    ({'features': 4}, 'model.attention.features must be equal to the features of the decoder, got 4 and 8'),
    ({'decoder': 'implementation="flash", alignment="sparsemax"'}, "'flash' cannot compute this: the alignment is not"),
  ],
)
def test_invalid_options_are_reported(options, message):
  with pytest.raises(UserError, match=message) as caught:
    model = build_transformer(**options)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
  assert '\n' not in str(caught.value)


def nearby(query, key, *, query_position, key_position):
  """Products less the distance: a score of positions that is not recurrent."""
  return key @ query - 0.3 * jnp.abs(key_position - query_position).astype(query.dtype)


@pytest.mark.long
@pytest.mark.parametrize(
  'options',
  [
    'head_dim=6, position="rope", score="normed_dot", kv_heads=2',
    'head_dim=6, differential=True, lambda_by_layer=True, kv_heads=2',
    'score="nearby"',
  ],
)
def test_steps_equal_the_call_for_heads_of_any_width_and_scores_of_positions(options, monkeypatch):
  monkeypatch.setitem(aj.SCORES, 'nearby', aj.Row(nearby))
  model = build_transformer(options, options, score='nearby')
  params, (source, mask, target) = with_params(model)
  assert_close(run_steps(model, params, source, mask, target), run(model, params, source, mask, target))
