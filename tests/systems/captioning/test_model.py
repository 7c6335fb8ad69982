"""Picture encoders in the encoder-decoder: filler rows, grids and gated contexts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import ModelConfig
from attention_jax.modules.attention import Attention
from attention_jax.systems.captioning.model import Grid, build_captioner
from tests.modules.helpers import RNGS, assert_close, draw, variables

TARGET = jnp.array([[4, 5, 2], [6, 2, 0]])
GRID = 'grid(features=8, halvings=2)'
REAL = jnp.array([[True], [False]])  # the second row is a filler row


def build_small(alignment='softmax', **fields):
  """A captioner with a vocabulary of 9 words; `fields` belong to the model."""
  attention = Attention(score='additive', alignment=alignment, features=7)
  model = {'decoder': 'bahdanau(features=6, readout=6)'} | fields
  return build_captioner(ModelConfig(embedding=5, **model, attention=attention), 9)


@pytest.mark.long
@pytest.mark.parametrize(('encoder', 'picture'), [(GRID, (8, 8, 3)), ('precomputed(features=8)', (2, 2, 5))])
@pytest.mark.parametrize('decoder', ['bahdanau(features=6, readout=6, gate=True)', 'luong(features=6)'])
def test_grid_cells_are_the_memory_of_recurrent_decoders(encoder, picture, decoder):
  pictures = 100 * draw(2, *picture)
  model = build_small(encoder=encoder, decoder=decoder)
  params = variables(model, pictures, REAL, TARGET)
  run = jax.jit(model.apply)
  outputs = run(params, pictures, REAL, TARGET)
  assert outputs.weights.shape == (2, 3, 4) and outputs.logits.shape == (2, 3, 9)
  np.testing.assert_allclose(outputs.weights[0].sum(-1), 1, rtol=1e-5)
  assert not outputs.weights[1].any() and np.isfinite(outputs.logits).all()  # a filler row attends to nothing
  alone = run(params, pictures[:1], REAL[:1], TARGET[:1])
  assert_close(outputs.logits[:1], alone.logits)
  carry, memory = jax.jit(lambda: model.apply(params, pictures, REAL, 3, method='start'))()
  step_once = jax.jit(lambda carry, token: model.apply(params, carry, token, memory, method='step'))
  for t, token in enumerate(np.array([[1, 4, 5], [1, 6, 2]]).T):
    carry, step = step_once(carry, jnp.asarray(token))
    assert_close(step.logits, outputs.logits[:, t])


@pytest.mark.long
@pytest.mark.parametrize(
  ('size', 'halvings', 'layers'),
  [(16, 1, 1), (33, 2, 0), (32, 2, 0), (64, 3, 0), (50, 2, 0)],
)
def test_cell_centres_are_centres_of_receptive_fields(size, halvings, layers):
  encoder = Grid(features=8, halvings=halvings, layers=layers)
  picture = 127 + 100 * draw(1, size, size, 3)
  params = variables(encoder, picture, REAL[:1], True)
  rows = -(-size // 2**halvings)
  row = rows // 2

  def cell_sum(picture):
    memory = encoder.apply(params, picture, REAL[:1], True).memory.reshape(rows, rows, -1)
    return (memory[row, row] * jnp.arange(8.0)).sum()

  receptive_rows = np.flatnonzero(np.abs(jax.jit(jax.grad(cell_sum))(picture))[0].sum((1, 2)))
  assert len(receptive_rows) < size
  middle = (receptive_rows[0] + receptive_rows[-1] + 1) / 2
  centres = encoder.cell_centres(size)
  assert len(centres) == rows
  assert middle == pytest.approx(centres[row] * size)


@pytest.mark.long
def test_closed_gate_masks_the_picture_and_open_gate_equals_no_gate():
  model = build_small(encoder=GRID, decoder='bahdanau(features=6, readout=6, gate=True, bridge=False)')
  picture = 100 * draw(1, 8, 8, 3)
  other_picture = 100 * draw(1, 8, 8, 3, seed=1)
  params = variables(model, picture, REAL[:1], TARGET[:1])

  @jax.jit
  def run(params, picture):
    return model.apply(params, picture, REAL[:1], TARGET[:1]).logits

  assert np.abs(run(params, picture) - run(params, other_picture)).max() > 1e-3
  cell = params['params']['decoder']['cell']
  cell['context_gate'] = {'kernel': jnp.zeros_like(cell['context_gate']['kernel']), 'bias': jnp.array([-100.0])}
  assert_close(run(params, picture), run(params, other_picture))
  cell['context_gate'] = cell['context_gate'] | {'bias': jnp.array([100.0])}
  ungated = build_small(encoder=GRID, decoder='bahdanau(features=6, readout=6, bridge=False)')
  del cell['context_gate']
  ungated_logits = jax.jit(ungated.apply)(params, picture, REAL[:1], TARGET[:1]).logits
  cell['context_gate'] = {'kernel': jnp.zeros((6, 1)), 'bias': jnp.array([100.0])}
  assert_close(run(params, picture), ungated_logits)


def test_gates_of_latent_alignments_and_unknown_encoders_are_reported():
  picture = jnp.zeros((1, 8, 8, 3))
  with pytest.raises(UserError, match=r'bahdanau: .*gate'):
    model = build_small(encoder='grid(features=8)', decoder='bahdanau(gate=True)', alignment='latent')
    jax.eval_shape(lambda: model.init(jax.random.key(0), picture, REAL[:1], TARGET[:1]))
  with pytest.raises(UserError, match="unknown encoder of pictures 'birnn'"):
    build_small(encoder='birnn')


@pytest.mark.long
def test_the_memory_has_dropout_during_training_alone():
  encoder = Grid(0.999999, features=8, halvings=2)  # drops everything
  pictures = 100 * draw(2, 8, 8, 3)
  params = variables(encoder, pictures, REAL, True)
  run = jax.jit(encoder.apply, static_argnums=3)
  assert not run(params, pictures, REAL, False, rngs=RNGS).memory.any()
  assert run(params, pictures, REAL, True).memory[0].all()
