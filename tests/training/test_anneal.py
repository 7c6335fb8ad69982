"""Annealing: which parameters are scalars, the values that schedules give them, and errors of the spec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.training.anneal import apply_schedules, make_anneal, zero_scheduled

PARAMS = {
  'temperature': jnp.ones(()),
  'dense': {'bias': jnp.ones(3), 'kernel': jnp.ones((3, 3))},
  'attention': {
    'score_params': {'beta': jnp.ones(2), 'v': jnp.ones((2, 3))},
    'alignment_params': {'bias': jnp.ones(2, jnp.bfloat16), 'temperature': jnp.ones(2)},
  },
}


def test_only_scalars_are_replaced_wherever_they_are_and_only_their_gradients_are_zero():
  schedules = make_anneal('temperature: constant(rate=0.25); bias: linear(peak=3.0, end=1.0)', PARAMS, 4)
  annealed = jax.jit(lambda params, n: apply_schedules(params, schedules, n))(PARAMS, jnp.int32(3))
  alignment = {'bias': np.full(2, 1.5), 'temperature': np.full(2, 0.25)}
  expected = PARAMS | {'temperature': 0.25}
  expected['attention'] = PARAMS['attention'] | {'alignment_params': alignment}
  jax.tree.map(np.testing.assert_array_equal, annealed, expected)
  assert jax.tree.map(lambda x: x.dtype, annealed) == jax.tree.map(lambda x: x.dtype, PARAMS)
  gradients = zero_scheduled(PARAMS, schedules)
  assert not gradients['temperature'] and not gradients['attention']['alignment_params']['bias'].any()
  assert gradients['dense']['bias'].all() and gradients['attention']['score_params']['beta'].all()


def test_an_empty_spec_changes_nothing():
  for spec in ('', ' ', ';'):
    assert make_anneal(spec, PARAMS, 10) == {}
  assert make_anneal('', {'kernel': jnp.ones(3)}, 10) == {}
  jax.tree.map(np.testing.assert_array_equal, apply_schedules(PARAMS, {}, 1), PARAMS)
  assert apply_schedules((), {}, 1) == ()  # a state without an average


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('temprature: cosine', r"'temprature' \(did you mean 'temperature'\?\); expected one of: beta, bias, temperature$"),
    ('kernel: cosine', 'unknown parameter in training.anneal: .kernel.'),
    ('v: cosine', 'unknown parameter in training.anneal: .v.'),
    ('beta: cosin', "unknown schedule 'cosin'"),
    ('beta: linear(pek=2.0)', "option of schedule 'linear': 'pek'"),
    ('beta', r'training.anneal: cannot parse .beta.; expected .parameter: schedule; \.\.\.., each parameter once'),
    ('beta: cosine; beta: linear', 'each parameter once'),
  ],
)
def test_wrong_specs_are_reported_in_one_line(spec, message):
  with pytest.raises(UserError, match=message) as error:
    make_anneal(spec, PARAMS, 10)
  assert '\n' not in str(error.value)


def test_a_model_without_scalars_cannot_be_annealed():
  spec = 'temperature: cosine'
  message = (
    f"has no scalar parameter, got '{spec}'; scores and alignments with one: .*cosine, .*, entmax, gumbel_annealed, "
  )
  with pytest.raises(UserError, match=message):
    make_anneal(spec, {'kernel': jnp.ones(3)}, 10)
