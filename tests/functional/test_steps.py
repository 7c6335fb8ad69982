"""The step interface: inputs and dtypes, specs as for `attend`, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj


@pytest.mark.long
@pytest.mark.parametrize('alignment', ['softmax', 'sparsemax', 'entmax15', 'entmax(alpha=1.3)', 'monotonic'])
def test_numpy_arrays_are_accepted_inside_of_a_scan(alignment):
  """jax.vmap leaves NumPy arrays as they are; the custom derivatives of sparse alignments do not accept them."""
  key, queries = np.eye(4, dtype=np.float32), np.ones((2, 3, 4), np.float32)
  mask = np.array([[True, True, False, True], [True, False, True, True]])

  def run(queries, mask):
    def step(carries, query):
      def one(carry, query, mask):
        memory = aj.remember(key, key, mask, alignment=alignment)
        return aj.attend_step('dot', alignment, None, carry, query, memory)

      return jax.vmap(one)(carries, query, mask)

    carries = jax.vmap(lambda _: aj.init_carry('dot', alignment, 4))(queries[:, 0])
    return jax.lax.scan(step, carries, queries.swapaxes(0, 1))[1].weights

  np.testing.assert_array_equal(jax.jit(lambda: run(queries, mask))(), jax.jit(run)(queries, mask))


@pytest.mark.long
@pytest.mark.parametrize('alignment', ['softmax', 'monotonic', 'mocha', 'forward', 'latent_monotonic', 'hard'])
def test_float64_queries_keep_the_dtype_of_the_carry(alignment):
  with jax.enable_x64(True):
    queries, key = np.ones((3, 4)), np.eye(4)
    params = aj.init_params(jax.random.key(0), score='dot', alignment=alignment, query=4, key=4, features=4)

    def run(dtype):
      memory = aj.remember(key, key, params=params, alignment=alignment)
      carry = aj.init_carry('dot', alignment, 4, dtype)
      return jax.lax.scan(lambda c, q: aj.attend_step('dot', alignment, params, c, q, memory), carry, queries)

    for dtype in (jnp.float32, jnp.float64):
      carry, attended = jax.eval_shape(functools.partial(run, dtype))
      assert carry.previous.dtype == dtype and attended.weights.dtype == jnp.float64


@pytest.mark.long
def test_masked_content_does_not_reach_the_memory():
  key = jnp.ones((3, 2)).at[2].set(jnp.nan)
  memory = aj.remember(key, key, jnp.array([True, True, False]), params={'key': jnp.ones((2, 4))})
  np.testing.assert_array_equal(memory.key, jnp.array([2.0, 2.0, 0.0])[:, None].repeat(4, 1))
  assert np.all(memory.value[2] == 0)
  assert np.all(aj.remember(key[:2], key[:2]).mask)


def test_a_function_may_be_a_variant():
  memory = aj.remember(jnp.eye(3), jnp.eye(3))

  def score(query, key):
    return key @ query

  carry = aj.init_carry(score, 'hardmax', 3)
  _, attended = aj.attend_step(score, 'hardmax', None, carry, jnp.array([0.1, 3.0, 1.0]), memory)
  np.testing.assert_array_equal(attended.weights, [0, 1, 0])


MASK = jnp.ones(5, bool)
KEY = jnp.ones((5, 4))
MEMORY = aj.Memory(KEY, KEY, MASK)


@pytest.mark.parametrize(
  'arrays', [(KEY[:1], KEY), (KEY, KEY, MASK[:1]), (KEY[None], KEY[None])], ids=['values', 'mask', 'batch']
)
def test_a_memory_of_shapes_that_do_not_match_raises(arrays):
  """One key and several values would be broadcast without an error."""
  with pytest.raises(aj.UserError, match=r'remember: key must be \[S, Dk\], value \[S, V\] and mask \[S\], got'):
    aj.remember(*arrays)


def projecting_params():
  return aj.init_params(jax.random.key(0), score='additive', query=4, key=4, features=4)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'memory': MEMORY._replace(mask=jnp.zeros(5))}, 'mask must be bool, True = may be attended to, got float32'),
    ({'memory': MEMORY._replace(mask=MASK[:4])}, r'and mask \[S\], got \(5, 4\), \(5, 4\) and \(4,\)'),
    ({'memory': MEMORY._replace(value=KEY[:1])}, r'and mask \[S\], got \(5, 4\), \(1, 4\) and \(5,\)'),
    ({'memory': aj.Memory(KEY[None], KEY[None], MASK[None])}, 'for a batch, vmap it'),
    ({'memory': (1, 2)}, r'memory must be a memory from remember, or a Memory, got \(1, 2\)'),
    ({'carry': None}, 'carry must be a Carry, from init_carry or the previous step, got None'),
    ({'carry': aj.init_carry('dot', 'softmax', 4)}, 'carry must be for the 5 positions of the memory, got shape'),
    (
      {'carry': aj.init_carry('dot', 'softmax', 5), 'alignment': 'forward'},
      'carry must have the state of this score and alignment, .*use init_carry',
    ),
    ({'carry': aj.init_carry('dot', 'monotonic', 5), 'alignment': 'hard'}, 'carry must have the state of this score'),
    ({'bias': MASK}, 'bias must be float, got bool'),
    ({'bias': jnp.zeros(1)}, 'bias must be for the 5 positions of the memory, got shape'),
    ({'query': None}, 'query must be float, got None'),
    ({'params': {'scores': {}}}, "unknown entry of attend_step's params 'scores'.*mean 'score'"),
    ({'score': 'additive'}, r"params\['score'\] must have the entries \['v'\], got \[\]; use init_params"),
    (
      {'score': 'additive', 'params': {'score': {'v': jnp.ones(1)}}},
      r"params\['score'\]\['v'\] must be \[features = 4\], got \[1\]",
    ),
    ({'score': 'additive', 'params': projecting_params()}, r'make it once by remember\('),
    ({'alignment': 'hard', 'deterministic': False}, 'this alignment samples; rng must be a PRNG key, got None'),
    ({'alignment': 'hard', 'deterministic': False, 'rng': 3}, 'rng must be a single'),
  ],
)
def test_invalid_arguments_of_a_step_raise(changes, message):
  options = {'score': 'dot', 'alignment': 'softmax', 'params': None, 'query': jnp.ones(4), 'memory': MEMORY} | changes
  carry = options.pop('carry', aj.init_carry(options['score'], options['alignment'], 5))
  with pytest.raises(aj.UserError, match=message):
    aj.attend_step(carry=carry, **options)


def test_an_alignment_that_samples_needs_no_rng_at_test_time():
  aj.attend_step('dot', 'hard', {}, aj.init_carry('dot', 'hard', 5), jnp.ones(4), MEMORY)


@pytest.mark.parametrize('size', ['5', -1])
def test_invalid_sizes_of_a_carry_raise(size):
  with pytest.raises(aj.UserError, match='init_carry: size must be a whole number of at least 0, got '):
    aj.init_carry('dot', 'softmax', size)


def test_lists_are_arrays():
  keys = [[1.0, 0.0], [0.0, 1.0]]
  memory = aj.remember(keys, keys)
  _, attended = aj.attend_step('dot', 'hardmax', None, aj.init_carry('dot', 'hardmax', 2), [0.0, 1.0], memory)
  np.testing.assert_array_equal(attended.context, [0, 1])
