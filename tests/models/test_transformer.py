"""Transformers: the paper's formulas by NumPy, stepping with a cache, and every option."""

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
from attention_jax.models.encoder_decoder import shift_right
from attention_jax.models.encoders import TransformerEncoder
from attention_jax.modules.embedding import Embedding
from attention_jax.modules.positions import POSITIONS
from attention_jax.modules.transformer import ACTIVATIONS, NORMS, visibility_mask
from attention_jax.tokens import UNK
from tests.models.helpers import LENGTHS, TARGET_WORDS, TRANSFORMER_FEATURES, B, S, T, build_transformer, inputs
from tests.modules.helpers import assert_close, assert_same, variables
from tests.sweeps import sample_cases

run = jax.jit(lambda model, *given: model.apply(*given), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def stepped(model, params, source, mask, target):
  """One step after the other, with room for two more than are made."""
  carry, memory = model.apply(params, source, mask, target.shape[1] + 2, method='start')
  step = lambda carry, token: model.apply(params, carry, token, memory, method='step')
  _, outputs = jax.lax.scan(step, carry, shift_right(target).T)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


# Each row of every table once at least, on either side, and each score and alignment looking at both sequences.
ALIGNMENTS = [name for name, row in aj.ALIGNMENTS.items() if row.trains_by_backprop]
_TABLES = (list(aj.SCORES), ALIGNMENTS, list(POSITIONS), list(NORMS), list(ACTIVATIONS), (False, True), (0, 2))
CASES = list(itertools.islice(zip(*map(itertools.cycle, _TABLES), strict=False), len(ALIGNMENTS)))
OPTIONS = ('score', 'alignment', 'position', 'norm', 'activation', 'first', 'window')


@pytest.mark.parametrize(OPTIONS, sample_cases(CASES, 4))
def test_stepping_equals_all_at_once_and_padding_is_not_seen(
  score, alignment, position, norm, activation, first, window
):
  score = score if position != 'rope' or aj.SCORES[score].rotation_invariant else 'cosine'
  own = (
    f'score="{score}", alignment="{alignment}", position="{position}", norm="{norm}", activation="{activation}", '
    f'norm_first={first}, window={window}, sinks={int(window > 0)}, kv_heads={2 if first else 0}'
  )
  model = build_transformer(own, own, score=score, alignment=alignment, heads=1 if window else 4)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)._replace(linear=())
  heads = model.decoder.attention.heads
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.layers.shape == (B, T, 2, heads, S)
  assert np.all(outputs.layers[~np.broadcast_to(mask[:, None, None, None], outputs.layers.shape)] == 0)
  assert_close(stepped(model, params, source, mask, target), outputs)
  assert_same(run(model, params, jnp.where(mask, source, 3), mask, target)._replace(linear=()), outputs)
  later = run(model, params, source, mask, target.at[:, 3:].set(5))
  assert_same(later.logits[:, :3], outputs.logits[:, :3])


def test_layers_are_left_out_of_whole_batches_while_training():
  source, mask, target = inputs()
  half, plain = (build_transformer(*[f'layer_dropout={p}'] * 2) for p in (0.5, 0.0))
  params = variables(half, source, mask, target)
  at_test = [run(model, params, source, mask, target).logits for model in (half, plain)]
  assert_same(*at_test)

  def drawn(model, draws):
    one = lambda rng: model.apply(params, source, mask, target, False, rngs={'dropout': rng}).logits
    return np.asarray(jax.jit(lambda: jax.vmap(one)(jax.random.split(jax.random.key(0), draws)))())

  # Each of two layers a side is there or not; if both of the decoder are not, it does not matter which of the encoder.
  several = np.unique(np.round(drawn(half, 200), 4), axis=0)
  assert len(several) == 4 * 3 + 1
  none = drawn(build_transformer(*['layer_dropout=0.999999'] * 2), 1)[0]
  assert any(np.allclose(none, one, atol=1e-3) for one in several)
  entered = half.bind(params).decoder.embed_inputs(half.bind(params).embedding(shift_right(target)), jnp.arange(T))
  assert_close(half.bind(params).output(entered).logits(), none)


