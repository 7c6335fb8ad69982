"""Convolutions: the paper's formulas by NumPy, stepping with a cache of inputs, and what must not be seen."""

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


run = jax.jit(lambda model, *given: model.apply(*given)._replace(linear=()), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def stepped(model, params, source, mask, target):
  """One step after the other, with room for two more than are made."""
  carry, memory = model.apply(params, source, mask, target.shape[1] + 2, method='start')
  assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(carry)), 'search reorders the first axis'
  step = lambda carry, token: model.apply(params, carry, token, memory, method='step')
  _, outputs = jax.lax.scan(step, carry, shift_right(target).T)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


@pytest.mark.parametrize(
  ('score', 'alignment', 'heads', 'width'),
  [('dot', 'softmax', 1, 3), ('additive', 'mocha', 1, 4), ('coverage', 'sparsemax', 2, 1), ('general', 'gumbel', 4, 7)],
)
def test_stepping_equals_all_at_once_and_what_must_not_be_seen_is_not(score, alignment, heads, width):
  model = build_conv(decoder=f'width={width}', score=score, alignment=alignment, heads=heads)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.layers.shape == (B, T, 2, heads, S)
  assert_close(outputs.weights, outputs.layers[:, :, -1].mean(2))
  assert np.all(outputs.layers[~np.broadcast_to(mask[:, None, None, None], outputs.layers.shape)] == 0)
  assert_close(stepped(model, params, source, mask, target), outputs, rtol=1e-5)

  assert_same(run(model, params, jnp.where(mask, source, 3), mask, target), outputs)
  order = jnp.asarray([2, 0, 1])
  assert_same(run(model, params, source[order], mask[order], target[order]).logits, outputs.logits[order])
  later = run(model, params, source, mask, target.at[:, 3:].set(5))
  # Its fourth token is read by the fifth step first.
  assert_same(later.logits[:, :4], outputs.logits[:, :4])
  assert np.all(np.any(later.logits[:, 4] != outputs.logits[:, 4], axis=-1))


def shapes(model):
  """Of its outputs, without computing them."""
  return jax.eval_shape(lambda *given: model.init_with_output(RNGS, *given)[0], *inputs())


def test_every_score_and_every_alignment_has_its_place():
  alignments = [name for name, row in aj.ALIGNMENTS.items() if row.trains_by_backprop]
  for score, alignment in zip(itertools.cycle(aj.SCORES), alignments, strict=False):
    sides = {'encoder_spec': 'conv(features=5, layers=1)', 'decoder_spec': 'conv(features=6, layers=1)'}
    assert shapes(build_conv(score=score, alignment=alignment, **sides)).layers.shape == (B, T, 1, 1, S)


def test_how_much_padding_there_is_changes_nothing():
  model = build_conv('width=5')
  source, mask, target = inputs()
  params, size = variables(model, source, mask, target), int(mask[1].sum())
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


def test_the_encoder_hears_the_mean_of_the_layers_and_the_embeddings_hear_all(monkeypatch):
  """Section 3.4: the gradient of the encoder is divided by the number of attentions, but not that of embeddings."""
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  features = lambda model, encoded, x: model.decoder(encoded, x, True).features

  def loss(memory, embedded):
    encoded = Encoded(memory, mask, (), memory + embedded)
    return jnp.sum(model.apply(params, encoded, draw(B, T, E), method=features) ** 2)

  given = draw(B, S, E, seed=1), draw(B, S, E, seed=2)
  gradients = lambda: jax.jit(jax.grad(lambda *given: loss(*given), (0, 1)))(*given)  # traced anew each time
  of_memory, of_embeddings = gradients()
  monkeypatch.setattr(convolutional, 'scale_gradient', lambda x, part: x)
  whole = gradients()
  assert_close((of_memory, of_embeddings), (whole[0] / 2, whole[1]))
  assert np.all(np.any(of_memory != 0, axis=-1) == mask)


# ------------------------------------------------------------------------------------------------ the paper, literally


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def linear(p, x):
  """One output after the other, each with a weight vector g v / |v|."""
  columns = [g * v / np.sqrt(v @ v) for v, g in zip(p['direction'].T, p['gain'], strict=True)]
  return np.array([w @ x + b for w, b in zip(columns, p['bias'], strict=True)])


def gated(p, rows):
  """v(W [x; ...] + b), v([a; b]) = a * sigmoid(b)."""
  a, b = np.split(linear(p['Normed_0'], np.concatenate(rows)), 2)
  return a * sigmoid(b)


