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
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, S, T, build_tiny, inputs, with_params
from tests.modules.helpers import RNGS, assert_close
from tests.modules.reference_cells import REFERENCE_CELLS, sigmoid
from tests.sampled_cases import sample_cases

# ------------------------------------------------------------------------------------------------- one step in NumPy


def first_two_steps(model):
  """Returns parameters, the encoded source, the embeddings, and the outputs of the first two steps."""
  params, (source, mask, target) = with_params(model)

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
def test_cho_reads_the_fixed_vector_at_every_step():
  model = build_tiny('cho', 'readout=9', encoder='rnn(rnn="gru_reset_first", features=10)')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  for b, length in enumerate(LENGTHS):
    c = np.tanh(dense(cell['summary'], encoded.memory[b, length - 1]))
    h = np.tanh(dense(cell['first'], c))
    for t in range(2):
      word = embeddings[b, t]
      parts = (('inputs', word), ('recurrent', h), ('context_gates', c))
      (wr, wz, wn), (ur, uz, un), (cr, cz, cn) = (np.split(dense(cell[name], x), 3) for name, x in parts)
      z = sigmoid(wz + uz + cz)
      h = z * h + (1 - z) * np.tanh(wn + sigmoid(wr + ur + cr) * (un + cn))
      deep = maxout(dense(cell['deep'], np.concatenate([h, word, c])))
      assert_step(step_outputs[t], b, dense(params['output'], deep), [])


@pytest.mark.long
@pytest.mark.parametrize(
  ('options', 'layers', 'direction'),
  [
    ('', 2, ''),
    ('input_feeding=False', 1, ''),
    ('initial="copied"', 2, 'forward'),
    ('initial="copied"', 2, 'backward'),
  ],
)
def test_luong_attends_with_the_new_state_and_copies_states_layer_by_layer(options, layers, direction):
  encoder = f'rnn(rnn="lstm", features=8, layers=2, direction="{direction}")' if direction else 'birnn(features=10)'
  model = build_tiny('luong', f'rnn="lstm", layers={layers}, {options}', encoder=encoder)
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  assert any('bridges' in name for name in cell['stack']) == (not direction)
  for b, length in enumerate(LENGTHS):
    if direction:
      h1, c1, h2, c2 = np.split(encoded.final[b], 4)
      np.testing.assert_allclose(h2, encoded.memory[b, length - 1 if direction == 'forward' else 0], rtol=1e-5)
      states = [(h1, c1), (h2, c2)]
    else:
      states = initial_states('lstm', cell['stack'], layers, encoded.final[b])
    feed = np.zeros(8)
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t])
      if 'input_feeding' not in options:
        projected = projected + dense(cell['feed_gates'], feed)
      states = recur('lstm', cell['stack'], states, projected)
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      feed = np.tanh(dense(cell['attentional'], np.concatenate([context, states[-1][0]])))
      assert_step(step_outputs[t], b, dense(params['output'], feed), weights)


@pytest.mark.long
@pytest.mark.parametrize('current', [True, False])
def test_gnmt_feeds_the_context_of_the_lowest_layer_to_all_layers(current):
  model = build_tiny('gnmt', f'layers=4, current={current}', encoder='gnmt(rnn="simple", features=5, layers=3)')
  params, encoded, embeddings, step_outputs = first_two_steps(model)
  cell = params['decoder']['cell']
  layers = [cell['stack']['cells_0'], *(cell['above'][f'cells_{i}'] for i in range(3))]
  for b, length in enumerate(LENGTHS):
    memory = encoded.memory[b, :length]
    states = initial_states('lstm', cell['stack'], 1, encoded.final[b])
    states += initial_states('lstm', cell['above'], 3, encoded.final[b])
    context = np.zeros(memory.shape[-1])
    for t in range(2):
      if not current:
        context, weights = additive(cell['attention'], states[0][0], memory)
      below = 0.0
      for i, layer in enumerate(layers):
        if i == 0:
          projected = dense(layer['inputs'], embeddings[b, t]) + dense(cell['context_gates'], context)
        else:
          projected = dense(layer['inputs'], np.concatenate([below, context]))
        states[i] = REFERENCE_CELLS['lstm'][1](projected, states[i], layer['kernel'], layer['bias'])
        below = states[i][0] + (below if i >= 2 else 0.0)
        if i == 0 and current:
          context, weights = additive(cell['attention'], states[0][0], memory)
      assert_step(step_outputs[t], b, dense(params['output'], below), weights)


@pytest.mark.long
def test_the_stacks_of_gnmt_start_from_the_layers_of_the_encoder():
  encoder = 'rnn(rnn="lstm", features=8, layers=3)'
  model = build_tiny('gnmt', 'layers=3, initial="copied"', encoder=encoder)

  def first_states(model, source, mask):
    encoded = model.encoder(source, mask, True)
    cell = model.decoder.cell
    return encoded.states.forward, cell.start(encoded, cell.remember(encoded)).states

  params, (source, mask, _) = with_params(model)
  encoder_states, (lowest, above) = model.apply(params, source, mask, method=first_states)
  jax.tree.map(np.testing.assert_array_equal, (*lowest, *above), encoder_states)
  assert len(lowest) == 1 and len(above) == 2


@pytest.mark.parametrize(
  ('cell', 'options', 'encoder', 'message'),
  [
    ('bahdanau', 'initial="copied"', 'birnn(features=8)', 'needs an encoder with one direction .* backward, with'),
    ('bahdanau', 'initial="copied"', 'rnn(features=8, rnn="lstm")', r'8; got .* forward, with states of \[\[8, 8\]\]'),
    ('bahdanau', 'initial="copied"', 'embedded', 'got an encoder without recurrent layers'),
    ('bahdanau', 'initial="backward"', 'rnn(features=8)', 'reads backward, such as birnn; got .* reads forward'),
    ('bahdanau', 'initial="copied", bridge=False', 'rnn(features=8)', "initial must be 'learned', got 'copied'"),
    ('bahdanau', 'initial="final"', 'rnn(features=8)', "unknown initial 'final'"),
    ('cho', 'layers=2', 'rnn', 'cho: option layers is fixed by the paper, got 2; expected .*: features, readout'),
    ('cho', 'feed_context=True', 'rnn', 'cho: option feed_context is fixed by the paper'),
    ('cho', '', 'rnn(direction="backward")', 'cho: the encoder must read forward.*got an encoder that reads backward'),
    ('gnmt', 'layers=3, initial="copied"', 'birnn', 'layers and features of the decoder, lstm, 3 and 8; got'),
    ('gnmt', 'layers=1', 'birnn', 'gnmt: layers must be at least 2, got 1'),
    ('gnmt', 'layers=2', 'latent', "gnmt: latent alignments are not supported, got 'latent'"),
  ],
)
def test_invalid_options_raise(cell, options, encoder, message):
  fields = {'alignment': 'latent'} if encoder == 'latent' else {'encoder': encoder}
  with pytest.raises(aj.UserError, match=message):
    jax.eval_shape(build_tiny(cell, options, **fields).init, RNGS, *inputs())


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
  types, next_types = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (carry, next_carry))
  assert types == next_types, 'step changes the shapes or dtypes of the carry'
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
  params, (source, mask, target) = with_params(model, scale=0.4)

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
  params, (source, mask, target) = with_params(model)

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
