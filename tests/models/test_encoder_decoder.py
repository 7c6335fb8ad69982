"""Models built from configs: options of all modules, user errors, shared embeddings, dtypes, initial parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.models.decoders import Decoder
from attention_jax.models.encoder_decoder import ModelConfig, build, shift_right
from attention_jax.models.encoders import RNN, BiRNN
from attention_jax.modules.attention import Attention
from attention_jax.tokens import BOS
from tests.models.helpers import SOURCE_WORDS, TARGET_WORDS, B, T, build_tiny, inputs, with_params
from tests.modules.helpers import assert_close, assert_same, variables

ATTENTION = Attention('dot', 'softmax', features=6, heads=2, implementation='xla')


def build_with(**fields):
  return build(ModelConfig(**{'attention': ATTENTION} | fields), SOURCE_WORDS, TARGET_WORDS)


def param_shapes(model, sizes=(SOURCE_WORDS, TARGET_WORDS)):
  """Returns the shapes of the parameters by path."""
  leaves = jax.tree.leaves_with_path(variables(model, *inputs(sizes=sizes))['params'])
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape for path, leaf in leaves}


def test_specs_determine_modules_and_their_options():
  model = build_with(
    encoder='rnn(rnn="lstm", features=14, layers=2, residual=True, direction="backward", dropout=0.1)',
    decoder='luong(rnn="simple", features=8, input_feeding=False)',
    embedding=4,
    dropout=0.3,
  )
  encoder = model.encoder
  cell = model.decoder.cell
  assert (type(encoder), encoder.rnn, encoder.features, encoder.layers) == (RNN, 'lstm', 14, 2)
  assert (encoder.residual, encoder.direction, encoder.dropout) == (True, 'backward', 0.1)
  assert (cell.rnn, cell.features, cell.input_feeding, cell.layers, cell.dropout) == ('simple', 8, False, 1, 0.3)
  assert isinstance(model.decoder, Decoder) and model.decoder.dropout == model.embedding.dropout == 0.3
  assert (model.embedding.size, model.embedding.features) == (TARGET_WORDS, 4)
  assert encoder.embedding.size == SOURCE_WORDS and model.output.size == TARGET_WORDS
  assert cell.attention == ATTENTION


def test_defaults_are_those_of_the_modules():
  model = build_with()
  assert type(model.encoder) is BiRNN and model.encoder == BiRNN(model.encoder.embedding)
  assert model.decoder.cell.rnn == 'gru' and model.embedding.features == ModelConfig().embedding


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'encoder': 'birn'}, r"unknown encoder 'birn' \(did you mean 'birnn'\?\); expected one of: act, birnn, conv, emb"),
    ({'decoder': 'bahdnau'}, r"unknown decoder 'bahdnau' \(did you mean 'bahdanau'\?\); expected one of: bahdanau, "),
    ({'output': 'tie'}, r"unknown output 'tie' \(did you mean 'tied'\?\); expected one of: copynet, pointer, "),
    ({'dtype': 'float16'}, r"unknown dtype 'float16' .*expected one of: bfloat16, float32"),
    ({'encoder': 'birnn(layer=2)'}, r"unknown option of encoder 'birnn': 'layer' \(did you mean 'layers'\?\)"),
    ({'decoder': 'bahdanau(input_feeding=True)'}, "unknown option of decoder 'bahdanau': 'input_feeding'"),
    ({'output': 'vocabulary(size=3)'}, "output 'vocabulary' has no options, got 'size'"),
    ({'encoder': 'rnn(features="8")'}, "encoder 'rnn': option features must be a whole number, got '8'"),
    ({'decoder': 'luong(layers=True)'}, "decoder 'luong': option layers must be a whole number, got True"),
    ({'decoder': 'luong(input_feeding=1)'}, 'option input_feeding must be True or False, got 1'),
    ({'decoder': 'luong(dropout=True)'}, 'option dropout must be a number, got True'),
    ({'encoder': 'rnn(layers=0)'}, "encoder 'rnn': option layers must be at least 1, got 0"),
    ({'dropout': -0.1}, 'config.model.dropout must be at least 0 and less than 1, got -0.1'),
    ({'embedding': 0}, 'config.model.embedding must be at least 1, got 0'),
    ({'attention': ATTENTION.clone(heads=0)}, 'config.model.attention.heads must be at least 1, got 0'),
    ({'encoder': 'rnn(8)'}, r"cannot parse encoder 'rnn\(8\)'"),
    ({'share_embeddings': True}, 'share_embeddings needs a shared vocabulary, got 11 and 13 tokens'),
  ],
)
def test_invalid_fields_are_reported_in_one_line(fields, message):
  with pytest.raises(UserError, match=message) as caught:
    build_with(**fields)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'encoder': 'rnn(rnn="gruu", features=10)'}, "unknown rnn 'gruu'"),
    ({'cell': 'bahdanau', 'options': 'rnn="gruu"'}, "unknown rnn 'gruu'"),
    ({'encoder': 'rnn(direction="up")'}, "unknown direction 'up'; expected one of: backward, both, forward"),
    ({'encoder': 'birnn(features=9)'}, 'encoder: features must be even for two directions, got 9'),
  ],
)
def test_invalid_options_raise_at_initialisation(fields, message):
  with pytest.raises(UserError, match=message):
    param_shapes(build_tiny(**fields))


@pytest.mark.long
def test_shared_embeddings_and_tied_outputs_have_one_table():
  sizes = (TARGET_WORDS, TARGET_WORDS)

  def table_shapes(**fields):
    shapes = param_shapes(build_tiny(sizes=sizes, **fields), sizes).values()
    return sorted(shape for shape in shapes if TARGET_WORDS in shape)

  assert table_shapes() == [(9, 13), (13,), (13, 4), (13, 4)]
  assert table_shapes(share_embeddings=True) == [(9, 13), (13,), (13, 4)]
  assert table_shapes(share_embeddings=True, output='tied') == [(13,), (13, 4)]

  model = build_tiny(sizes=sizes, share_embeddings=True, output='tied')
  args = inputs(sizes=sizes)
  params = variables(model, *args)

  def loss(params):
    return jnp.sum(jnp.sin(model.apply(params, *args).logits))

  gradients = jax.jit(jax.grad(loss))(params)['params']
  [table] = [leaf for leaf in jax.tree.leaves(gradients) if leaf.shape == (TARGET_WORDS, 4)]
  assert np.all(np.any(table != 0, axis=1))  # every word has a logit, and therefore a gradient


def encode(model, params, source, mask):
  def call_encoder(model, source, mask):
    return model.encoder(source, mask, True)

  return jax.jit(functools.partial(model.apply, method=call_encoder))(params, source, mask)


@pytest.mark.long
def test_bfloat16_computes_in_bfloat16_with_float32_parameters_logits_and_weights():
  exact, rounded = (build_tiny('bahdanau', 'layers=2', heads=2, dtype=d) for d in ('float32', 'bfloat16'))
  params, args = with_params(exact, scale=0.3)
  encoded = jax.eval_shape(functools.partial(encode, rounded), params, *args[:2])
  assert encoded.memory.dtype == encoded.final.dtype == jnp.bfloat16
  exact_outputs, outputs = (jax.jit(model.apply)(params, *args) for model in (exact, rounded))
  assert outputs.logits.dtype == outputs.weights.dtype == jnp.float32
  assert_close(outputs, exact_outputs, rtol=0, atol=0.02)


@pytest.mark.long
def test_initial_parameters_are_finite_and_a_function_of_the_seed():
  model = build_tiny('luong', 'rnn="gru"', output='tied')
  init = jax.jit(lambda rng: model.init(rng, *inputs())['params'])
  params, same_seed, other_seed = (init(jax.random.key(seed)) for seed in (1, 1, 2))
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))
  assert_same(params, same_seed)
  assert jax.tree.all(jax.tree.map(lambda x, y: x.ndim < 2 or np.any(x != y), params, other_seed))
  logits = jax.jit(model.apply)({'params': params}, *inputs()).logits
  assert logits.shape == (B, T, TARGET_WORDS) and np.all(np.isfinite(logits))


def test_shift_right_prepends_bos():
  np.testing.assert_array_equal(shift_right(jnp.array([[5, 6, 2], [7, 2, 0]])), [[BOS, 5, 6], [BOS, 7, 2]])
