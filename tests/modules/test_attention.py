"""The Attention module: it owns the parameters of `aj.attend`, adds heads, and steps as it runs all at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import LocalWindow
from tests.modules.helpers import assert_close, assert_same, draw, variables

B, T, S, QUERY, ENCODED, FEATURES = 2, 3, 7, 5, 11, 6
LENGTHS = [S, 4]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
EQUAL_WIDTH_SCORES = ('dot', 'scaled_dot', 'cosine')  # one head of these compares the query and the memory as they are
# Every row once: each score with one alignment, each other alignment with a score that is scanned.
CORE_PAIRS = [(score, 'softmax') for score in aj.SCORES] + [('coverage', a) for a in aj.ALIGNMENTS if a != 'softmax']
every_row = pytest.mark.parametrize(('score', 'alignment'), CORE_PAIRS)


def given(score: str, heads: int = 1) -> tuple[jax.Array, jax.Array]:
  """A query [B, T, D] and an encoded source [B, S, D']."""
  return draw(B, T, QUERY), draw(B, S, QUERY if score in EQUAL_WIDTH_SCORES and heads == 1 else ENCODED)


def at_once(module, query, encoded, mask):
  return module.parallel(query, module.remember(encoded, mask))


def parameters(module, query, encoded):
  return variables(module, query, encoded, MASK, method=at_once)


def both_ways(module, params, query, encoded, mask):
  """All queries at once, and one after the other."""
  memory = module.apply(params, encoded, mask, method='remember')
  carry = module.apply(params, memory, method='init_carry')
  step = lambda carry, query: module.apply(params, carry, query, memory)
  _, stepped = jax.lax.scan(step, carry, jnp.moveaxis(query, 1, 0))
  stepped = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), stepped)
  return module.apply(params, query, memory, method='parallel'), stepped


run_both_ways = jax.jit(both_ways, static_argnums=0)


@every_row
def test_one_head_is_attend_and_steps_as_it_runs_at_once(score, alignment):
  module = aj.Attention(score, alignment, FEATURES)
  query, encoded = given(score)
  params = parameters(module, query, encoded)
  attended, stepped = run_both_ways(module, params, query, encoded, MASK)
  assert attended.context.shape == (B, T, encoded.shape[-1]) and attended.weights.shape == (B, T, S)
  assert_close(stepped, attended)

  own = jax.tree.map(lambda leaf: leaf[0], params.get('params', {}))  # the axis of heads
  flat = {'score': own.get('score_params', {}), 'alignment': own.get('alignment_params', {})}
  flat |= {side: own[f'{side}_kernel']['kernel'] for side in ('query', 'key') if f'{side}_kernel' in own}
  fn = functools.partial(aj.attend, score=score, alignment=alignment, params=flat)
  assert_close(attended, jax.jit(fn)(query, encoded, encoded, MASK[:, None]))


@pytest.mark.parametrize(
  'alignment', [name for name, row in aj.ALIGNMENTS.items() if isinstance(row.form, LocalWindow)]
)
@pytest.mark.parametrize('heads', [1, 2])
def test_another_implementation_is_the_same_attention(alignment, heads):
  alignment = f'{alignment}(width=1)'
  query, encoded = given('additive', heads)
  whole = aj.Attention('additive', alignment, FEATURES, heads)
  params = parameters(whole, query, encoded)
  window = aj.Attention('additive', alignment, FEATURES, heads, implementation='window')
  assert_close(run_both_ways(window, params, query, encoded, MASK), run_both_ways(whole, params, query, encoded, MASK))


@pytest.mark.parametrize(
  ('score', 'alignment'), [('location_sensitive', 'entmax'), ('coverage', 'sparsemax'), ('general', 'sigmoid')]
)
def test_heads_step_as_they_run_at_once(score, alignment):
  module = aj.Attention(score, alignment, FEATURES, heads=3)
  query, encoded = given(score, heads=3)
  attended, stepped = run_both_ways(module, parameters(module, query, encoded), query, encoded, MASK)
  assert attended.context.shape == (B, T, FEATURES) and attended.weights.shape == (B, 3, T, S)
  assert_close(stepped, attended)
  assert np.all(attended.weights[~np.broadcast_to(MASK[:, None, None], attended.weights.shape)] == 0)


