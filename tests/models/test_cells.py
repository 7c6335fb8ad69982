"""Cells: steps against NumPy, shapes for every score x alignment x cell, and gradients for every row."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.cells import CELLS
from attention_jax.models.encoder_decoder import shift_right
from attention_jax.models.steps import SharedMemory
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, S, T, build_tiny, inputs
from tests.modules.helpers import RNGS, assert_close, variables
from tests.modules.reference_cells import REFERENCE_CELLS
from tests.sampled_cases import sample_cases

# ------------------------------------------------------------------------------------------------- one step in NumPy


def first_two_steps(model):
  """Returns parameters, the encoded source, the embeddings, and the outputs of the first two steps."""
  source, mask, target = inputs()
  params = variables(model, source, mask, target)

  @jax.jit
  def run(params, source, mask, target):
    encoded = model.apply(params, source, mask, method=lambda model, *inputs: model.encoder(*inputs, True))
    embeddings = model.apply(params, shift_right(target), method=lambda model, target: model.embedding(target))
    carry, memory = model.apply(params, source, mask, target.shape[1], method='start')
    step_outputs = []
    for t in range(2):
      carry, outputs = model.apply(params, carry, shift_right(target)[:, t], memory, method='step')
      step_outputs.append(outputs)
    return encoded, embeddings, step_outputs

  return jax.tree.map(np.asarray, (params['params'], *run(params, source, mask, target)))


def dense(params, x):
  return x @ params['kernel'] + params.get('bias', 0.0)


def additive(params, query, encoded, head=0):
  """Returns the context and the weights of one query over the real positions of one source."""
  query = query @ params['query_kernel']['kernel'][head]
  key = encoded @ params['key_kernel']['kernel'][head]
  exponentials = np.exp([np.tanh(query + row) @ params['score_params']['v'][head] for row in key])
  weights = exponentials / exponentials.sum()
  return sum(w * row for w, row in zip(weights, encoded, strict=True)), weights


def recur(kind, stack, states, projected):
  """Returns the states of all layers after one step."""
  new_states = []
  for layer, state in enumerate(states):
    cell = stack[f'cells_{layer}']
    inputs = dense(cell['inputs'], new_states[-1][0]) if layer else projected
    new_states.append(REFERENCE_CELLS[kind][1](inputs, state, cell['kernel'], cell['bias']))
  return new_states


def initial_states(kind, stack, layers, final):
  bridges = [
    [dense(stack[f'bridges_{layer}_{i}'], final) for i in range(REFERENCE_CELLS[kind][0])] for layer in range(layers)
  ]
  return [(np.tanh(hidden), *rest) for hidden, *rest in bridges]


def assert_step(outputs, b, logits, weights):
  np.testing.assert_allclose(outputs.logits[b], logits, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(outputs.weights[b, : len(weights)], weights, rtol=1e-4, atol=1e-6)
  assert np.all(outputs.weights[b, len(weights) :] == 0)


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'layers'), [('gru', 1), ('lstm', 2)])
def test_bahdanau_attends_with_the_previous_state(kind, layers):
  model = build_tiny('bahdanau', f'rnn="{kind}", layers={layers}')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  output = params['output']
  for b, length in enumerate(LENGTHS):
    states = initial_states(kind, cell['stack'], layers, encoded.final[b])
    for t in range(2):
      word = embeddings[b, t]
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      projected = dense(cell['stack']['cells_0']['inputs'], word) + dense(cell['context_gates'], context)
      states = recur(kind, cell['stack'], states, projected)
      deep = np.tanh(dense(cell['deep'], np.concatenate([states[-1][0], context, word])))
      assert_step(step_outputs[t], b, dense(output, deep), weights)


def maxout(units):
  return np.array([max(units[2 * j], units[2 * j + 1]) for j in range(len(units) // 2)])


@pytest.mark.long
def test_bahdanau_equals_the_equations_of_the_paper():
  """Appendix A.2.2, whose equations omit the biases."""
  options = 'rnn="gru_reset_first", maxout=True, previous=True, initial="backward"'
  model = build_tiny('bahdanau', options, encoder='birnn(rnn="gru_reset_first", features=10)')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  for b, length in enumerate(LENGTHS):
    backward = encoded.memory[b, 0, 5:]  # the state of the backward layer at the first token
    states = [(np.tanh(dense(cell['stack']['bridges_0_0'], backward)),)]
    for t in range(2):
      previous = states[-1][0]
      word = embeddings[b, t]
      context, weights = additive(cell['attention'], previous, encoded.memory[b, :length])
      projected = dense(cell['stack']['cells_0']['inputs'], word) + dense(cell['context_gates'], context)
      states = recur('gru_reset_first', cell['stack'], states, projected)
      deep = maxout(dense(cell['deep'], np.concatenate([previous, context, word])))
      assert_step(step_outputs[t], b, dense(params['output'], deep), weights)


@pytest.mark.long
@pytest.mark.parametrize('direction', ['forward', 'backward'])
def test_states_are_copied_layer_by_layer(direction):
  encoder = f'rnn(rnn="lstm", features=8, layers=2, direction="{direction}")'
  model = build_tiny('luong', 'rnn="lstm", layers=2, initial="copied"', encoder=encoder)
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  assert not any('bridges' in name for name in cell['stack'])
  position = {'forward': LENGTHS - 1, 'backward': [0] * B}[direction]
  for b, length in enumerate(LENGTHS):
    (h1, c1, h2, c2) = np.split(encoded.final[b], 4)
    np.testing.assert_allclose(h2, encoded.memory[b, position[b]], rtol=1e-5)
    states = [(h1, c1), (h2, c2)]
    feed = np.zeros(8)
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t]) + dense(cell['feed_gates'], feed)
      states = recur('lstm', cell['stack'], states, projected)
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      feed = np.tanh(dense(cell['attentional'], np.concatenate([context, states[-1][0]])))
      assert_step(step_outputs[t], b, dense(params['output'], feed), weights)


@pytest.mark.long
def test_cho_reads_the_fixed_vector_at_every_step():
  model = build_tiny('cho', 'readout=9', encoder='rnn(rnn="gru_reset_first", features=10)')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  for b, length in enumerate(LENGTHS):
    c = np.tanh(dense(cell['summary'], encoded.memory[b, length - 1]))
    h = np.tanh(dense(cell['first'], c))
    for t in range(2):
      word = embeddings[b, t]
      parts = [
        np.split(dense(cell[name], x), 3) for name, x in (('inputs', word), ('recurrent', h), ('context_gates', c))
      ]
      (wr, wz, wn), (ur, uz, un), (cr, cz, cn) = parts
      r = sigmoid(wr + ur + cr)
      z = sigmoid(wz + uz + cz)
      h = z * h + (1 - z) * np.tanh(wn + r * (un + cn))
      deep = maxout(dense(cell['deep'], np.concatenate([h, word, c])))
      assert_step(step_outputs[t], b, dense(params['output'], deep), [])


@pytest.mark.long
@pytest.mark.parametrize(('input_feeding', 'layers'), [(True, 2), (False, 1)])
def test_luong_attends_with_the_new_state(input_feeding, layers):
  model = build_tiny('luong', f'rnn="lstm", layers={layers}, input_feeding={input_feeding}')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  output = params['output']
  for b, length in enumerate(LENGTHS):
    states = initial_states('lstm', cell['stack'], layers, encoded.final[b])
    feed = None
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t])
      if input_feeding and feed is not None:
        projected = projected + dense(cell['feed_gates'], feed)
      states = recur('lstm', cell['stack'], states, projected)
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      feed = np.tanh(dense(cell['attentional'], np.concatenate([context, states[-1][0]])))
      assert_step(step_outputs[t], b, dense(output, feed), weights)


@pytest.mark.long
@pytest.mark.parametrize('current', [True, False])
def test_gnmt_feeds_the_context_of_the_lowest_layer_to_all_layers(current):
  model = build_tiny('gnmt', f'layers=4, current={current}', encoder='gnmt(rnn="simple", features=5, layers=3)')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  output = params['output']
  for b, length in enumerate(LENGTHS):
    states = initial_states('lstm', cell['stack'], 1, encoded.final[b])
    states += initial_states('lstm', cell['above'], 3, encoded.final[b])
    context = np.zeros(encoded.memory.shape[-1])
    for t in range(2):
      if not current:
        context, weights = additive(cell['attention'], states[0][0], encoded.memory[b, :length])
      new_states = []
      below = 0.0
      for layer, state in enumerate(states):
        layer_params = cell['above'][f'cells_{layer - 1}'] if layer else cell['stack']['cells_0']
        if layer == 0:
          projected = dense(layer_params['inputs'], embeddings[b, t]) + dense(cell['context_gates'], context)
        else:
          projected = dense(layer_params['inputs'], np.concatenate([below, context]))
        new_state = REFERENCE_CELLS['lstm'][1](projected, state, layer_params['kernel'], layer_params['bias'])
        new_states.append(new_state)
        below = new_state[0] + (below if layer >= 2 else 0.0)
        if layer == 0 and current:
          context, weights = additive(cell['attention'], new_state[0], encoded.memory[b, :length])
      states = new_states
      assert_step(step_outputs[t], b, dense(output, below), weights)


@pytest.mark.long
def test_the_stacks_of_gnmt_start_from_the_layers_of_the_encoder():
  encoder = 'rnn(rnn="lstm", features=8, layers=3)'
  model = build_tiny('gnmt', 'layers=3, initial="copied"', encoder=encoder)

  def first_states(model, source, mask):
    encoded = model.encoder(source, mask, True)
    cell = model.decoder.cell
    return encoded.states.forward, cell.start(encoded, cell.remember(encoded)).states

  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  encoder_states, (lowest, above) = model.apply(params, source, mask, method=first_states)
  jax.tree.map(np.testing.assert_array_equal, (*lowest, *above), encoder_states)
  assert len(lowest) == 1 and len(above) == 2


@pytest.mark.parametrize(
  ('cell', 'options', 'encoder', 'message'),
  [
    ('bahdanau', 'initial="copied"', 'birnn(features=8)', 'needs an encoder with one direction .* backward, with'),
    (
      'bahdanau',
      'initial="copied"',
      'rnn(features=8, rnn="lstm")',
      r'gru, 1 and 8; got .* forward, with states of \[\[8, 8\]\]',
    ),
    ('bahdanau', 'initial="copied"', 'embedded', 'got an encoder without recurrent layers'),
    ('bahdanau', 'initial="backward"', 'rnn(features=8)', 'reads backward, such as birnn; got .* reads forward'),
    (
      'bahdanau',
      'initial="copied", bridge=False',
      'rnn(features=8)',
      "zeros: initial must be 'learned', got 'copied'",
    ),
    ('bahdanau', 'initial="final"', 'rnn(features=8)', "unknown initial 'final'"),
    ('cho', 'layers=2', 'rnn', 'cho: option layers is fixed by the paper, got 2; expected .*: features, readout'),
    ('cho', 'feed_context=True', 'rnn', 'cho: option feed_context is fixed by the paper'),
    ('cho', 'residual=True', 'rnn', 'cho: option residual is fixed by the paper'),
    ('cho', 'rnn="lstm"', 'rnn', "cho: option rnn is fixed by the paper, got 'lstm'"),
    ('cho', '', 'rnn(direction="backward")', 'cho: the encoder must read forward.*got an encoder that reads backward'),
    ('gnmt', 'layers=3, initial="copied"', 'birnn', 'layers and features of the decoder, lstm, 3 and 8; got'),
    ('gnmt', 'layers=1', 'birnn', 'gnmt: layers must be at least 2, got 1'),
  ],
)
def test_invalid_options_raise(cell, options, encoder, message):
  with pytest.raises(aj.UserError, match=message):
    jax.eval_shape(build_tiny(cell, options, encoder=encoder).init, RNGS, *inputs())


def test_gnmt_does_not_support_latent_alignments():
  with pytest.raises(aj.UserError, match="gnmt: latent alignments are not supported, got 'latent'"):
    jax.eval_shape(build_tiny('gnmt', 'layers=2', alignment='latent').init, RNGS, *inputs())


@pytest.mark.long
@pytest.mark.parametrize('feed_context', [True, False])
def test_plain_decodes_from_one_fixed_vector(feed_context):
  model = build_tiny('plain', f'rnn="simple", feed_context={feed_context}')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  output = params['output']
  for b in range(B):
    states = initial_states('simple', cell['stack'], 1, encoded.final[b])
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t])
      if feed_context:
        projected = projected + dense(cell['context_gates'], encoded.final[b])
      states = recur('simple', cell['stack'], states, projected)
      assert_step(step_outputs[t], b, dense(output, states[-1][0]), [])


@pytest.mark.long
def test_weights_of_several_heads_are_averaged():
  model = build_tiny('bahdanau', 'rnn="simple"', heads=3)
  params, encoded, _, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  for b, length in enumerate(LENGTHS):
    (state,) = initial_states('simple', cell['stack'], 1, encoded.final[b])
    weights = [additive(cell['attention'], state[0], encoded.memory[b, :length], head)[1] for head in range(3)]
    np.testing.assert_allclose(step_outputs[0].weights[b, :length], np.mean(weights, 0), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------- every score, alignment and cell


def call_and_step(model, source, mask, target):
  """Computes all steps, and one step of search."""
  carry, memory = model.start(source, mask, target.shape[1])
  next_carry, step_outputs = model.step(carry, shift_right(target)[:, 0], memory)

  def has_same_type(x, y):
    return (x.shape, x.dtype) == (y.shape, y.dtype)

  assert jax.tree.all(jax.tree.map(has_same_type, carry, next_carry)), 'step changes the shapes or dtypes of the carry'
  return model(source, mask, target), step_outputs


STRIDE = 12
# The first part has one in STRIDE of the pairs of score and alignment: every score, every alignment and every cell. All
# parts together have every triple, but luong in place of gnmt for latent alignments.
PARTS = [
  pytest.param(*part, marks=[pytest.mark.product] if any(part) else [])
  for part in itertools.product(range(len(CELLS)), range(STRIDE))
]


@pytest.mark.long
@pytest.mark.parametrize(('part', 'offset'), PARTS)
@pytest.mark.parametrize('score', sample_cases([(name,) for name in aj.SCORES], 2))
def test_shapes_of_every_score_alignment_and_cell(score, part, offset):
  index = list(aj.SCORES).index(score)
  cells = itertools.islice(itertools.cycle(CELLS), index + part, None)
  triples = zip(aj.ALIGNMENTS, cells, itertools.cycle((1, 1, 2, 2)), strict=False)
  for alignment, cell, heads in itertools.islice(triples, (index + offset) % STRIDE, None, STRIDE):
    if aj.ALIGNMENTS[alignment].latent:
      heads = 1
      cell = 'luong' if cell == 'gnmt' else cell
    model = build_tiny(cell, 'rnn="simple"', score=score, alignment=alignment, heads=heads, dtype='bfloat16')
    run = functools.partial(model.init_with_output, method=call_and_step)
    (outputs, step_outputs), _ = jax.eval_shape(run, RNGS, *inputs())
    assert (outputs.logits.shape, outputs.weights.shape) == ((B, T, TARGET_WORDS), (B, T, S))
    assert (step_outputs.logits.shape, step_outputs.weights.shape) == ((B, TARGET_WORDS), (B, S))
    leaves = jax.tree.leaves((outputs._replace(linear=()), step_outputs))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


# ----------------------------------------------------------------------------------------------------------- gradients

# Each score and each alignment at least once; tests/functional checks the gradients of all pairs, without a cell.
# 'proportional' has no gradient where no score is positive; those of 'elu_dot' are.
PAIRS = [
  ('elu_dot' if alignment == 'proportional' else score, alignment)
  for score, alignment in zip(itertools.cycle(aj.SCORES), aj.ALIGNMENTS, strict=False)
]


@pytest.mark.long
@pytest.mark.parametrize(('score', 'alignment'), sample_cases(PAIRS, 8))
def test_gradients_reach_every_parameter(score, alignment):
  encoder = 'rnn(rnn="simple", features=10)'
  model = build_tiny('bahdanau', 'rnn="simple"', score=score, alignment=alignment, encoder=encoder)
  source, mask, target = inputs()
  params = variables(model, source, mask, target, scale=0.4)

  def loss(params):
    outputs = model.apply(params, source, mask, target, deterministic=False, rngs=RNGS)
    log_policy = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(outputs.state) if alignment in ('hard', 'hard_once'))
    return log_policy - jnp.mean(jax.nn.log_softmax(outputs.logits)[..., 5])

  for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
    name = jax.tree_util.keystr(path)
    assert np.all(np.isfinite(gradient)), name
    # The argmax of 'hardmax' has no gradient, so that the parameters of the attention get none.
    assert np.any(gradient != 0) == (alignment != 'hardmax' or "['attention']" not in name), name


# ------------------------------------------------------------------------------------ several hypotheses of a source


@pytest.mark.long
@pytest.mark.parametrize(
  ('options', 'fields', 'hypotheses', 'max_length', 'is_shared'),
  sample_cases(
    [
      ('', {}, 3, S, True),
      ('', {'dtype': 'bfloat16', 'alignment': 'monotonic'}, 5, S, True),
      ('', {}, 2, S, False),
      ('', {}, 3, S - 1, False),
      ('gate=True', {}, 3, S, False),
      ('', {'heads': 2}, 3, S, False),
      ('', {'alignment': 'latent'}, 3, S, False),
    ],
    2,
  ),
)
def test_sharing_products_of_the_memory_does_not_change_the_outputs_of_hypotheses(
  options, fields, hypotheses, max_length, is_shared
):
  model = build_tiny('bahdanau', options, **fields)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)

  shared = []

  @functools.partial(jax.jit, static_argnums=0)
  def run(hypotheses):
    carry, memory = model.apply(params, source, mask, max_length, hypotheses, method='start')
    outputs = []
    for t in range(2):
      carry, output = model.apply(params, carry, target[:, t], memory, method='step')
      outputs.append((output.logits, output.weights))
    shared.append(isinstance(memory.memory, SharedMemory))
    return outputs

  outputs = run(hypotheses)
  assert shared == [is_shared]
  tolerance = 0.02 if 'dtype' in fields else 1e-5
  jax.tree.map(functools.partial(assert_close, rtol=tolerance, atol=tolerance), outputs, run(1))
