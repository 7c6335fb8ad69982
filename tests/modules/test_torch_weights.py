"""Models with converted weights of torch and Joey NMT return the outputs that make_torch_fixtures.py stored."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.decoders import TransformerDecoder
from attention_jax.models.encoder_decoder import build
from attention_jax.models.encoders import TransformerEncoder
from attention_jax.modules.attention import Attention
from attention_jax.modules.parameter_files import read_arrays, read_metadata, unflatten_names
from attention_jax.modules.recurrent import RecurrentCell
from attention_jax.modules.torch_weights import convert_weights
from tests.models.helpers import ModelConfig
from tests.modules.helpers import attend_all

FIXTURES = Path(__file__).parent / 'torch_fixtures'
CLOSE = {'rtol': 1e-5, 'atol': 1e-5}
FEATURES, HEADS = 8, 2


def read(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns the weights, and the inputs and outputs, of a file of torch_fixtures."""
  arrays = read_arrays(FIXTURES / f'{name}.safetensors')
  weights = {key: array for key, array in arrays.items() if not key.startswith('io.')}
  return weights, {key[3:]: jnp.asarray(array) for key, array in arrays.items() if key.startswith('io.')}


class Vectors(nn.Module):
  """Stands for an embedding where the inputs are vectors."""

  def __call__(self, x, deterministic=True):
    return x


def apply_converted(module: nn.Module, weights, *inputs, method=None):
  """Result of a module with converted weights, which must have exactly the names and shapes of its parameters."""
  like = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, method=method))['params']
  params = jax.tree.map(jnp.asarray, unflatten_names(weights, like))
  return jax.jit(lambda params, *inputs: module.apply({'params': params}, *inputs, method=method))(params, *inputs)


def test_fixtures_name_their_versions():
  for path in FIXTURES.iterdir():
    metadata = read_metadata(path)
    assert metadata['torch'].startswith('2.13.0') and metadata['joeynmt'] == '2.3.0', path


@pytest.mark.long
def test_multihead_attention_equals_torch():
  weights, io = read('multihead_attention')
  module = aj.Attention('scaled_dot', features=FEATURES, heads=HEADS, bias=True)
  converted = convert_weights('multihead_attention', weights, HEADS)
  attended = apply_converted(module, converted, io['query'], io['memory'], io['mask'], method=attend_all)
  np.testing.assert_allclose(attended.context, io['context'], **CLOSE)
  np.testing.assert_allclose(attended.weights, io['weights'], **CLOSE)


@pytest.mark.parametrize('norm_first', [False, True])
def test_transformer_equals_torch(norm_first):
  weights, io = read(f'transformer_{"pre" if norm_first else "post"}')
  options = {'features': FEATURES, 'layers': 2, 'heads': HEADS, 'hidden': 12, 'position': 'none', 'bias': True}
  options |= {'norm_first': norm_first, 'normalize_last': True}
  cross = aj.Attention('scaled_dot', features=FEATURES, heads=HEADS, bias=True)

  class EncoderAndDecoder(nn.Module):
    def setup(self):
      self.encoder = TransformerEncoder(embedding=Vectors(), **options)
      self.decoder = TransformerDecoder(attention=cross, **options)

    def __call__(self, source, mask, target):
      return self.decoder(self.encoder(source, mask, True), target, True).features

  scale = FEATURES**-0.5  # our Transformers multiply embeddings by √D
  inputs = (io['source'] * scale, io['mask'], io['target'] * scale)
  result = apply_converted(EncoderAndDecoder(), convert_weights('transformer', weights, HEADS), *inputs)
  np.testing.assert_allclose(result, io['result'], **CLOSE)


@pytest.mark.long
def test_bahdanau_decoder_equals_torch():
  weights, io = read('bahdanau')
  params = {name: jnp.asarray(array) for name, array in convert_weights('bahdanau', weights).items()}
  attention = {'score': {name: params[f'attention.score.{name}'] for name in ('v', 'bias')}}
  attention |= {side: params[f'attention.{side}'] for side in ('query', 'key')}
  cell = RecurrentCell('gru', FEATURES)
  like = jax.eval_shape(lambda: cell.init(jax.random.key(0), jnp.ones((1, 16)), method='project'))['params']
  cell_params = unflatten_names(
    {name.removeprefix('cell.'): array for name, array in params.items() if name.startswith('cell.')}, like
  )

  def biased_additive(query, key, *, v, bias):
    return aj.scores.additive(query, key + bias[None], v=v)

  row = aj.Row(biased_additive, params={'v': aj.Param(('features',)), 'bias': aj.Param(('features',))}, project=True)

  def decode(tokens, memory, mask, state):
    """Decodes one sequence."""
    remembered = aj.remember(memory, memory, mask, params=attention)

    def step(loop, token):
      carry, state = loop
      query_params = {name: value for name, value in attention.items() if name != 'key'}
      carry, attended = aj.attend_step(row, 'softmax', query_params, carry, state, remembered)
      inputs = jnp.concatenate([params['embedding'][token], attended.context])
      variables = {'params': cell_params}
      projected = cell.apply(variables, inputs, method='project')
      (state,) = cell.apply(variables, (state,), projected)
      return (carry, state), (state @ params['output.kernel'] + params['output.bias'], attended.weights)

    return jax.lax.scan(step, (aj.init_carry(row, 'softmax', len(memory)), state), tokens)[1]

  logits, attention_weights = jax.vmap(decode)(io['tokens'], io['memory'], io['mask'], io['state'])
  np.testing.assert_allclose(logits, io['logits'], **CLOSE)
  np.testing.assert_allclose(attention_weights, io['weights'], **CLOSE)