PAPERS = {
  'scaled_dot': lambda q, k, params: [q @ row / np.sqrt(len(q)) for row in k],
  'additive': lambda q, k, params: [np.tanh(q + row) @ params['v'] for row in k],
  'general': lambda q, k, params: [q @ params['w'] @ row for row in k],
}


@pytest.mark.parametrize('score', PAPERS)
def test_heads_are_projected_attended_and_joined(score):
  heads = 2
  module = aj.Attention(score, 'softmax', FEATURES, heads)
  query, encoded = given(score, heads)
  params = parameters(module, query, encoded)
  attended, _ = run_both_ways(module, params, query, encoded, MASK)
  own = jax.tree.map(np.asarray, params['params'])
  for b, length in enumerate(LENGTHS):
    for t in range(T):
      contexts = []
      for n in range(heads):
        q = query[b, t] @ own['query_kernel']['kernel'][n]
        k = encoded[b, :length] @ own['key_kernel']['kernel'][n]
        value = encoded[b, :length] @ own['value_kernel']['kernel'][n]
        learned = {name: param[n] for name, param in own.get('score_params', {}).items()}
        exponentials = np.exp(PAPERS[score](np.asarray(q), np.asarray(k), learned))
        weights = exponentials / exponentials.sum()
        np.testing.assert_allclose(attended.weights[b, n, t, :length], weights, rtol=1e-4, atol=1e-5)
        contexts.append(weights @ value)
      joined = np.concatenate(contexts) @ own['join']['kernel']
      np.testing.assert_allclose(attended.context[b, t], joined, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('score', 'heads'), [('additive', 1), ('location_sensitive', 2), ('cosine', 1), ('dot', 2)])
def test_padding_changes_nothing(score, heads):
  module = aj.Attention(score, 'entmax15', FEATURES, heads)
  query, encoded = given(score, heads)
  params = parameters(module, query, encoded)
  result = run_both_ways(module, params, query, encoded, MASK)
  for filler in (jnp.nan, 1e30):
    assert_same(run_both_ways(module, params, query, jnp.where(MASK[..., None], encoded, filler), MASK), result)
  short = LENGTHS[1]
  alone = run_both_ways(module, params, query[1:], encoded[1:, :short], MASK[1:, :short])
  for whole, cut in zip(result, alone, strict=True):
    assert_close(whole.context[1:], cut.context)
    assert_close(whole.weights[1:, ..., :short], cut.weights)


@pytest.mark.parametrize('heads', [1, 2])
def test_an_empty_memory_gives_zeros_and_no_gradient(heads):
  module = aj.Attention('coverage', 'softmax', FEATURES, heads)
  query, encoded = given('coverage', heads)
  params = parameters(module, query, encoded)
  empty = MASK & jnp.asarray([[True], [False]])
  attended, stepped = run_both_ways(module, params, query, encoded, empty)
  for result in (attended, stepped):
    assert np.all(result.weights[1] == 0) and np.all(result.context[1] == 0)
    assert np.all(np.isfinite(result.context))
  loss = lambda query, encoded: jnp.sum(module.apply(params, query, encoded, empty, method=at_once).context)
  for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(query, encoded):
    assert np.all(np.isfinite(gradient)) and np.all(gradient[1] == 0) and np.any(gradient[0] != 0)


def test_a_mask_may_differ_from_query_to_query():
  module = aj.Attention('additive', 'softmax', FEATURES)
  query, encoded = given('additive')
  params = parameters(module, query, encoded)
  run = jax.jit(functools.partial(module.apply, method=at_once))
  mask = MASK[:, None] & aj.window_mask(S, 1, 2)[None, :T]
  attended = run(params, query, encoded, mask)
  for t in range(T):
    row = run(params, query, encoded, mask[:, t])
    assert_close(jax.tree.map(lambda x, t=t: x[:, t], attended), jax.tree.map(lambda x, t=t: x[:, t], row))


