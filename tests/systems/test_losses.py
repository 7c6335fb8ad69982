"""The loss of each system has the options of training, and sums over the real rows, against sums by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.losses.sequence import sequence_loss
from attention_jax.systems.captioning import system as captioning
from attention_jax.systems.classification import system as classification
from attention_jax.systems.classification.batches import LabelledBatch
from attention_jax.systems.recall import system as recall
from attention_jax.systems.recall.data import RecallBatch
from attention_jax.systems.recall.model import RecallConfig, build_recaller
from attention_jax.systems.translation import system as translation
from attention_jax.training.config import Training
from tests.losses.helpers import RNGS
from tests.modules.helpers import draw, variables
from tests.systems.classification.test_model import MASK, SOURCE, build_small
from tests.training.helpers import Toy, init_params, make_batch


@pytest.mark.long
@pytest.mark.parametrize('system', [translation, captioning])
def test_a_sequence_loss_has_every_option_of_training(system):
  options = {'label_smoothing': 0.3, 'auxiliary': 'coverage(weight=2)', 'objective': 'r_drop(alpha=2)'}
  loss = system._loss(Toy(0.3), Training(**options))
  expected = sequence_loss(Toy(0.3), 0.3, 'coverage(weight=2)', 'r_drop(alpha=2)')
  sums = jax.jit(lambda params: [fn(params, make_batch(0), RNGS) for fn in (loss, expected)])(init_params())
  jax.tree.map(np.testing.assert_array_equal, *sums)


@pytest.mark.long
def test_the_loss_of_a_classifier_is_a_sum_over_the_documents_that_are_no_fillers():
  model = build_small(classifier='flat')
  params = variables(model, SOURCE, MASK)['params']
  outputs = jax.jit(model.apply)({'params': params}, SOURCE, MASK)
  log_probs = np.asarray(jax.nn.log_softmax(outputs.logits))
  label = np.array([log_probs[0].argmax(), 0, log_probs[2].argmin()])
  batch = LabelledBatch(SOURCE, MASK, label, np.array([4, -1, 0]))
  loss = classification._loss(model, Training(label_smoothing=0.3, auxiliary='redundancy(weight=0.5)'))
  training, evaluation = jax.jit(lambda params: (loss(params, batch, RNGS), loss(params, batch)))(params)
  for sums, smoothing in ((training, 0.3), (evaluation, 0.0)):
    labels = (1 - smoothing) * np.eye(3)[label] + smoothing / 3
    assert sums['tokens'] == 2 and sums['accuracy'] == 1
    np.testing.assert_allclose(sums['cross_entropy'], -(labels * log_probs)[[0, 2]].sum(), rtol=1e-5)
    weights = np.asarray(outputs.word_weights)[[0, 2]].reshape(2, -1)
    np.testing.assert_allclose(sums['redundancy'], (((weights**2).sum(1) - 1) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums['loss'], sums['cross_entropy'] + 0.5 * sums['redundancy'], rtol=1e-6)


@pytest.mark.long
def test_the_loss_of_recall_is_a_sum_over_the_bits_of_the_answers():
  model = build_recaller(RecallConfig('turing(slots=3, width=4, features=5)'), 2)
  inputs = draw(2, 3, 4)
  params = variables(model, inputs)['params']
  target = np.array([[[0, 1], [1, 1], [0, 0]], [[1, 0], [1, 1], [0, 1]]], np.int32)
  mask = np.array([[False, True, True], [False, False, False]])  # the second row is a filler
  batch = RecallBatch(inputs, target, mask, np.array([0, -1]))
  sums, outputs = jax.jit(functools.partial(recall._sums, model))(params, batch)
  probabilities = 1 / (1 + np.exp(-np.asarray(outputs.logits, np.float64)))[0, 1:]
  bits = target[0, 1:]
  expected = -np.log(np.where(bits > 0, probabilities, 1 - probabilities)).sum()
  np.testing.assert_allclose(sums['loss'], expected, rtol=1e-5)
  assert sums['tokens'] == 4 and sums['accuracy'] == ((probabilities > 0.5) == bits).sum()
  assert sums['loss'].dtype == jnp.float32