@pytest.mark.parametrize('first', [False, True])
def test_deep_layers_tell_positions_apart_before_they_have_learned(first):
  embedding = Embedding(50, 32)
  encoder = TransformerEncoder(features=32, layers=6, heads=4, hidden=64, norm_first=first, embedding=embedding)
  source = jax.random.randint(jax.random.key(0), (16, 12), UNK + 1, 50)
  mask = jnp.ones(source.shape, bool)
  encoded, _ = jax.jit(lambda: encoder.init_with_output(jax.random.key(0), source, mask, True))()
  memory = np.asarray(encoded.memory)
  # Of embeddings with positions it is about two thirds; kernels that were not scaled left 1 to 6 % after the norms.
  assert memory.var(1).mean() > 0.4 * (memory**2).mean()


def test_gradients_reach_every_parameter():
  own = 'position="shaw", norm_first=True, activation="swiglu", kv_heads=2'
  model = build_transformer(own, own, score='additive', alignment='entmax15')
  source, mask, target = inputs()
  mask = mask.at[1].set(False)  # a filler row
  params = variables(model, source, mask, target)
  loss = lambda params: -jnp.mean(jax.nn.log_softmax(model.apply(params, source, mask, target).logits)[0, ..., 5])
  for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
    assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


# ------------------------------------------------------------------------------------------------ the paper, literally


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def layer_norm(x, p):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p['scale'] + p['bias']


def attention(p, queries, memory, shown):
  """Equation 1 for each head, and section 3.2.2. queries [T, D], memory [S, D], shown [T, S]."""
  contexts = []
  for q, k, v in zip(*(p[f'{side}_kernel']['kernel'] for side in ('query', 'key', 'value')), strict=True):
    scores = (queries @ q) @ (memory @ k).T / np.sqrt(q.shape[1])
    contexts.append(softmax(np.where(shown, scores, -np.inf)) @ (memory @ v))
  return np.concatenate(contexts, 1) @ p['join']['kernel']


def feed_forward(p, x):
  hidden = np.maximum(0, x @ p['Dense_0']['kernel'] + p['Dense_0']['bias'])
  return hidden @ p['Dense_1']['kernel'] + p['Dense_1']['bias']