@every_row
@pytest.mark.parametrize('heads', [1, 2])
def test_bfloat16_keeps_its_type_and_the_weights_float32(score, alignment, heads):
  if aj.ALIGNMENTS[alignment].latent:
    heads = 1
  module = aj.Attention(score, alignment, FEATURES, heads, dtype=jnp.bfloat16)
  query, encoded = given(score, heads)
  params = parameters(module, query, encoded)
  for attended in jax.eval_shape(functools.partial(both_ways, module), params, query, encoded, MASK):
    assert attended.context.dtype == jnp.bfloat16 and attended.weights.dtype == jnp.float32


def test_bfloat16_is_near_float32():
  query, encoded = given('location_sensitive')
  params = parameters(aj.Attention('location_sensitive', 'softmax', FEATURES), query, encoded)
  params = jax.tree.map(lambda p: 0.3 * p, params)
  exact, near = (
    run_both_ways(aj.Attention('location_sensitive', 'softmax', FEATURES, dtype=dtype), params, query, encoded, MASK)
    for dtype in (jnp.float32, jnp.bfloat16)
  )
  assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), near), exact, rtol=0.1, atol=0.05)


def noisy(scores, mask, *, rng):
  return jnp.where(mask, jax.random.uniform(rng, scores.shape), 0.0)


def test_what_draws_draws_for_every_row_head_and_query_by_itself():
  module = aj.Attention('additive', noisy, FEATURES, heads=2)
  query, encoded = jnp.ones((B, T, QUERY)), jnp.ones((B, S, ENCODED))
  mask = jnp.ones((B, S), bool)
  params = variables(module, query, encoded, mask, method=at_once)
  run = jax.jit(lambda rng: module.apply(params, query, encoded, mask, method=at_once, rngs={'attention': rng}))
  weights = np.asarray(run(jax.random.key(0)).weights)
  assert len(np.unique(weights)) == weights.size
  assert_same(run(jax.random.key(0)).weights, weights)
  assert np.all(run(jax.random.key(1)).weights != weights)


def test_the_twin_for_test_time_needs_no_randomness():
  row = aj.Row(noisy, at_test=aj.alignments.hardmax)
  module = aj.Attention('additive', row, FEATURES)
  query, encoded = given('additive')
  params = parameters(module, query, encoded)
  run = jax.jit(functools.partial(module.apply, method=at_once))
  assert set(np.unique(run(params, query, encoded, MASK).weights)) == {0.0, 1.0}


def test_options_reach_the_parameters():
  module = aj.Attention('low_rank(rank=3)', 'entmax(alpha=1.2)', FEATURES)
  params = parameters(module, *given('low_rank'))['params']
  assert {name: leaf.shape for name, leaf in params['score_params'].items()} == {
    'u': (1, QUERY, 3),
    'v': (1, ENCODED, 3),
  }
  assert 'alignment_params' not in params


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'features': 7, 'heads': 2}, 'attention: features=7 cannot be divided among heads=2'),
    ({'heads': 0}, 'attention: features=6 cannot be divided among heads=0'),
    ({'score': 'aditive'}, r"unknown score 'aditive' \(did you mean 'additive'\?\); possible: additive, concat"),
    ({'alignment': 'softmx'}, r"unknown alignment 'softmx' \(did you mean 'softmax'\?\)"),
    ({'alignment': 'softmax(heat=2)'}, r"unknown option of alignment 'softmax': 'heat'"),
    ({'implementation': 'window'}, "implementation 'window' cannot compute this: the alignment looks at the whole"),
    ({'alignment': 'latent', 'heads': 2}, 'a latent alignment is over one position, got heads=2'),
    ({'implementation': 'fused'}, "unknown implementation 'fused'"),
  ],
)
def test_mistakes_are_named(fields, message):
  module = aj.Attention(**{'features': FEATURES} | fields)
  with pytest.raises(aj.UserError, match=message):
    parameters(module, *given('additive'))


def test_a_memory_longer_than_location_knows_is_an_error():
  module = aj.Attention(f'location(max_positions={S - 1})', 'softmax', FEATURES)
  with pytest.raises(ValueError, match=f'max_positions={S}'):
    parameters(module, *given('location'))
