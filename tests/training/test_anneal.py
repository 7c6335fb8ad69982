"""Which parameters are single numbers, what annealing makes of them, and what a wrong spec is told."""

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


def test_numbers_are_replaced_wherever_they_are_and_nothing_else():
  schedules = make_anneal('temperature: constant(rate=0.25); bias: linear(peak=3.0, end=1.0)', PARAMS, 4)
  found = jax.jit(lambda params, n: apply_schedules(params, schedules, n))(PARAMS, jnp.int32(3))
  wanted = PARAMS | {'temperature': 0.25}
  alignment = {'bias': np.full(2, 1.5), 'temperature': np.full(2, 0.25)}
  wanted['attention'] = PARAMS['attention'] | {'alignment_params': alignment}
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, PARAMS)
  held = zero_scheduled(PARAMS, schedules)
  assert not held['temperature'] and not held['attention']['alignment_params']['bias'].any()
  assert held['dense']['bias'].all() and held['attention']['score_params']['beta'].all()


def test_nothing_to_anneal():
  for spec in ('', ' ', ';'):
    assert make_anneal(spec, PARAMS, 10) == {}
  assert make_anneal('', {'kernel': jnp.ones(3)}, 10) == {}
  jax.tree.map(np.testing.assert_array_equal, apply_schedules(PARAMS, {}, 1), PARAMS)
  assert apply_schedules((), {}, 1) == ()  # no average is kept


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('temprature: cosine', r"'temprature' \(did you mean 'temperature'\?\); possible: beta, bias, temperature$"),
    ('kernel: cosine', 'unknown parameter in training.anneal: .kernel.'),
    ('v: cosine', 'unknown parameter in training.anneal: .v.'),
    ('beta: cosin', "unknown schedule 'cosin'"),
    ('beta: linear(pek=2.0)', "option of schedule 'linear': 'pek'"),
    ('beta', r'training.anneal: cannot read .beta.; write .parameter: schedule; \.\.\.., each parameter once'),
    ('beta: cosine; beta: linear', 'each parameter once'),
  ],
)
def test_wrong_specs_are_told_in_one_line(spec, message):
  with pytest.raises(UserError, match=message) as error:
    make_anneal(spec, PARAMS, 10)
  assert '\n' not in str(error.value)


def test_a_model_without_single_numbers_is_told():
  with pytest.raises(UserError, match=r'learns no single number; possible with .*cosine, entmax, gumbel_annealed, '):
    make_anneal('temperature: cosine', {'kernel': jnp.ones(3)}, 10)