def positions(size):
  angles = np.arange(size)[:, None] / 10000 ** (2 * np.arange(TRANSFORMER_FEATURES // 2) / TRANSFORMER_FEATURES)
  return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def literal(params, source, target):
  """Logits of one pair of sentences without padding; norms stand after the sums."""
  encoder, decoder = params['encoder'], params['decoder']
  root, norm = np.sqrt(TRANSFORMER_FEATURES), lambda p, i: p[f'residuals_{i}']['LayerNorm_0']
  x = encoder['embedding']['table']['embedding'][source] * root + positions(len(source))
  everything = np.ones((len(source), len(source)), bool)
  for i in range(2):
    p = encoder[f'blocks_{i}']
    x = layer_norm(x + attention(p['attention'], x, x, everything), norm(p, 0))
    x = layer_norm(x + feed_forward(p['feed'], x), norm(p, 1))
  entering = [1, *target[:-1]]  # BOS
  y = params['embedding']['table']['embedding'][np.asarray(entering)] * root + positions(len(target))
  for i in range(2):
    p = decoder[f'blocks_{i}']
    y = layer_norm(y + attention(p['attention'], y, y, np.tri(len(target), dtype=bool)), norm(p, 0))
    y = layer_norm(y + attention(p['cross'], y, x, np.ones((len(target), len(source)), bool)), norm(p, 1))
    y = layer_norm(y + feed_forward(p['feed'], y), norm(p, 2))
  return y @ params['output']['kernel'] + params['output']['bias']


def test_the_paper_sentence_by_sentence():
  model = build_transformer()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = run(model, params, source, mask, target)
  plain = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  for i, size in enumerate(LENGTHS):
    expected = literal(plain, np.asarray(source[i, :size]), np.asarray(target[i]))
    np.testing.assert_allclose(outputs.logits[i], expected, rtol=1e-4, atol=1e-5)


def test_what_a_window_shows():
  shown = visibility_mask(jnp.arange(6), 6, causal=True, window=1, sinks=1).astype(int)
  assert shown[4].tolist() == [1, 0, 0, 1, 1, 0] and shown[0].tolist() == [1, 0, 0, 0, 0, 0]
  both = visibility_mask(jnp.arange(6), 6, causal=False, window=2).astype(int)
  assert both[1].tolist() == [1, 1, 1, 1, 0, 0]
  assert visibility_mask(jnp.asarray([2]), 4, causal=False).all()


# --------------------------------------------------------------------------------------------------- in search


def test_incremental_beams_score_as_the_whole_does():
  model = build_transformer('position="rope"', 'position="t5", norm_first=True')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  found = compile_beam_search(model, 3, 6, search.Ranking(alpha=0.0))(params['params'], source, mask)
  for k in range(3):
    log_probs = jax.nn.log_softmax(run(model, params, source, mask, found.tokens[:, k]).logits)
    chosen = jnp.take_along_axis(log_probs, found.tokens[:, k, :, None], -1)[..., 0]
    real = jnp.arange(6)[None] < found.lengths[:, k, None]
    np.testing.assert_allclose(found.log_probs[:, k], jnp.where(real, chosen, 0).sum(-1), rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_layer_that_was_asked_for():
  source, mask, target = inputs()
  for layer in (0, 1, -1, -2):
    model = build_transformer(decoder=f'weights_of={layer}')
    outputs = run(model, variables(model, source, mask, target), source, mask, target)
    assert_close(outputs.weights, outputs.layers[:, :, layer].mean(2))


def test_any_encoder_with_any_decoder():
  source, mask, target = inputs()
  for sides in (
    {'encoder_spec': f'birnn(features={TRANSFORMER_FEATURES})'},
    {'decoder_spec': 'bahdanau(features=8, readout=9)'},
  ):
    model = build_transformer(score='general', heads=1, **sides)
    outputs = run(model, variables(model, source, mask, target), source, mask, target)
    assert np.all(np.isfinite(outputs.logits))


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'encoder': 'position="rop"'}, r"unknown position 'rop' \(did you mean 'rope'\?\); expected one of: alibi, "),
    ({'decoder': 'norm="batch"'}, "unknown norm 'batch'; expected one of: layer, rms"),
    ({'encoder': 'activation="elu"'}, "unknown activation 'elu'"),
    ({'encoder': 'position="rope", score="additive"'}, "not 'additive'; possible: dot, scaled_dot, cosine"),
    ({'decoder': 'alignment="latent"'}, "alignment 'latent' sums over positions, which recurrent decoders alone offer"),
    ({'alignment': 'hard'}, "transformer: alignment 'hard' learns by the loss 'reinforce'"),
    ({'decoder': 'kv_heads=3'}, 'attention: heads=4 cannot share kv_heads=3; possible: a divisor, or 0'),
    ({'encoder': 'position="rope", score="general"'}, "turn q and k of a product, not 'general'"),
    ({'encoder': 'position="rope(max_positions=9)"'}, "unknown option of position 'rope': 'max_positions'"),
    ({'encoder': 'position="t5(buckets=2)"'}, "position 't5': buckets=2, max_distance=128; expected 4"),
    ({'encoder': 'position="shaw(max_distance=0)"'}, "position 'shaw': option max_distance must be at least 1, got 0"),
    ({'decoder': 'sinks=2'}, 'sinks=2 are seen beyond a window, and window=0 sees everything'),
    ({'decoder': 'weights_of=2'}, 'transformer: weights_of must be from -2 to 1, got 2'),
    ({'encoder': 'heads=5'}, 'transformer: features=8 cannot be divided among heads=5'),
    ({'encoder': 'layers=0'}, "encoder 'transformer': option layers must be at least 1, got 0"),
    ({'encoder': 'position="learned(max_positions=3)"'}, "position 'learned': max_positions=3, got a sequence of 7"),
    ({'features': 4}, 'model.attention.features=4, decoder features=8; they must be the same'),
    ({'decoder': 'implementation="flash", alignment="sparsemax"'}, "'flash' cannot compute this: the alignment is not"),
  ],
)
def test_options_that_do_not_go_together_are_named(given, message):
  with pytest.raises(UserError, match=message) as caught:
    model = build_transformer(**given)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
  assert '\n' not in str(caught.value)
