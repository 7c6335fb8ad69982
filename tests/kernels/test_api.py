"""What does not fit in `attend` is refused in one line that names the argument, its shape and what is possible."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import config

import attention_jax as aj
from attention_jax.functional import attend as definition
from attention_jax.kernels.api import IMPLEMENTATIONS

B, T, S, D, K, V, F = 2, 3, 7, 5, 11, 13, 17
GIVEN = {'query': jnp.ones((B, T, D)), 'key': jnp.ones((B, S, D)), 'value': jnp.ones((B, S, V))}
DRAWS = lambda scores, mask, *, rng: scores
ADDITIVE = {
  'score': 'additive',
  'params': {'score': {'v': jnp.ones(F)}, 'query': jnp.ones((D, F)), 'key': jnp.ones((K, F))},
}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'query': jnp.ones(D)}, r'query is \[..., T, Dq\].*; got query \(5,\), key \(2, 7, 5\), value \(2, 7, 13\)'),
    ({'query': jnp.ones((T, D))}, r'the same leading \(batch\) axes; got query \(3, 5\), key \(2, 7, 5\)'),
    ({'value': jnp.ones((B, 6, V))}, r'the same number of positions S; got .*value \(2, 6, 13\)'),
    ({'key': jnp.ones((B, 0, D)), 'value': jnp.ones((B, 0, V))}, r'at least one position, .* key \(2, 0, 5\)'),
    ({'value': jnp.ones((B, S, V), int)}, 'must be float, got float32, float32, int32'),
    ({'key': jnp.ones((B, S, K))}, r'query \(5,\) and key \(7, 11\) \(of one .*, projected\) must be of the same'),
    ({'query': jnp.ones((B, T, 1))}, r'query \(1,\) and key \(7, 5\) .* must be of the same width'),
    ({'query': jnp.ones((B, T, 1)), 'implementation': 'flash'}, r'query \(1,\) and key \(7, 5\) .* the same width'),
    ({'key': jnp.ones((B, S, 0)), 'query': jnp.ones((B, T, 0))}, 'must have at least one feature; got query'),
    ({'mask': jnp.ones((B, T, S))}, 'mask must be bool, got float32'),
    ({'mask': jnp.ones((B, S), bool)}, r'mask \(2, 7\) does not broadcast to \[..., T, S\] = \(2, 3, 7\); a padding'),
    ({'mask': jnp.ones((1, B, T, S), bool)}, r'mask \(1, 2, 3, 7\) does not broadcast'),
    ({'bias': jnp.ones((T, 6))}, r'bias \(3, 6\) does not broadcast to'),
    ({'bias': jnp.ones((T, S), int)}, 'bias must be float, got int32'),
    ({'score': 'general'}, r"params\['score'\] must hold \['w'\], got \[\]; init_params"),
    ({'score': 'dot', 'params': {'score': {'w': 1}}}, r"params\['score'\] must hold \[\], got \['w'\]"),
    ({'alignment': 'entmax'}, r"params\['alignment'\] must hold \['alpha'\], got \[\]"),
    ({'params': {'scores': {}}}, r"unknown entry of attend's params 'scores' \(did you mean 'score'\?\)"),
    (
      {'score': 'general', 'params': {'score': {'w': jnp.ones((K, D))}}},
      r"params\['score'\]\['w'\] must be \[query = 5, key = 5\], got \[11, 5\]",
    ),
    (
      {'score': 'low_rank', 'params': {'score': {'u': jnp.ones((D, 3)), 'v': jnp.ones((D, 2))}}},
      r"params\['score'\]\['v'\] must be \[key = 5, rank = 3\], got \[5, 2\]",
    ),
    (
      {'alignment': 'entmax', 'params': {'alignment': {'alpha': jnp.ones(S)}}},
      r"params\['alignment'\]\['alpha'\] must be \[\], got \[7\]",
    ),
    ({'params': [1]}, r'params must be as init_params gives them, .* got \[1\]'),
    ({'params': {'score': None}}, r"params\['score'\] must be a dictionary, got None; init_params"),
    ({'score': lambda query, key: key}, r'the score of one query must be \[S\] = \[7\], got \(7, 5\)'),
    ({'score': lambda query, key: None}, r'the score of one query must be \[S\] = \[7\], got \(\)'),
    ({'alignment': lambda scores, mask: scores[1:]}, r'the alignment of one query must be \[S\] = \[7\], got \(6,\)'),
    ({'alignment': aj.alignments.monotonic}, 'alignment: this function keeps a state; possible: Row'),
    (ADDITIVE, r"params\['key'\] \(11, 17\) does not project key \(2, 7, 5\)"),
    (
      {'score': 'additive', 'params': {'score': {'v': jnp.ones(F)}}},
      r"params\['score'\]\['v'\] must be \[features = 5\], got \[17\]",
    ),
    (
      {'score': 'location(max_positions=3)', 'params': {'score': {'w': jnp.ones((3, D))}}},
      "S=7 positions but w only max_positions=3 rows; set 'location",
    ),
    ({'alignment': DRAWS}, 'this alignment draws at random; give rng'),
    ({'alignment': 'sofmax'}, "unknown alignment 'sofmax'"),
    ({'score': 'dott'}, r"unknown score 'dott' \(did you mean 'dot'\?\)"),
    ({'alignment': 'softmax(temperature=0.0)'}, 'temperature must be greater than 0, got 0.0'),
    ({'alignment': 'entmax(alpha=1)'}, 'alpha must be greater than 1, got 1'),
    ({'implementation': 'xlaa'}, r"unknown implementation 'xlaa' \(did you mean 'xla'\?\); possible: "),
  ],
)
def test_what_does_not_fit_is_refused(changes, message, monkeypatch):
  # jaxtyping would answer first where a score's own shapes are wrong; users do not run under it.
  monkeypatch.setattr(config, 'jaxtyping_disable', True)
  with pytest.raises(ValueError, match=message):
    aj.attend(**(GIVEN | changes))


def test_a_mistake_inside_a_users_function_keeps_its_type():
  def branches(query, key):
    return key[:, 0] if query[0] > 0 else key[:, 1]

  with pytest.raises(jax.errors.TracerBoolConversionError):
    aj.attend(**GIVEN, score=branches)


def test_xla_is_the_definition():
  assert IMPLEMENTATIONS['xla'].attend is definition.attend


@pytest.mark.parametrize('shape', [(), (3,), (2, 5), (0,)])
def test_any_batch_axes(shape):
  attended = aj.attend(*(jnp.ones((*shape, *x.shape[1:])) for x in GIVEN.values()))
  assert attended.context.shape == (*shape, T, V) and attended.weights.shape == (*shape, T, S)
