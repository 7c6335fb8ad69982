"""Dropout before the output layers of models: at a rate near 1, their logits are the biases."""

import jax
import numpy as np
import pytest

from tests.models.helpers import build_conv, build_tiny, inputs
from tests.modules.helpers import RNGS, variables
from tests.systems.classification.test_model import MASK, SOURCE, build_small

RATE = 0.999999


@pytest.mark.long
@pytest.mark.parametrize(
  ('build', 'args', 'output'),
  [
    (lambda rate: build_tiny('luong', 'rnn="simple"', dropout=rate), inputs(), 'output'),
    (lambda rate: build_conv(dropout=rate), inputs(), 'output'),
    (lambda rate: build_small(classifier='flat', pooling='mean', dropout=rate), (SOURCE, MASK), 'labels'),
    (lambda rate: build_small(classifier='flat', pooling='mean', dropout=rate, hidden=5), (SOURCE, MASK), 'labels'),
  ],
  ids=['recurrent', 'convolutional', 'classifier', 'hidden'],
)
def test_the_inputs_of_the_output_layer_have_dropout_during_training(build, args, output):
  params = variables(build(0.0), *args)
  bias = params['params'][output]['bias']

  def logits(rate, deterministic):
    run = jax.jit(build(rate).apply, static_argnums=len(args) + 1)
    return run(params, *args, deterministic, rngs=RNGS).logits

  np.testing.assert_array_equal(logits(RATE, False), np.broadcast_to(bias, logits(0.0, False).shape))
  np.testing.assert_array_equal(logits(RATE, True), logits(0.0, True))
