"""Tables of variants: rows that contradict their function raise, and so do invalid specs."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import INITIALIZERS, SIZES, Param, Row, check_table, init_row_params, lookup


def plain(query, key):
  return key @ query


def with_parameter(query, key, *, w):
  return key @ w @ query


def with_state(scores, mask, *, state):
  return scores, state


def with_rng(scores, mask, *, rng):
  return scores


def with_remembered(scores, mask, *, remembered):
  return scores


def with_supplied_option(scores, mask, *, query=1.0):
  return scores


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    (Row(with_parameter), r"the function takes the parameters \['w'\], the row has shapes for \[\]"),
    (
      Row(plain, params={'w': Param(('query',))}),
      r"the function takes the parameters \[\], the row has shapes for \['w'\]",
    ),
    (
      Row(with_parameter, params={'w': Param(('key+rank',))}),
      r"parameter w: unknown sizes \['rank'\]; expected some of: features, key",
    ),
    (Row(with_parameter, params={'w': Param(('key',), 'orthogonal')}), "initialiser 'orthogonal'"),
    (Row(with_state), 'init_state is required if and only if'),
    (Row(plain, init_state=lambda size, dtype: 0), 'init_state is required if and only if'),
    (Row(with_remembered), 'remember is required if and only if'),
    (Row(plain, at_test=with_rng), r"at_test takes \['rng'\], which the variant does not take"),
    (Row(with_supplied_option), r"\['query'\] .* cannot be options"),
    (Row(plain, sizes={'state': 3}), r"\['state'\] .* cannot be options"),
    (Row(plain, optional={'w': Param(())}), 'must take the optional parameter w by keyword, with default None'),
  ],
)
def test_a_row_that_contradicts_its_function_raises(row, message):
  with pytest.raises(TypeError, match=f'^name: .*{message}'):
    check_table({'name': row})


def test_a_row_outside_of_a_table_is_checked_too():
  sizes = {'query': 2, 'key': 3, 'value': 3, 'features': 4}
  with pytest.raises(TypeError, match=r"^with_parameter: parameter w: unknown sizes \['keys'\]; expected some of: "):
    init_row_params(jax.random.key(0), Row(with_parameter, params={'w': Param(('keys',))}), sizes)
  params = init_row_params(jax.random.key(0), Row(with_parameter, params={'w': Param(('key',), 1)}), sizes)
  np.testing.assert_array_equal(params['w'], [1, 1, 1])


def test_a_consistent_table_is_returned():
  row = Row(with_parameter, params={'w': Param(('key', 'rank'))}, sizes={'rank': 2})
  table = {'with_parameter': row, 'with_state': Row(with_state, init_state=lambda size, dtype: 0)}
  assert check_table(table) is table


WITH_ENTRIES = aj.ALIGNMENTS | {'bare': plain, 'mine': Row(jax.nn.softmax)}
OF_JAX = r"^kind: .* must be \(scores, mask\), got softmax\(x, axis=-1, where=None\) \(did you mean 'softmax'\?\)$"


@pytest.mark.parametrize(
  ('spec', 'table', 'message'),
  [
    ('sofmax', aj.ALIGNMENTS, r"^unknown kind 'sofmax' \(did you mean 'softmax'\?\); .* one of: addr.*, windowed$"),
    ('sink', aj.ALIGNMENTS, r"^unknown kind 'sink' \(did you mean 'sink_softmax'\?\); expected one of: "),
    ('low-rank(rank=2)', aj.SCORES, r"^cannot parse kind 'low-rank\(rank=2\)' \(did you mean 'low_rank'\?\); "),
    ('bahdanau', aj.SCORES, r"^unknown kind 'bahdanau'; expected one of: additive, concat, "),
    ('softmax(temprature=1)', aj.ALIGNMENTS, r"'softmax': 'temprature' \(did you mean 'temperature'"),
    ('general(w=1)', aj.SCORES, "kind 'general' has no options, got 'w'"),
    ('softmax(temperature=True)', aj.ALIGNMENTS, 'option temperature must be a number, got True'),
    ("softmax(sink='a')", aj.ALIGNMENTS, r"option sink must be float \| bool \| None, got 'a'"),
    ('low_rank(rank=0)', aj.SCORES, 'option rank must be at least 1, got 0'),
    ('bare', WITH_ENTRIES, "kind 'bare': the entry of the table must be a Row, got <function plain"),
    (Row('dot'), aj.SCORES, "^kind: the first field of a Row must be a function, got 'dot'$"),
    (functools.partial(plain, scale=2), aj.SCORES, '^kind: cannot read the arguments of the function: .*scale=2'),
    (jax.nn.softmax, aj.ALIGNMENTS, OF_JAX),
    ('mine', WITH_ENTRIES, OF_JAX),
  ],
)
def test_an_invalid_spec_raises(spec, table, message):
  with pytest.raises(aj.UserError, match=message) as error:
    lookup(spec, table, 'kind')
  assert '\n' not in str(error.value)


def test_lookup_accepts_rows_and_functions():
  row = Row(plain)
  assert lookup(row, aj.SCORES, 'score') is row
  assert lookup(plain, aj.SCORES, 'score') == row
  assert lookup('dot', aj.SCORES, 'score').fn is aj.scores.dot


@pytest.mark.long
def test_every_number_of_axes_has_a_default_initialiser():
  shapes = {'matrix': ('query', 'key'), 'vector': ('query',), 'scalar': (), 'tensor': ('key', 'query', 'features')}

  def score(query, key, *, matrix, vector, scalar, tensor):
    return key @ vector

  row = Row(score, params={name: Param(shape) for name, shape in shapes.items()})
  params = init_row_params(jax.random.key(0), row, {'query': 500, 'key': 3, 'value': 3, 'features': 2})
  assert {name: param.shape for name, param in params.items()} == {
    'matrix': (500, 3),
    'vector': (500,),
    'scalar': (),
    'tensor': (3, 500, 2),
  }
  np.testing.assert_allclose(500 * np.mean(params['vector'] ** 2), 1, atol=0.15)
  assert np.abs(params['vector']).max() <= (3 / 500) ** 0.5 and params['scalar'] == 1


def test_the_tutorial_lists_sizes_and_initialisers():
  page = (Path(__file__).parents[2] / 'docs/tutorials/variant.md').read_text()
  assert [name for name in SIZES if f'| `{name}` |' not in page] == []
  assert [name for name in INITIALIZERS if f"| `'{name}'`" not in page] == []


def test_a_mask_may_have_the_default_none():
  assert lookup(lambda scores, mask=None: scores, aj.ALIGNMENTS, 'alignment').params == {}


def test_a_spec_fixes_a_parameter_of_remember():
  def scaled(value, *, scale):
    return scale * value

  def remembering(scores, mask, *, remembered):
    return scores * remembered[:, 0]

  table = check_table({'remembering': Row(remembering, params={'scale': Param((), 1.0)}, remember=scaled)})
  row = lookup('remembering(scale=3.0)', table, 'alignment')
  assert init_row_params(jax.random.key(0), row, {}) == {}
  assert row.remember(2.0) == 6.0


@pytest.mark.long
def test_a_row_is_a_static_argument_of_jit(rng):
  query, key = jax.random.normal(rng, (3, 4)), jax.random.normal(rng, (5, 4))
  alignment = aj.with_dropout('softmax(temperature=2.0)', 0.5)
  attend = jax.jit(aj.attend, static_argnames=('score', 'alignment', 'deterministic'))
  options = {'score': lookup('dot', aj.SCORES, 'score'), 'alignment': alignment, 'rng': rng, 'deterministic': False}
  expected = aj.attend(query, key, key, **options)
  np.testing.assert_allclose(attend(query, key, key, **options).context, expected.context, rtol=1e-5)
  assert hash(alignment) == hash(alignment._replace(sizes={'n': 1}))


def test_a_spec_makes_an_optional_parameter_learned_or_fixes_it():
  learned, fixed, without, plain_row = (
    lookup(spec, aj.ALIGNMENTS, 'alignment')
    for spec in ('softmax(sink=True, cap=2.0)', 'softmax(sink=0.5)', 'softmax(sink=False)', 'softmax')
  )
  assert set(learned.params) == {'sink'} and not fixed.params and without.fn is plain_row.fn
  assert lookup('softmax(sink=True, cap=2.0)', aj.ALIGNMENTS, 'alignment') == learned
  scores, mask = jax.numpy.arange(3.0), jax.numpy.ones(3, bool)
  np.testing.assert_array_equal(fixed.fn(scores, mask), aj.alignments.sink_softmax(scores, mask, sink=0.5))
  with pytest.raises(aj.UserError, match='softmax: sink must be one number, got True; only a spec string makes it'):
    aj.alignments.softmax(scores, mask, sink=True)
