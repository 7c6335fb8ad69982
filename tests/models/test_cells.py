"""Cells: one step in NumPy, the whole product score x alignment x cell in shapes, gradients for every row."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.cells import CELLS
from attention_jax.models.encoder_decoder import shift_right
from tests.models.helpers import LENGTHS, TARGET_WORDS, B, S, T, build_tiny, inputs
from tests.modules.helpers import RNGS, variables
from tests.modules.reference_cells import REFERENCE_CELLS
from tests.sweeps import sample_cases

# ------------------------------------------------------------------------------------------------- one step in NumPy


def first_two_steps(model):
  """The literal inputs of a decoder (its parameters, the encoded source, the embeddings) and what the model makes."""
  source, mask, target = inputs()
  params = variables(model, source, mask, target)

  @jax.jit
  def run(params, source, mask, target):
    encoded = model.apply(params, source, mask, method=lambda model, *given: model.encoder(*given, True))
    embeddings = model.apply(params, shift_right(target), method=lambda model, target: model.embedding(target))
    carry, memory = model.apply(params, source, mask, target.shape[1], method='start')
    made = []
    for t in range(2):
      carry, outputs = model.apply(params, carry, shift_right(target)[:, t], memory, method='step')
      made.append(outputs)
    return encoded, embeddings, made

  return jax.tree.map(np.asarray, (params['params'], *run(params, source, mask, target)))


def dense(params, x):
  return x @ params['kernel'] + params.get('bias', 0.0)


def additive(params, query, encoded):
  """Context and weights of one query over the real positions of one source."""
  query, key = (x @ params[f'{side}_kernel']['kernel'][0] for side, x in (('query', query), ('key', encoded)))
  exponentials = np.exp([np.tanh(query + row) @ params['score_params']['v'][0] for row in key])
  weights = exponentials / exponentials.sum()
  return sum(w * row for w, row in zip(weights, encoded, strict=True)), weights


def recur(kind, stack, states, projected):
  """One step of all layers."""
  new = []
  for layer, state in enumerate(states):
    cell = stack[f'cells_{layer}']
    inputs = dense(cell['inputs'], new[-1][0]) if layer else projected
    new.append(REFERENCE_CELLS[kind][1](inputs, state, cell['kernel'], cell['bias']))
  return new


def first_states(kind, stack, layers, final):
  bridges = [
    [dense(stack[f'bridges_{layer}_{i}'], final) for i in range(REFERENCE_CELLS[kind][0])] for layer in range(layers)
  ]
  return [(np.tanh(hidden), *rest) for hidden, *rest in bridges]


def assert_step(made, b, logits, weights):
  np.testing.assert_allclose(made.logits[b], logits, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(made.weights[b, : len(weights)], weights, rtol=1e-4, atol=1e-6)
  assert np.all(made.weights[b, len(weights) :] == 0)


@pytest.mark.parametrize(('kind', 'layers'), [('gru', 1), ('lstm', 2)])
def test_bahdanau_attends_with_the_state_before(kind, layers):
  model = build_tiny('bahdanau', f'rnn="{kind}", layers={layers}')
  params, encoded, embeddings, made = first_two_steps(model)
  cell, output = params['decoder']['cell'], params['output']
  for b, length in enumerate(LENGTHS):
    states = first_states(kind, cell['stack'], layers, encoded.final[b])
    for t in range(2):
      word = embeddings[b, t]
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      projected = dense(cell['stack']['cells_0']['inputs'], word) + dense(cell['context_gates'], context)
      states = recur(kind, cell['stack'], states, projected)
      deep = np.tanh(dense(cell['deep'], np.concatenate([states[-1][0], context, word])))
      assert_step(made[t], b, dense(output, deep), weights)


@pytest.mark.parametrize(('input_feeding', 'layers'), [(True, 2), (False, 1)])
def test_luong_attends_with_the_new_state(input_feeding, layers):
  model = build_tiny('luong', f'rnn="lstm", layers={layers}, input_feeding={input_feeding}')
  params, encoded, embeddings, made = first_two_steps(model)
  cell, output = params['decoder']['cell'], params['output']
  for b, length in enumerate(LENGTHS):
    states, feed = first_states('lstm', cell['stack'], layers, encoded.final[b]), None
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t])
      if input_feeding and feed is not None:
        projected = projected + dense(cell['feed_gates'], feed)
      states = recur('lstm', cell['stack'], states, projected)
      context, weights = additive(cell['attention'], states[-1][0], encoded.memory[b, :length])
      feed = np.tanh(dense(cell['attentional'], np.concatenate([context, states[-1][0]])))
      assert_step(made[t], b, dense(output, feed), weights)


@pytest.mark.parametrize('current', [True, False])
def test_gnmt_tells_all_layers_what_the_lowest_one_has_found(current):
  model = build_tiny('gnmt', f'layers=4, current={current}', encoder='gnmt(rnn="simple", features=5, layers=3)')
  params, encoded, embeddings, made = first_two_steps(model)
  cell, output = params['decoder']['cell'], params['output']
  for b, length in enumerate(LENGTHS):
    states = first_states('lstm', cell['stack'], 1, encoded.final[b])
    states += first_states('lstm', cell['above'], 3, encoded.final[b])
    context = np.zeros(encoded.memory.shape[-1])
    for t in range(2):
      if not current:
        context, weights = additive(cell['attention'], states[0][0], encoded.memory[b, :length])
      given, new, below = context, [], 0.0
      for layer, state in enumerate(states):
        own = cell['above'][f'cells_{layer - 1}'] if layer else cell['stack']['cells_0']
        if layer == 0:
          projected = dense(own['inputs'], embeddings[b, t]) + dense(cell['context_gates'], given)
        else:
          projected = dense(own['inputs'], np.concatenate([below, given]))
        new.append(REFERENCE_CELLS['lstm'][1](projected, state, own['kernel'], own['bias']))
        below = new[-1][0] + (below if layer >= 2 else 0.0)
        if layer == 0 and current:
          context, weights = additive(cell['attention'], new[0][0], encoded.memory[b, :length])
          given = context
      states = new
      assert_step(made[t], b, dense(output, below), weights)


def test_gnmt_says_what_it_cannot_do():
  for options, message in (
    ('layers=1', 'layers must be at least 2'),
    ('layers=2', "alignment 'latent' needs features of every position"),
  ):
    model = build_tiny('gnmt', options, alignment='latent' if options == 'layers=2' else 'softmax')
    with pytest.raises(aj.UserError, match=message):
      jax.eval_shape(model.init, RNGS, *inputs())


@pytest.mark.parametrize('feed_context', [True, False])
def test_plain_sees_one_fixed_vector(feed_context):
  model = build_tiny('plain', f'rnn="simple", feed_context={feed_context}')
  params, encoded, embeddings, made = first_two_steps(model)
  cell, output = params['decoder']['cell'], params['output']
  for b in range(B):
    states = first_states('simple', cell['stack'], 1, encoded.final[b])
    for t in range(2):
      projected = dense(cell['stack']['cells_0']['inputs'], embeddings[b, t])
      if feed_context:
        projected = projected + dense(cell['context_gates'], encoded.final[b])
      states = recur('simple', cell['stack'], states, projected)
      assert_step(made[t], b, dense(output, states[-1][0]), [])


def test_weights_of_several_heads_are_averaged():
  model = build_tiny('bahdanau', 'rnn="simple"', heads=3)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs = jax.jit(model.apply)(params, source, mask, target)
  np.testing.assert_allclose(outputs.weights.sum(-1), np.ones((B, T)), rtol=1e-5)


# --------------------------------------------------------------------------------------------------- the whole product


def call_and_step(model, source, mask, target):
  """Everything a model does, in training and in search."""
  carry, memory = model.start(source, mask, target.shape[1])
  after, stepped = model.step(carry, shift_right(target)[:, 0], memory)
  same = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
  assert jax.tree.all(jax.tree.map(same, carry, after)), 'a carry must come out as it went in'
  return model(source, mask, target), stepped


FOURTHS = list(itertools.product(range(3), range(4)))
# The first part has every fourth pair of score and alignment, and both with every cell; all parts have every triple.
PARTS = [(0, 0), *(pytest.param(*part, marks=pytest.mark.product) for part in FOURTHS[1:])]


@pytest.mark.parametrize(('part', 'quarter'), PARTS)
@pytest.mark.parametrize('score', aj.SCORES)
def test_every_alignment_fits(score, part, quarter):
  place = list(aj.SCORES).index(score)
  cells = itertools.islice(itertools.cycle(CELLS), place + part, None)
  triples = zip(aj.ALIGNMENTS, cells, itertools.cycle((1, 1, 2, 2)), strict=False)
  for alignment, cell, heads in itertools.islice(triples, (place + quarter) % 4, None, 4):
    latent = aj.ALIGNMENTS[alignment].latent
    heads, cell = (1, 'luong' if cell == 'gnmt' else cell) if latent else (heads, cell)
    model = build_tiny(cell, 'rnn="simple"', score=score, alignment=alignment, heads=heads, dtype='bfloat16')
    run = functools.partial(model.init_with_output, method=call_and_step)
    (outputs, stepped), _ = jax.eval_shape(run, RNGS, *inputs())
    assert (outputs.logits.shape, outputs.weights.shape) == ((B, T, TARGET_WORDS), (B, T, S))
    assert (stepped.logits.shape, stepped.weights.shape) == ((B, TARGET_WORDS), (B, S))
    assert {leaf.dtype for leaf in jax.tree.leaves((outputs._replace(linear=()), stepped))} == {jnp.dtype(jnp.float32)}


# ----------------------------------------------------------------------------------------------------------- gradients

# Each score and each alignment once at least. Without a cell around them all pairs have their gradients looked at in
# tests/functional.
PAIRS = list(zip(itertools.cycle(aj.SCORES), aj.ALIGNMENTS, strict=False))


@pytest.mark.parametrize(('score', 'alignment'), sample_cases(PAIRS, 2))
def test_gradients_reach_every_parameter(score, alignment):
  encoder = 'rnn(rnn="simple", features=10)'
  model = build_tiny('bahdanau', 'rnn="simple"', score=score, alignment=alignment, encoder=encoder)
  source, mask, target = inputs()
  params = variables(model, source, mask, target, scale=0.4)

  def loss(params):
    outputs = model.apply(params, source, mask, target, deterministic=False, rngs=RNGS)
    drawn = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(outputs.state) if alignment == 'hard')
    return drawn - jnp.mean(jax.nn.log_softmax(outputs.logits)[..., 5])

  for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
    name = jax.tree_util.keystr(path)
    assert np.all(np.isfinite(gradient)), name
    # The choice of the largest has no gradient, and what leads to it is the attention's.
    assert np.any(gradient != 0) == (alignment != 'hardmax' or "['attention']" not in name), name
