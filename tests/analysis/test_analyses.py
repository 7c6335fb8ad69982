"""Every row of ANALYSES on a model to which it applies, and the values of some rows against other computations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.analysis.analyses import ANALYSES, Subject, analyse
from attention_jax.analysis.interventions import AnalysedPair, target_log_probs
from attention_jax.errors import UserError
from tests.models.helpers import S, T, build_tiny, build_transformer, inputs
from tests.modules.helpers import variables

OPTIONS = {'integrated_gradients': 'steps=3', 'permutation': 'count=4', 'adversarial': 'steps=3'}
NEEDS_TRANSFORMER = ('self_attention', 'rollout', 'flow', 'head_importance')
BUILD_ACT = functools.partial(build_tiny, encoder='act(features=10, limit=3)')
build_lstmn_both = functools.partial(build_tiny, encoder='lstmn(direction="both")')
build_differential = functools.partial(build_transformer, 'differential=True')
BUILDERS = dict.fromkeys(NEEDS_TRANSFORMER, build_transformer) | {'updates': BUILD_ACT}
AXES = dict.fromkeys(('coverage', 'updates'), 'S') | dict.fromkeys(('self_attention', 'rollout', 'flow'), 'SS')
AXES |= dict.fromkeys(('norms', 'gradient_times_input', 'integrated_gradients', 'leave_one_out'), 'TS')
AXES |= {'monotonicity': ''}
TOKENS = {'S': [f's{s}' for s in range(S)], 'T': [f't{t}' for t in range(T)]}


@functools.cache
def subject_of(build):
  model = build()
  source, mask, target = inputs()
  params = variables(model, source, mask, target)['params']
  pair = AnalysedPair(model, params, source[0], target[0])
  weights = jax.jit(model.apply)({'params': params}, source[:1], mask[:1], target[:1]).weights[0]
  return Subject(pair, TOKENS['S'], TOKENS['T'], np.asarray(weights))


def log_probs(pair, mask=None):
  return np.asarray(jax.jit(lambda params: target_log_probs(pair._replace(params=params), mask))(pair.params))


@pytest.mark.parametrize('name', ANALYSES)
def test_every_analysis_returns_a_value_for_each_of_its_axes(name):
  subject = subject_of(BUILDERS.get(name, build_tiny))
  measured = analyse(f'{name}({OPTIONS[name]})' if name in OPTIONS else name, subject)
  assert measured.values.shape == tuple(map(len, measured.axes))
  assert np.all(np.isfinite(measured.values))
  if name != 'head_importance':
    assert measured.axes == tuple(TOKENS[axis] for axis in AXES.get(name, 'T'))


@pytest.mark.long
def test_intra_attention_is_self_attention_over_the_past():
  subject = subject_of(functools.partial(build_tiny, encoder='lstmn(features=10)'))
  weights = analyse('self_attention', subject).values
  np.testing.assert_allclose(weights.sum(-1), [0] + [1] * (S - 1), rtol=1e-5)
  assert not np.triu(weights).any()
  assert np.all(np.isfinite(analyse('rollout', subject).values))
  with pytest.raises(UserError, match='layer must be from -1 to 0, got 1'):
    analyse('self_attention(layer=1)', subject)


@pytest.mark.long
def test_head_importance_names_its_heads():
  measured = analyse('head_importance', subject_of(build_transformer))
  assert len(measured.axes[0]) == 2 * 3 * 4  # layers, attentions (of the encoder, the decoder, the memory), heads
  assert 'decoder/blocks_1/cross 3' in measured.axes[0]
  assert np.all(measured.values >= 0) and measured.values.max() > 0


@pytest.mark.long
def test_what_if_is_zero_for_an_edit_without_effect_and_before_the_edited_token():
  subject = subject_of(build_tiny)
  np.testing.assert_allclose(analyse('what_if(edit="tempered")', subject).values, 0, atol=1e-5)
  first = analyse('what_if(edit="fixed(at=3, position=2)")', subject).values
  np.testing.assert_allclose(first[:3], 0, atol=1e-6)
  assert abs(first[3]) > 1e-4


@pytest.mark.long
def test_leave_one_out_masks_one_token():
  subject = subject_of(build_tiny)
  lost = analyse('leave_one_out', subject).values
  expected = log_probs(subject.pair) - log_probs(subject.pair, jnp.arange(S) != 2)
  np.testing.assert_allclose(lost[:, 2], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_integrated_gradients_are_complete():
  subject = subject_of(build_tiny)
  total = analyse('integrated_gradients', subject).values.sum(1)
  zero_embeddings = jax.tree.map(lambda x: x, subject.pair.params)
  zero_embeddings['encoder']['embedding']['table']['embedding'] *= 0
  expected = log_probs(subject.pair) - log_probs(subject.pair._replace(params=zero_embeddings))
  np.testing.assert_allclose(total, expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
  ('spec', 'build', 'message'),
  [
    ('entropie', build_tiny, "unknown analysis 'entropie'"),
    ('entropy(base=2)', build_tiny, "has no options, got 'base'"),
    ('integrated_gradients(steps=0)', build_tiny, 'steps must be at least 1'),
    ('kendall(other="entropy")', build_tiny, 'must measure pairs of target and source tokens'),
    ('head_importance', build_tiny, 'no attention with several heads'),
    ('flow', build_tiny, 'no self-attention'),
    ('rollout', build_lstmn_both, "^analysis 'rollout': rollout and flow .* this encoder has 2"),
    ('flow', build_differential, 'rollout and flow add the weights of all heads; this encoder .* subtracts some'),
    ('updates', build_tiny, 'no adaptive computation time'),
    ('norms', build_transformer, "^analysis 'norms': .* one head"),
    (f'what_if(edit="fixed(at={T})")', build_tiny, f'at must be less than {T}, the number of target tokens'),
    (f'what_if(edit="fixed(position={S})")', build_tiny, f'position must be less than {S}, the number of source'),
  ],
)
def test_invalid_specs_and_analyses_that_do_not_apply_raise(spec, build, message):
  with pytest.raises(UserError, match=message):
    analyse(spec, subject_of(build))


@pytest.mark.long
def test_comparing_weights_with_a_measure_of_other_axes_raises_even_if_the_sizes_are_equal():
  subject = subject_of(build_transformer)
  pair = subject.pair._replace(source=subject.pair.source[:T])
  square = subject._replace(pair=pair, source_tokens=subject.target_tokens, weights=subject.weights[:, :T])
  with pytest.raises(UserError, match='must measure pairs of target and source tokens'):
    analyse('kendall(other="self_attention")', square)