def literal(params, source, target):
  """Logits and weights [T, L, S] of one pair of sentences without padding; convolutions read three positions."""
  encoder, decoder, root = params['encoder'], params['decoder'], np.sqrt(0.5)
  e = encoder['embedding']['table']['embedding'][source] + encoder['positions']['table'][: len(source)]
  x = [linear(encoder['widen'], row) for row in e]
  for i in range(2):
    p, ends = encoder[f'blocks_{i}']['GatedConvolution_0'], [np.zeros(len(x[0]))]
    padded = ends + x + ends
    x = [(gated(p, padded[j : j + 3]) + x[j]) * root for j in range(len(x))]
  z = np.array([linear(encoder['narrow'], row) for row in x])

  entering = [1, *target[:-1]]  # BOS
  g = params['embedding']['table']['embedding'][entering] + decoder['positions']['table'][: len(target)]
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


def test_the_paper_sentence_by_sentence():
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)
  plain = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  for i, size in enumerate(LENGTHS):
    logits, weights = literal(plain, np.asarray(source[i, :size]), np.asarray(target[i]))
    np.testing.assert_allclose(outputs.logits[i], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs.layers[i, :, :, 0, :size], weights, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------- with all the rest


def test_incremental_beams_score_as_the_whole_does():
  model = build_conv()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  found = compile_beam_search(model, 3, 6, search.Ranking(alpha=0.0))(params['params'], source, mask)
  for k in range(3):
    log_probs = jax.nn.log_softmax(run(model, params, source, mask, found.tokens[:, k]).logits)
    chosen = jnp.take_along_axis(log_probs, found.tokens[:, k, :, None], -1)[..., 0]
    real = jnp.arange(6)[None] < found.lengths[:, k, None]
    np.testing.assert_allclose(found.log_probs[:, k], jnp.where(real, chosen, 0).sum(-1), rtol=1e-4, atol=1e-5)


SIDES = [
  {'encoder_spec': 'birnn(features=10)', 'heads': 2},
  {'decoder_spec': 'bahdanau(features=8, readout=9)', 'score': 'additive'},
  {'decoder_spec': 'transformer(features=8, layers=1, heads=2, hidden=8)', 'heads': 2},
]


@pytest.mark.parametrize('sides', SIDES)
def test_any_encoder_with_any_decoder(sides):
  assert shapes(build_conv(**sides)).logits.shape == (B, T, TARGET_WORDS)


def test_attention_gives_the_memory_and_the_embeddings():
  """Whatever the decoder."""
  model = build_conv(**SIDES[1])
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  both = lambda model, *given: (model.encoder(*given, True), model.start(*given, T)[1].memory)
  encoded, memory = jax.jit(functools.partial(model.apply, method=both))(params, source, mask)
  own = params['params']['encoder']
  embedded = own['embedding']['table']['embedding'][source] + own['positions']['table'][None, :S]
  assert_close(memory.value[:, 0], jnp.where(mask[..., None], encoded.memory + embedded, 0))
  assert np.all(memory.value[:, 0][~mask] == 0) and np.all(encoded.memory[~mask] == 0)


def test_dropout_is_only_there_while_training():
  source, mask, target = inputs()
  model = build_conv(dropout=0.5)
  params = variables(model, source, mask, target)
  apply = jax.jit(model.apply, static_argnums=4)
  trained = lambda seed: apply(params, source, mask, target, False, rngs={'dropout': jax.random.key(seed)}).logits
  assert np.any(trained(1) != trained(2)) and np.any(trained(1) != run(model, params, source, mask, target).logits)


def test_weights_are_those_of_the_layer_that_was_asked_for():
  source, mask, target = inputs()
  model = build_conv(decoder='weights_of=0', heads=2)
  outputs = run(model, variables(model, source, mask, target), source, mask, target)
  assert_close(outputs.weights, outputs.layers[:, :, 0].mean(2))


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'encoder': 'width=4'}, 'conv: width=4 of the encoder has no position in its middle; possible: odd numbers'),
    ({'encoder': 'width=0'}, "encoder 'conv': width is 0; possible: 1 or more"),
    ({'decoder': 'weights_of=2'}, 'conv: weights_of=2; possible: -2 to 1'),
    ({'decoder': 'heads=2'}, "unknown option of decoder 'conv': 'heads'"),
    ({'encoder': 'max_positions=3'}, "position 'learned': max_positions=3, got a sequence of 7"),
    ({'decoder': 'max_positions=3'}, "position 'learned': max_positions=3, got a sequence of 5"),
    ({'alignment': 'hard'}, "conv: alignment 'hard' learns by the loss 'reinforce'"),
    ({'alignment': 'latent'}, "conv: alignment 'latent' sums over positions, which recurrent decoders alone offer"),
  ],
)
def test_options_that_do_not_go_together_are_named(given, message):
  with pytest.raises(UserError, match=message) as caught:
    model = build_conv(**given)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
  assert '\n' not in str(caught.value)
