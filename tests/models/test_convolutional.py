"""Convolutional models: the formulas of the paper in NumPy, steps with a cache of inputs, and masks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.decoding import search
from attention_jax.errors import UserError
from attention_jax.inference.predictor import compile_beam_search
from attention_jax.models import convolutional
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import shift_right
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, S, T, build_conv, inputs
from tests.modules.helpers import RNGS, assert_close, assert_same, draw, variables

E = 4


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, source, mask, target):
  return model.apply(params, source, mask, target)._replace(linear=())


@functools.partial(jax.jit, static_argnums=0)
def run_steps(model, params, source, mask, target):
  """Computes one step after the other; the maximum length is two steps longer."""
  carry, memory = model.apply(params, source, mask, target.shape[1] + 2, method='start')
  assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(carry)), 'search reorders axis 0 of every leaf'
  step = lambda carry, token: model.apply(params, carry, token, memory, method='step')
  _, outputs = jax.lax.scan(step, carry, shift_right(target).T)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


@pytest.mark.parametrize(
  ('score', 'alignment', 'heads', 'width'),
  [('dot', 'softmax', 1, 3), ('additive', 'mocha', 1, 4), ('coverage', 'sparsemax', 2, 1), ('general', 'gumbel', 4, 7)],
)
def test_steps_equal_the_call_and_masked_tokens_have_no_effect(score, alignment, heads, width):
  model = build_conv(decoder=f'width={width}', score=score, alignment=alignment, heads=heads)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.layers.shape == (B, T, 2, heads, S)
  assert_close(outputs.weights, outputs.layers[:, :, -1].mean(2))
  assert np.all(outputs.layers[~np.broadcast_to(mask[:, None, None, None], outputs.layers.shape)] == 0)
  assert_close(run_steps(model, params, source, mask, target), outputs, rtol=1e-5)

  assert_same(run(model, params, jnp.where(mask, source, 3), mask, target), outputs)
  order = jnp.asarray([2, 0, 1])
  assert_same(run(model, params, source[order], mask[order], target[order]).logits, outputs.logits[order])
  changed = run(model, params, source, mask, target.at[:, 3:].set(5))
  # The fourth token is an input of the fifth step.
  assert_same(changed.logits[:, :4], outputs.logits[:, :4])
  assert np.all(np.any(changed.logits[:, 4] != outputs.logits[:, 4], axis=-1))


def output_shapes(model):
  return jax.eval_shape(lambda *args: model.init_with_output(RNGS, *args)[0], *inputs())


def test_every_score_and_alignment_is_supported():
  alignments = [name for name, row in aj.ALIGNMENTS.items() if row.trains_by_backprop]
  for score, alignment in zip(itertools.cycle(aj.SCORES), alignments, strict=False):
    sides = {'encoder_spec': 'conv(features=5, layers=1)', 'decoder_spec': 'conv(features=6, layers=1)'}
    assert output_shapes(build_conv(score=score, alignment=alignment, **sides)).layers.shape == (B, T, 1, 1, S)


def test_the_amount_of_padding_has_no_effect():
  model = build_conv('width=5')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  size = int(mask[1].sum())
  outputs = run(model, params, source, mask, target)
  alone = run(model, params, source[1:2, :size], mask[1:2, :size], target[1:2])
  assert_close(alone.logits, outputs.logits[1:2])
  assert_close(alone.layers, outputs.layers[1:2, ..., :size])


def test_gradients_reach_every_parameter_and_an_empty_source_is_finite():
  model = build_conv(score='additive', alignment='entmax15', heads=2)
  source, mask, target = inputs()
  mask = mask.at[1].set(False)  # a filler row
  params = variables(model, source, mask, target)
  assert np.all(np.isfinite(run(model, params, source, mask, target).logits))
  loss = lambda params: -jnp.mean(jax.nn.log_softmax(model.apply(params, source, mask, target).logits)[..., 5])
  for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
    assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


def test_encoder_gradients_are_a_mean_over_layers_and_embedding_gradients_a_sum(monkeypatch):
  """Section 3.4: the gradient of the encoder is divided by the number of attentions, that of embeddings is not."""
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  features = lambda model, encoded, x: model.decoder(encoded, x, True).features

  def loss(memory, embedded):
    encoded = Encoded(memory, mask, (), memory + embedded)
    return jnp.sum(model.apply(params, encoded, draw(B, T, E), method=features) ** 2)

  args = draw(B, S, E, seed=1), draw(B, S, E, seed=2)

  def gradients():
    return jax.jit(jax.grad(lambda *args: loss(*args), (0, 1)))(*args)  # a new function is traced anew

  memory_gradient, embedding_gradient = gradients()
  monkeypatch.setattr(convolutional, 'scale_gradient', lambda x, part: x)
  unscaled_memory_gradient, unscaled_embedding_gradient = gradients()
  assert_close(memory_gradient, unscaled_memory_gradient / 2)
  assert_close(embedding_gradient, unscaled_embedding_gradient)
  assert np.all(np.any(memory_gradient != 0, axis=-1) == mask)


# ------------------------------------------------------------------------------------------- the formulas of the paper


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def linear(p, x):
  """Computes one output after the other, each with a weight vector g v / |v|."""
  columns = [g * v / np.sqrt(v @ v) for v, g in zip(p['direction'].T, p['gain'], strict=True)]
  return np.array([w @ x + b for w, b in zip(columns, p['bias'], strict=True)])


def gated(p, rows):
  """v(W [x; ...] + b), v([a; b]) = a * sigmoid(b)."""
  a, b = np.split(linear(p['Normed_0'], np.concatenate(rows)), 2)
  return a * sigmoid(b)


def literal(params, source, target):
  """Returns logits and weights [T, L, S] of one pair of sentences without padding; convolutions have width 3."""
  encoder, decoder, root = params['encoder'], params['decoder'], np.sqrt(0.5)
  e = encoder['embedding']['table']['embedding'][source] + encoder['positions']['table'][: len(source)]
  x = [linear(encoder['widen'], row) for row in e]
  for i in range(2):
    p, ends = encoder[f'blocks_{i}']['GatedConvolution_0'], [np.zeros(len(x[0]))]
    padded = ends + x + ends
    x = [(gated(p, padded[j : j + 3]) + x[j]) * root for j in range(len(x))]
  z = np.array([linear(encoder['narrow'], row) for row in x])

  shifted = [1, *target[:-1]]  # BOS
  g = params['embedding']['table']['embedding'][shifted] + decoder['positions']['table'][: len(target)]
  x = [linear(decoder['widen'], row) for row in g]
  weights = np.zeros((len(target), 2, len(source)))
  for i in range(2):
    p, padded, after = decoder[f'blocks_{i}'], [np.zeros(len(x[0]))] * 2 + x, []
    for t in range(len(x)):
      h = gated(p['convolution'], padded[t : t + 3])
      d = linear(p['query'], h) + g[t]  # equation 1
      a = np.exp(z @ d)
      weights[t, i] = a / a.sum()
      c = sum(weights[t, i, j] * (z[j] + e[j]) for j in range(len(source)))  # equation 2
      m = len(source)
      h = h + linear(p['back'], m * np.sqrt(1 / m) * c)
      after.append((h + x[t]) * root)
    x = after
  features = np.array([linear(decoder['narrow'], row) for row in x])
  return features @ params['output']['kernel'] + params['output']['bias'], weights


def test_logits_and_weights_equal_the_formulas():
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)
  params64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  for i, size in enumerate(LENGTHS):
    logits, weights = literal(params64, np.asarray(source[i, :size]), np.asarray(target[i]))
    np.testing.assert_allclose(outputs.logits[i], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs.layers[i, :, :, 0, :size], weights, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- search, encoders and decoders


def test_scores_of_beam_search_equal_those_of_the_call():
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  hypotheses = compile_beam_search(model, 3, 6, search.Ranking(alpha=0.0))(params['params'], source, mask)
  for k in range(3):
    log_probs = jax.nn.log_softmax(run(model, params, source, mask, hypotheses.tokens[:, k]).logits)
    token_log_probs = jnp.take_along_axis(log_probs, hypotheses.tokens[:, k, :, None], -1)[..., 0]
    is_real = jnp.arange(6)[None] < hypotheses.lengths[:, k, None]
    expected = jnp.where(is_real, token_log_probs, 0).sum(-1)
    np.testing.assert_allclose(hypotheses.log_probs[:, k], expected, rtol=1e-4, atol=1e-5)


SIDES = [
  {'encoder_spec': 'birnn(features=10)', 'heads': 2},
  {'decoder_spec': 'bahdanau(features=8, readout=9)', 'score': 'additive'},
  {'decoder_spec': 'transformer(features=8, layers=1, heads=2, hidden=8)', 'heads': 2},
]


@pytest.mark.parametrize('sides', SIDES)
def test_encoders_and_decoders_can_be_combined(sides):
  assert output_shapes(build_conv(**sides)).logits.shape == (B, T, TARGET_WORDS)


def test_values_are_the_sum_of_memory_and_embeddings_for_every_decoder():
  model = build_conv(**SIDES[1])
  source, mask, target = inputs()
  params = variables(model, source, mask, target)

  def encode_and_start(model, source, mask):
    return model.encoder(source, mask, True), model.start(source, mask, T)[1].memory

  encoded, memory = jax.jit(functools.partial(model.apply, method=encode_and_start))(params, source, mask)
  encoder = params['params']['encoder']
  embedded = encoder['embedding']['table']['embedding'][source] + encoder['positions']['table'][None, :S]
  assert_close(memory.value[:, 0], jnp.where(mask[..., None], encoded.memory + embedded, 0))
  assert np.all(memory.value[:, 0][~mask] == 0) and np.all(encoded.memory[~mask] == 0)


def test_dropout_is_active_during_training_alone():
  source, mask, target = inputs()
  model = build_conv(dropout=0.5)
  params = variables(model, source, mask, target)
  apply = jax.jit(model.apply, static_argnums=4)
  train_logits = lambda seed: apply(params, source, mask, target, False, rngs={'dropout': jax.random.key(seed)}).logits
  test_logits = run(model, params, source, mask, target).logits
  assert np.any(train_logits(1) != train_logits(2)) and np.any(train_logits(1) != test_logits)


def test_weights_of_selects_the_layer():
  source, mask, target = inputs()
  model = build_conv(decoder='weights_of=0', heads=2)
  outputs = run(model, variables(model, source, mask, target), source, mask, target)
  assert_close(outputs.weights, outputs.layers[:, :, 0].mean(2))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'encoder': 'width=4'}, 'conv: width of the encoder must be odd, got 4'),
    ({'encoder': 'width=0'}, "encoder 'conv': option width must be at least 1, got 0"),
    ({'decoder': 'weights_of=2'}, 'conv: weights_of must be from -2 to 1, one of the layers, got 2'),
    ({'decoder': 'heads=2'}, "unknown option of decoder 'conv': 'heads'"),
    (
      {'encoder': 'max_positions=3'},
      "position 'learned': sequences must have at most max_positions=3 positions, got 7",
    ),
    (
      {'decoder': 'max_positions=3'},
      "position 'learned': sequences must have at most max_positions=3 positions, got 5",
    ),
    ({'alignment': 'hard'}, "conv: the alignment must train by .* 'hard' needs the auxiliary loss 'reinforce'"),
    ({'alignment': 'latent'}, "'latent' needs a sum over positions, which only recurrent decoders support"),
  ],
)
def test_user_errors(options, message):
  with pytest.raises(UserError, match=message) as caught:
    model = build_conv(**options)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
  assert '\n' not in str(caught.value)
