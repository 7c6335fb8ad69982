"""Neural Turing Machines against the equations of the paper in NumPy; causality, gradients and user errors."""

import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.functional.scores import SCORES
from attention_jax.systems.recall.model import INITIAL_MEMORY, RecallConfig, build_recaller, is_self_contained
from tests.functional.alignment_cases import ALIGNMENTS_BY_NAME
from tests.modules.helpers import draw
from tests.sampled_cases import sample_cases

SLOTS, WIDTH, FEATURES, INPUTS, OUTPUTS = 5, 3, 4, 2, 2
CELL = f'turing(slots={SLOTS}, width={WIDTH}, features={FEATURES}, reads=2, writes=2, controller="CONTROLLER")'
X = draw(2, 6, INPUTS)


def build_small(controller='feedforward', **options):
  """A model with a Turing cell, and its parameters."""
  model = build_recaller(RecallConfig(CELL.replace('CONTROLLER', controller), **options), OUTPUTS)
  return model, jax.jit(model.init)(jax.random.key(0), X)['params']


SELF_CONTAINED = [(name, 'addressing') for name, row in SCORES.items() if is_self_contained(row)]


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment'),
  [*sample_cases(SELF_CONTAINED, 16), ('dot', 'sparsemax'), ('additive', 'softmax'), ('cosine(beta=1.0)', 'forward')],
)
def test_outputs_are_finite_for_every_self_contained_score_and_other_alignments(score, alignment):
  model, params = build_small('lstm', score=score, alignment=alignment)
  outputs = jax.jit(model.apply)({'params': params}, X)
  assert np.isfinite(outputs.logits).all() and (outputs.write >= 0).all()


def linear(x, p):
  return x @ p['kernel'] + p['bias']


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def reference(params, inputs):
  """Logits for one sequence [T, I], step by step; the controller is tanh(W x + b)."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  cell = params['cell']
  case = ALIGNMENTS_BY_NAME['addressing']
  memory = np.full((SLOTS, WIDTH), INITIAL_MEMORY)
  read = np.zeros((2, WIDTH))
  previous = {heads: np.eye(SLOTS)[[0, 0]] for heads in ('writers', 'readers')}

  def address(heads, h):
    head_params = cell[heads]['heads']
    for i in range(2):
      key = h @ head_params['query'][i]
      cosine = np.array([key @ slot / np.linalg.norm(key) / np.linalg.norm(slot) for slot in memory])
      alignment_params = {name: x[i] for name, x in head_params['alignment'].items()}
      mask = np.ones(SLOTS, bool)
      previous[heads][i] = case.reference(cosine, mask, query=h, previous=previous[heads][i], **alignment_params)
    return previous[heads]

  logits = []
  for x in inputs:
    h = np.tanh(linear(np.concatenate([x, read.ravel()]), cell['control']['inputs']))
    weights = address('writers', h)
    erase, add = (linear(h, cell[name]).reshape(2, WIDTH) for name in ('erase', 'add'))
    retained = np.prod([1 - np.outer(w, sigmoid(e)) for w, e in zip(weights, erase, strict=True)], axis=0)
    memory = memory * retained + sum(np.outer(w, a) for w, a in zip(weights, add, strict=True))
    read = address('readers', h) @ memory
    logits.append(linear(np.concatenate([h, read.ravel()]), params['bits']))
  return np.array(logits)


def test_outputs_equal_the_equations_of_the_paper():
  model, params = build_small()
  outputs = jax.jit(model.apply)({'params': params}, X)
  for row in range(2):
    np.testing.assert_allclose(outputs.logits[row], reference(params, np.asarray(X[row])), rtol=2e-4, atol=2e-5)
  assert outputs.read.shape == outputs.write.shape == (2, 6, 2, SLOTS)
  np.testing.assert_allclose(outputs.read.sum(-1), 1, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('controller', ['lstm', pytest.param('gru', marks=pytest.mark.long)])
def test_outputs_are_causal_and_gradients_reach_every_parameter(controller):
  model, params = build_small(controller)

  @jax.jit
  def run(params, x):
    def loss(params):
      logits = model.apply({'params': params}, x).logits
      return (logits**2).sum(), logits

    return jax.grad(loss, has_aux=True)(params)

  later = X.at[:, 3:].set(7.0)
  grads, logits = jax.device_get(run(params, X))
  later_logits = jax.device_get(run(params, later)[1])
  np.testing.assert_allclose(later_logits[:, :3], logits[:, :3], rtol=1e-6)
  assert np.abs(later_logits[:, 3:] - logits[:, 3:]).max() > 1e-3
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'cell': 'turin'}, "unknown cell 'turin' .*expected one of: recurrent, turing"),
    ({'cell': 'turing(controller="rnn")'}, "unknown controller 'rnn'.*; expected one of: feedforward, gru, gru_reset"),
    ({'alignment': 'hard'}, "='hard' needs random numbers, an auxiliary loss or a sum of .*; expected one of: .*addr"),
    ({'alignment': 'latent'}, "alignment='latent' needs random numbers"),
    ({'score': 'cosin'}, "unknown score 'cosin'"),
  ],
)
def test_invalid_options_are_reported(options, message):
  with pytest.raises(UserError, match=message):
    jax.eval_shape(build_recaller(RecallConfig(**options), OUTPUTS).init, jax.random.key(0), X)