TRANSFORMER = 'transformer(features=8, layers=2, heads=2, hidden=12, bias=True, epsilon=1e-6, norm_first={})'
HEADS_OF_TRANSFORMER = {'score': 'scaled_dot', 'features': 8, 'heads': 2, 'bias': True}
JOEYNMT = {
  'joeynmt_bahdanau': (
    'birnn(rnn="gru", features=8, layers=2)',
    'luong(rnn="gru", features=8, layers=2, readout_bias=True)',
    {'score': 'additive', 'features': 8},
  ),
  'joeynmt_luong': (
    'birnn(rnn="lstm", features=8)',
    'luong(rnn="lstm", features=8, readout_bias=True, bridge=False)',
    {'score': 'general', 'features': 8},
  ),
  'joeynmt_transformer_pre': (*[TRANSFORMER.format(True)] * 2, HEADS_OF_TRANSFORMER),
  'joeynmt_transformer_post': (*[TRANSFORMER.format(False)] * 2, HEADS_OF_TRANSFORMER),
}


@pytest.mark.parametrize('name', JOEYNMT)
def test_models_equal_joeynmt(name):
  weights, io = read(name)
  encoder, decoder, attention = JOEYNMT[name]
  is_transformer = 'transformer' in name
  embedding = FEATURES if is_transformer else 6
  model = build(ModelConfig(encoder, decoder, embedding=embedding, attention=Attention(**attention)), 11, 9)
  layout = 'joeynmt_transformer' if is_transformer else 'joeynmt_recurrent'
  # Joey NMT begins with UNK, PAD, BOS and EOS. The vocabularies of the fixtures have 11 and 9 tokens.
  to_our_id = jnp.array([3, 0, 1, 2, *range(4, 11)])
  source, target = (to_our_id[io[side]] for side in ('source', 'target'))
  output = apply_converted(model, convert_weights(layout, weights, HEADS), source, io['mask'], target)
  np.testing.assert_allclose(output.logits[..., to_our_id[:9]], io['logits'], **CLOSE)
  np.testing.assert_allclose(output.weights, io['weights'], **CLOSE)


@pytest.mark.long
@pytest.mark.parametrize(('encoder', 'decoder'), [('bahdanau', 'luong'), ('luong', 'bahdanau')])
def test_a_joeynmt_model_with_an_lstm_on_one_side_and_a_gru_on_the_other_is_converted(encoder, decoder):
  sides = [f'joeynmt_{name}' for name in (encoder, decoder)]
  weights = [read(name)[0] for name in sides]
  joined = _join(*weights, 'encoder.rnn')
  converted = convert_weights('joeynmt_recurrent', joined)
  expected = [convert_weights('joeynmt_recurrent', arrays) for arrays in weights]
  for name, array in _join(*expected, 'encoder.RecurrentLayer').items():
    if 'bridges' not in name:  # bridges have a row for each entry of the encoder states
      np.testing.assert_array_equal(converted[name], array, err_msg=name)
  if decoder == 'bahdanau':
    kernel = converted['decoder.cell.stack.bridges_0_0.kernel'].reshape(2, 2, 4, 8)  # direction, output or cell
    np.testing.assert_array_equal(kernel[:, 0].reshape(8, 8), joined['decoder.bridge_layer.weight'].T)
    assert not kernel[:, 1].any()
  attention = Attention(**JOEYNMT[sides[1]][2])
  config = ModelConfig(JOEYNMT[sides[0]][0], JOEYNMT[sides[1]][1], embedding=6, attention=attention)
  model = build(config, 11, 9)
  ids = jnp.full((1, 2), 4)
  assert np.all(np.isfinite(apply_converted(model, converted, ids, ids > 0, ids).logits))


def _join(encoder, decoder, prefix):
  """The arrays of one model whose names begin with `prefix`, and the other arrays of another model."""
  arrays = {name: array for name, array in encoder.items() if name.startswith(prefix)}
  return arrays | {name: array for name, array in decoder.items() if not name.startswith(prefix)}


@pytest.mark.parametrize(
  ('layout', 'change', 'heads', 'message'),
  [
    ('joeynmt', {}, HEADS, "unknown layout 'joeynmt' .*; expected one of: bahdanau, joeynmt_recurrent, joeynmt_tr"),
    ('multihead_attention', {'out_proj.bias': None}, HEADS, r'missing arrays \(1\): out_proj.bias'),
    ('multihead_attention', {'more': np.ones(1)}, HEADS, r'arrays that are not of this layout \(1\): more'),
    ('joeynmt_recurrent', {}, HEADS, r'joeynmt_recurrent: missing arrays \(1\): decoder.rnn.weight_hh_l0'),
    ('multihead_attention', {}, 0, 'in_proj_weight: heads must be at least 1 and divide 8, .*, got 0'),
    ('multihead_attention', {}, 3, 'in_proj_weight: heads must be at least 1 and divide 8, .*, got 3'),
  ],
)
def test_mismatches_are_named_in_one_line(layout, change, heads, message):
  weights, _ = read('multihead_attention')
  arrays = {name: array for name, array in (weights | change).items() if array is not None}
  with pytest.raises(aj.UserError, match=message) as error:
    convert_weights(layout, arrays, heads)
  assert '\n' not in str(error.value)
