"""Encoders of pictures in the encoder-decoder: filler rows, grids, and gated contexts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import ModelConfig
from attention_jax.models.image_encoders import Grid, build_captioner
from attention_jax.modules.attention import Attention
from tests.modules.helpers import assert_close, draw, variables

TARGET = jnp.array([[4, 5, 2], [6, 2, 0]])
GRID = 'grid(features=8, halvings=2)'
REAL = jnp.array([[True], [False]])


def captioner(**fields):
  own = {f.name: f.default for f in dataclasses.fields(Attention) if f.name in ('heads', 'implementation')}
  model = dataclasses.asdict(ModelConfig(embedding=5)) | {'decoder': 'bahdanau(features=6, readout=6)'} | fields
  attention = own | {'score': 'additive', 'alignment': model.pop('alignment', 'softmax'), 'features': 7}
  return build_captioner(model | {'attention': attention}, 9)


ENCODERS = [(GRID, (8, 8, 3)), ('precomputed(features=8)', (2, 2, 5))]


@pytest.mark.parametrize(('encoder', 'picture'), ENCODERS)
@pytest.mark.parametrize('decoder', ['bahdanau(features=6, readout=6, gate=True)', 'luong(features=6)'])
def test_cells_are_a_memory_like_any_other(encoder, picture, decoder):
  pictures = 100 * draw(2, *picture)
  model = captioner(encoder=encoder, decoder=decoder)
  params = variables(model, pictures, REAL, TARGET)
  found = model.apply(params, pictures, REAL, TARGET)
  assert found.weights.shape == (2, 3, 4) and found.logits.shape == (2, 3, 9)
  np.testing.assert_allclose(found.weights[0].sum(-1), 1, rtol=1e-5)
  assert not found.weights[1].any() and np.isfinite(found.logits).all()  # a filler row sees nothing
  alone = model.apply(params, pictures[:1], REAL[:1], TARGET[:1])
  assert_close(found.logits[:1], alone.logits)
  carry, memory = model.apply(params, pictures, REAL, 3, method='start')
  for t, token in enumerate(np.array([[1, 4, 5], [1, 6, 2]]).T):
    carry, step = model.apply(params, carry, jnp.asarray(token), memory, method='step')
    assert_close(step.logits, found.logits[:, t])


@pytest.mark.parametrize(('size', 'halvings', 'layers'), [(16, 1, 1), (32, 2, 0), (64, 3, 0), (33, 2, 0), (50, 2, 0)])
def test_a_cell_sees_what_lies_around_where_it_is_said_to_look(size, halvings, layers):
  encoder = Grid(features=8, halvings=halvings, layers=layers)
  picture = 127 + 100 * draw(1, size, size, 3)
  params = variables(encoder, picture, REAL[:1], True)
  rows = -(-size // 2**halvings)
  row = rows // 2

  def seen(picture):
    memory = encoder.apply(params, picture, REAL[:1], True).memory.reshape(rows, rows, -1)
    return (memory[row, row] * jnp.arange(8.0)).sum()

  felt = np.flatnonzero(np.abs(jax.grad(seen)(picture))[0].sum((1, 2)))
  assert len(felt) < size
  middle = (felt[0] + felt[-1] + 1) / 2
  assert len(encoder.cell_centres(size)) == rows and middle == pytest.approx(encoder.cell_centres(size)[row] * size)


def test_a_closed_gate_hides_the_picture():
  model = captioner(encoder=GRID, decoder='bahdanau(features=6, readout=6, gate=True, bridge=False)')
  one, other = 100 * draw(1, 8, 8, 3), 100 * draw(1, 8, 8, 3, seed=1)
  params = variables(model, one, REAL[:1], TARGET[:1])
  run = lambda params, picture: model.apply(params, picture, REAL[:1], TARGET[:1]).logits
  assert np.abs(run(params, one) - run(params, other)).max() > 1e-3
  cell = params['params']['decoder']['cell']
  cell['wanted'] = {'kernel': jnp.zeros_like(cell['wanted']['kernel']), 'bias': jnp.array([-100.0])}
  assert_close(run(params, one), run(params, other))
  cell['wanted'] = cell['wanted'] | {'bias': jnp.array([100.0])}
  plain = captioner(encoder=GRID, decoder='bahdanau(features=6, readout=6, bridge=False)')
  del cell['wanted']
  ungated = plain.apply(params, one, REAL[:1], TARGET[:1]).logits
  cell['wanted'] = {'kernel': jnp.zeros((6, 1)), 'bias': jnp.array([100.0])}
  assert_close(run(params, one), ungated)


def test_what_does_not_go_together_says_so():
  picture = jnp.zeros((1, 8, 8, 3))
  with pytest.raises(UserError, match='gate=True weighs one context'):
    model = captioner(encoder='grid(features=8)', decoder='bahdanau(gate=True)', alignment='latent')
    jax.eval_shape(lambda: model.init(jax.random.key(0), picture, REAL[:1], TARGET[:1]))
  with pytest.raises(UserError, match="unknown encoder of pictures 'birnn'"):
    captioner(encoder='birnn')
