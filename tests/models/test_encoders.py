"""Layers, residual connections and directions of recurrent encoders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.models.encoders import DIRECTIONS
from tests.models.helpers import B, S, build_tiny, inputs, with_params
from tests.models.test_encoder_decoder import encode, param_shapes
from tests.modules.helpers import assert_close, assert_same, variables
from tests.sampled_cases import sample_cases


@pytest.mark.long
@pytest.mark.parametrize('direction', sample_cases([(name,) for name in DIRECTIONS], 2))
def test_layers_above_the_first_have_residual_connections_in_every_direction(direction):
  spec = f'rnn(rnn="lstm", features=10, layers=3, residual={{}}, direction="{direction}")'
  # Embeddings are as wide as the layers, so that the width alone would permit a residual connection of the first layer.
  residual, without = (build_tiny(encoder=spec.format(x), embedding=10) for x in (True, False))
  source, mask, target = inputs()
  params = variables(residual, source, mask, target)
  encoded = encode(residual, params, source, mask)
  encoded_without = encode(without, params, source, mask)
  assert encoded.memory.shape == (B, S, 10)
  assert encoded.final.shape == (B, 3 * 2 * 10)  # h and c of three layers, with 10 features over all directions
  assert np.any(encoded.memory != encoded_without.memory)
  assert np.all(encoded.memory[~np.asarray(mask)] == 0)
  # The first layer has no residual connection, so that the final states of the first two layers are equal.
  equal = 2 * 2 * 10
  assert_same(encoded.final[:, :equal], encoded_without.final[:, :equal])
  assert np.any(encoded.final[:, equal:] != encoded_without.final[:, equal:])
  layers = {name.split('/')[1] for name in param_shapes(residual) if name.startswith('encoder/RecurrentLayer')}
  assert len(layers) == 3 * len(DIRECTIONS[direction])


def test_a_backward_encoder_equals_a_forward_one_of_the_reversed_source():
  forward, backward = (build_tiny(encoder=f'rnn(features=10, direction="{d}")') for d in ('forward', 'backward'))
  source, mask, target = inputs()
  params = variables(forward, source, mask, target)
  encoded = encode(backward, params, source, mask)
  encoded_reversed = encode(forward, params, source[:1, ::-1], mask[:1])
  assert_close(encoded.memory[:1], encoded_reversed.memory[:, ::-1])
  assert_close(encoded.final[:1], encoded_reversed.final)


@pytest.mark.long
def test_dropout_is_between_layers_and_on_the_memory_during_training_alone():
  model = build_tiny(encoder='rnn(rnn="simple", features=10, layers=2, dropout=0.999999)')  # drops everything
  params, (source, mask, _) = with_params(model)
  rngs = {'dropout': jax.random.key(0)}
  train = jax.jit(functools.partial(model.apply, method=lambda m, *x: m.encoder(*x, False), rngs=rngs))
  encoded, other = (train(params, ids, mask) for ids in (source, jnp.flip(source, 1)))
  assert not np.any(encoded.memory) and np.any(encode(model, params, source, mask).memory)
  (lower, upper), (other_lower, other_upper) = (np.split(np.asarray(x.final), 2, axis=1) for x in (encoded, other))
  assert np.any(lower != other_lower)
  assert_same(upper, other_upper)  # the upper layer reads zeros only
