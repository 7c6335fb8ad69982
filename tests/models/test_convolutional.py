"""Convolutional models: the equations of the paper in NumPy, incremental decoding, masking and causality."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.models import convolutional
from attention_jax.models.encoded import Encoded
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, S, T, build_conv, inputs, run, run_steps, with_params
from tests.modules.helpers import RNGS, assert_close, assert_same, draw
from tests.modules.reference_cells import sigmoid

E = 4  # width of the embeddings


@pytest.mark.parametrize(
  ('score', 'alignment', 'heads', 'width'),
  [
    ('coverage', 'sparsemax', 2, 1),
    pytest.param('general', 'gumbel', 4, 7, marks=pytest.mark.long),
    pytest.param('dot', 'softmax', 1, 3, marks=pytest.mark.long),
    pytest.param('additive', 'mocha', 1, 4, marks=pytest.mark.long),
  ],
)
def test_steps_equal_all_at_once_with_masking_and_causality(score, alignment, heads, width):
  model = build_conv(decoder=f'width={width}', score=score, alignment=alignment, heads=heads)
  params, (source, mask, target) = with_params(model)
  outputs = run(model, params, source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.layers.shape == (B, T, 2, heads, S)
  assert_close(outputs.weights, outputs.layers[:, :, -1].mean(2))
  assert np.all(outputs.layers[~np.broadcast_to(mask[:, None, None, None], outputs.layers.shape)] == 0)
  assert_close(run_steps(model, params, source, mask, target), outputs, rtol=1e-5)

  assert_same(run(model, params, jnp.where(mask, source, 3), mask, target), outputs)
  order = jnp.asarray([2, 0, 1])
  # Not bit for bit: a row may move from the vectorised part of a loop to its remainder, which rounds differently.
  reordered = run(model, params, source[order], mask[order], target[order])
  assert_close(reordered.logits, outputs.logits[order], rtol=1e-6, atol=1e-6)
  later = run(model, params, source, mask, target.at[:, 3:].set(5))
  # The changed fourth token is an input from the fifth step on.
  assert_same(later.logits[:, :4], outputs.logits[:, :4])
  assert np.all(np.any(later.logits[:, 4] != outputs.logits[:, 4], axis=-1))


def output_shapes(model):
  """Shapes of the outputs, without computing them."""
  return jax.eval_shape(lambda *args: model.init_with_output(RNGS, *args)[0], *inputs())


@pytest.mark.long
def test_output_is_independent_of_padding():
  model = build_conv('width=5')
  params, (source, mask, target) = with_params(model)
  size = int(mask[1].sum())
  outputs = run(model, params, source, mask, target)
  alone = run(model, params, source[1:2, :size], mask[1:2, :size], target[1:2])
  assert_close(alone.logits, outputs.logits[1:2])
  assert_close(alone.layers, outputs.layers[1:2, ..., :size])


@pytest.mark.long
def test_gradients_reach_every_parameter_and_are_finite_with_an_empty_source():
  specs = {'encoder_spec': 'conv(features=5, layers=1)', 'decoder_spec': 'conv(features=6, layers=1)'}
  model = build_conv(score='additive', alignment='entmax15', heads=2, **specs)
  params, (source, mask, target) = with_params(model)
  mask = mask.at[1].set(False)  # a filler row

  def loss(params):
    log_probs = jax.nn.log_softmax(model.apply(params, source, mask, target).logits)
    return -jnp.mean(log_probs[..., 5])

  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  assert np.isfinite(value)
  for path, gradient in jax.tree.leaves_with_path(gradients):
    assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


@pytest.mark.long
def test_gradient_of_the_encoder_is_divided_by_the_number_of_layers(monkeypatch):
  """Section 3.4: the gradient of the encoder is divided by the number of attentions, but not that of embeddings."""
  model = build_conv()
  params, (_, mask, _) = with_params(model)

  def loss(memory, embedded):
    encoded = Encoded(memory, mask, (), memory + embedded)

    return jnp.sum(model.apply(params, draw(B, T, E), method=lambda m, x: m.decoder(encoded, x, True).features) ** 2)

  def gradients():
    # The lambda is new in each call, so that jit traces again after the patch.
    return jax.jit(jax.grad(lambda *args: loss(*args), (0, 1)))(draw(B, S, E, seed=1), draw(B, S, E, seed=2))

  memory_gradient, embedding_gradient = gradients()
  monkeypatch.setattr(convolutional, 'scale_gradient', lambda x, factor: x)
  unscaled_memory_gradient, unscaled_embedding_gradient = gradients()
  assert_close(memory_gradient, unscaled_memory_gradient / 2)
  assert_close(embedding_gradient, unscaled_embedding_gradient)
  assert np.all(np.any(memory_gradient != 0, axis=-1) == mask)


# NumPy reference implementation of the paper.


def linear(p, x):
  """Weight-normalised layer, one output at a time: the weight vector is g v / |v|."""
  columns = [g * v / np.sqrt(v @ v) for v, g in zip(p['direction'].T, p['gain'], strict=True)]
  return np.array([w @ x + b for w, b in zip(columns, p['bias'], strict=True)])


def gated(p, rows):
  """v(W [x; ...] + b), v([a; b]) = a * sigmoid(b)."""
  a, b = np.split(linear(p['Normed_0'], np.concatenate(rows)), 2)
  return a * sigmoid(b)


def reference(params, source, target):
  """Logits and weights [T, L, S] of one pair of sentences without padding, for convolutions of width 3."""
  encoder = params['encoder']
  decoder = params['decoder']
  root = np.sqrt(0.5)
  e = encoder['embedding']['table']['embedding'][source] + encoder['positions']['table'][: len(source)]
  x = [linear(encoder['widen'], row) for row in e]
  for i in range(2):
    p = encoder[f'blocks_{i}']['GatedConvolution_0']
    padding = [np.zeros(len(x[0]))]
    padded = padding + x + padding
    x = [(gated(p, padded[j : j + 3]) + x[j]) * root for j in range(len(x))]
  z = np.array([linear(encoder['narrow'], row) for row in x])

  decoder_inputs = [1, *target[:-1]]  # BOS
  g = params['embedding']['table']['embedding'][decoder_inputs] + decoder['positions']['table'][: len(target)]
  x = [linear(decoder['widen'], row) for row in g]
  weights = np.zeros((len(target), 2, len(source)))
  for i in range(2):
    p = decoder[f'blocks_{i}']
    padded = [np.zeros(len(x[0]))] * 2 + x
    outputs = []
    for t in range(len(x)):
      h = gated(p['convolution'], padded[t : t + 3])
      d = linear(p['query'], h) + g[t]  # equation 1
      a = np.exp(z @ d)
      weights[t, i] = a / a.sum()
      c = sum(weights[t, i, j] * (z[j] + e[j]) for j in range(len(source)))  # equation 2
      m = len(source)
      h = h + linear(p['back'], m * np.sqrt(1 / m) * c)
      outputs.append((h + x[t]) * root)
    x = outputs
  features = np.array([linear(decoder['narrow'], row) for row in x])
  return features @ params['output']['kernel'] + params['output']['bias'], weights


@pytest.mark.long
def test_outputs_equal_the_equations_of_the_paper():
  model = build_conv()
  params, (source, mask, target) = with_params(model)
  outputs = run(model, params, source, mask, target)
  values = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  for i, size in enumerate(LENGTHS):
    logits, weights = reference(values, np.asarray(source[i, :size]), np.asarray(target[i]))
    np.testing.assert_allclose(outputs.logits[i], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs.layers[i, :, :, 0, :size], weights, rtol=1e-4, atol=1e-5)


# Combination with search, other encoders and other decoders.


COMBINATIONS = [
  {'encoder_spec': 'birnn(features=10)', 'heads': 2},
  {'decoder_spec': 'bahdanau(features=8, readout=9)', 'score': 'additive'},
  {'decoder_spec': 'transformer(features=8, layers=1, heads=2, hidden=8)', 'heads': 2},
]


@pytest.mark.parametrize('specs', COMBINATIONS)
def test_encoders_and_decoders_can_be_combined(specs):
  assert output_shapes(build_conv(**specs)).logits.shape == (B, T, TARGET_WORDS)


@pytest.mark.long
def test_values_of_attention_are_the_sum_of_memory_and_embeddings():
  """The convolutional encoder determines the values, here for a recurrent decoder."""
  model = build_conv(**COMBINATIONS[1])
  params, (source, mask, _) = with_params(model)

  def encode_and_start(model, source, mask):
    encoded = model.encoder(source, mask, True)
    _, memory = model.start(source, mask, T)
    return encoded, memory.memory

  encoded, memory = jax.jit(functools.partial(model.apply, method=encode_and_start))(params, source, mask)
  encoder = params['params']['encoder']
  embedded = encoder['embedding']['table']['embedding'][source] + encoder['positions']['table'][None, :S]
  assert_close(memory.value[:, 0], jnp.where(mask[..., None], encoded.memory + embedded, 0))
  assert np.all(memory.value[:, 0][~mask] == 0) and np.all(encoded.memory[~mask] == 0)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'encoder': 'width=4'}, 'conv: width of the encoder must be odd, got 4'),
    ({'decoder': 'weights_layer=2'}, 'conv: weights_layer.*-2 to 1'),
    ({'decoder': 'heads=2'}, "unknown option of decoder 'conv': 'heads'"),
    ({'encoder': 'max_positions=3'}, "position 'learned': .* at most max_positions=3 positions, got 7"),
    ({'decoder': 'max_positions=3'}, "position 'learned': .* at most max_positions=3 positions, got 5"),
    ({'alignment': 'hard'}, "conv: .*alignment.* 'hard'.*reinforce"),
    ({'alignment': 'latent'}, "conv: the alignment must train by backpropagation alone; 'latent' needs a sum over pos"),
  ],
)
def test_invalid_options_are_reported(options, message):
  with pytest.raises(UserError, match=message) as caught:
    model = build_conv(**options)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
  assert '\n' not in str(caught.value)
