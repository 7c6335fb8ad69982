"""Interventions on models: stepping equals scanning with edited weights, and other weights are unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.analysis import interventions
from attention_jax.analysis.interventions import AnalysedPair, edited_model
from attention_jax.errors import UserError
from attention_jax.functional.edits import Edit, largest
from tests.models.helpers import S, T, build_conv, build_tiny, build_transformer, inputs, run_steps
from tests.modules.helpers import variables

BUILDERS = {
  'bahdanau': build_tiny,
  'luong': lambda: build_tiny('luong', 'input_feeding=False'),
  'gnmt': lambda: build_tiny('gnmt', 'layers=2'),
  'transformer': build_transformer,
  'conv': build_conv,
}


@functools.cache
def init_params(model):
  return variables(model, *inputs())['params']


def apply(model, params, *inputs):
  return jax.jit(model.apply)({'params': params}, *inputs)


def log_probs_of(pair, mask=None):
  return jax.jit(lambda params: interventions.target_log_probs(pair._replace(params=params), mask))(pair.params)


def assert_edit_at_2(model, params, edited, args):
  """Asserts that an edit of step 2 changes no earlier step, and that stepping equals scanning; returns the outputs."""
  outputs, natural = apply(edited, params, *args), apply(model, params, *args)
  np.testing.assert_allclose(outputs.logits[:, :2], natural.logits[:, :2], rtol=1e-4, atol=1e-5)
  assert abs(outputs.logits[:, 2] - natural.logits[:, 2]).max() > 1e-4
  stepped = run_steps(edited, {'params': params}, *args)
  np.testing.assert_allclose(stepped.logits, outputs.logits, rtol=1e-3, atol=2e-5)
  np.testing.assert_allclose(stepped.weights, outputs.weights, rtol=1e-3, atol=1e-6)
  return outputs, natural


@pytest.mark.long
@pytest.mark.parametrize('name', BUILDERS)
def test_stepping_equals_scanning_with_fixed_weights(name):
  model = BUILDERS[name]()
  edited = edited_model(model, 'fixed(at=2, position=1)')
  outputs, _ = assert_edit_at_2(model, init_params(model), edited, inputs())
  np.testing.assert_array_equal(outputs.weights[:, 2], jnp.eye(S)[None, 1].repeat(3, 0))


@pytest.fixture(scope='module')
def transformer():
  model = build_transformer()
  return model, init_params(model), inputs()


@pytest.mark.long
@pytest.mark.parametrize('layer', [0, 1])
def test_an_edit_of_one_layer_and_head_changes_no_other_weights_up_to_its_layer(transformer, layer):
  model, params, args = transformer
  edited = edited_model(model, f'fixed(at=2, position=1, layer={layer}, head=3)')
  outputs, natural = assert_edit_at_2(model, params, edited, args)
  expected = np.array(natural.layers)  # [B, T, L, N, S]
  expected[:, 2, layer, 3] = np.eye(S)[1]
  np.testing.assert_allclose(outputs.layers[:, :, : layer + 1], expected[:, :, : layer + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_edits_of_several_layers_and_heads_combine(transformer):
  model, params, (source, mask, target) = transformer
  edited = edited_model(edited_model(model, 'uniform(layer=0, head=1)'), Edit(largest, layer=1))
  weights = apply(edited, params, source, mask, target).layers
  natural = apply(model, params, source, mask, target).layers
  uniform = np.broadcast_to((mask / mask.sum(-1, keepdims=True))[:, None], (3, T, S))
  np.testing.assert_allclose(weights[:, :, 0, 1], uniform, rtol=1e-6)
  np.testing.assert_allclose(weights[:, :, 0, [0, 2, 3]], natural[:, :, 0, [0, 2, 3]], rtol=1e-5, atol=1e-6)
  assert set(np.unique(weights[:, :, 1])) == {0, 1}


@pytest.mark.parametrize(
  ('model', 'edit', 'message'),
  [
    (build_transformer(), 'uniform(layer=2)', 'layer must be less than 2, the number of attention layers, got 2'),
    (build_transformer(), 'uniform(head=4)', 'head must be less than 4, the number of attention heads, got 4'),
    (build_transformer(), Edit('uniform', head=-1), 'edit: head must be at least 0, got -1'),
    (build_transformer(), 'uniform(layer=True)', 'edit: layer must be a whole number, got True'),
    (build_tiny('gnmt', 'layers=2'), 'uniform(layer=1)', 'layer must be less than 1'),
    (build_tiny('gnmt', 'layers=2'), 'uniform(head=1)', 'head must be less than 1'),
    (build_tiny('plain'), 'uniform', 'does not attend'),
  ],
)
def test_layers_and_heads_that_do_not_exist_raise(model, edit, message):
  with pytest.raises(UserError, match=message):
    edited_model(model, edit)


def test_a_recurrent_decoder_has_one_layer_and_one_head():
  assert edited_model(build_tiny(), 'uniform(layer=0, head=0)').decoder.attention.implementation == 'xla'


def make_pair(model):
  source, _, target = (x[0] for x in inputs())
  return AnalysedPair(model, init_params(model), source, target)


@pytest.mark.long
def test_log_probs_are_those_of_the_model():
  pair = make_pair(build_tiny())
  mask = jnp.arange(S) < 4
  logits = apply(pair.model, pair.params, pair.source[None], mask[None], pair.target[None]).logits[0]
  expected = jax.nn.log_softmax(logits)
  chosen = expected[np.arange(T), pair.target]
  np.testing.assert_allclose(log_probs_of(pair, mask), chosen, rtol=1e-5)


@pytest.mark.parametrize('shared', [pytest.param(False, marks=pytest.mark.long), True])
def test_source_vectors_can_be_replaced(shared):
  sizes = {'share_embeddings': True, 'sizes': (13, 13)} if shared else {}
  pair = make_pair(build_tiny(**sizes))
  vectors = interventions.source_vectors(pair)
  same = log_probs_of(interventions.with_vectors(pair, vectors))
  np.testing.assert_allclose(same, log_probs_of(pair), rtol=1e-5)
  other = pair._replace(source=pair.source[::-1])
  moved = interventions.with_vectors(pair, interventions.source_vectors(other))
  expected = log_probs_of(other)
  np.testing.assert_allclose(log_probs_of(moved), expected, rtol=1e-5)
  assert abs(expected - same).max() > 1e-4


@pytest.mark.long
def test_encoder_weights_are_a_distribution_for_each_layer_and_head():
  pair = make_pair(build_transformer(heads=4))
  weights = jax.jit(lambda params: interventions.encoder_weights(pair._replace(params=params)))(pair.params)
  assert weights.shape == (2, 4, S, S)
  np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
  with pytest.raises(UserError, match="no self-attention; expected the encoder 'transformer'"):
    interventions.encoder_weights(make_pair(build_tiny()))


def test_value_vectors_are_those_of_the_encoder():
  pair = make_pair(build_tiny('gnmt', 'layers=2'))
  assert interventions.value_vectors(pair).shape == (S, 10)

  def encode(model):
    return model.encoder(pair.source[None], jnp.ones((1, S), bool), True).memory[0]

  expected = jax.jit(lambda params: pair.model.apply({'params': params}, method=encode))(pair.params)
  np.testing.assert_allclose(interventions.value_vectors(pair), expected, rtol=1e-5)
  with pytest.raises(UserError, match='one head'):
    interventions.value_vectors(pair._replace(model=build_transformer()))
