"""Cross entropy against loops and optax; what is behind the mask counts for nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.losses import vocabulary
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.modules.outputs import LinearLogits
from tests.training.helpers import Toy, init_params, make_batch

B, T, V = 3, 5, 7


@pytest.fixture
def case(rng):
  logits = 3 * jax.random.normal(rng, (B, T, V))
  target = jax.random.randint(jax.random.fold_in(rng, 1), (B, T), 0, V)
  mask = jnp.arange(T)[None] < jnp.array([5, 2, 0])[:, None]
  return logits, target, mask


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_literal(case, smoothing):
  logits, target, mask = map(np.asarray, case)
  total, right = 0.0, 0
  for b in range(B):
    for t in range(T):
      if mask[b, t]:
        p = np.exp(logits[b, t].astype(np.float64))
        p /= p.sum()
        wanted = np.full(V, smoothing / V)
        wanted[target[b, t]] += 1 - smoothing
        total -= sum(wanted[v] * np.log(p[v]) for v in range(V))
        right += p.argmax() == target[b, t]
  sums = cross_entropy(*case, smoothing)
  np.testing.assert_allclose(sums['loss'], total, rtol=1e-5)
  assert sums['tokens'] == 7 and sums['accuracy'] == right


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
def test_equals_optax(case, smoothing):
  logits, target, mask = case
  labels = optax.smooth_labels(jax.nn.one_hot(target, V), smoothing)
  wanted = jnp.sum(optax.softmax_cross_entropy(logits, labels), where=mask)
  np.testing.assert_allclose(cross_entropy(*case, smoothing)['loss'], wanted, rtol=1e-5)


@pytest.mark.parametrize('junk', [np.nan, np.inf, 1e30])
def test_behind_the_mask_is_irrelevant(case, junk):
  logits, target, mask = case
  value = lambda x: cross_entropy(x, target, mask, 0.1)['loss']
  dirty = jnp.where(mask[..., None], logits, junk)
  assert value(dirty) == value(logits)
  gradient = jax.grad(value)(dirty)
  np.testing.assert_array_equal(gradient, jax.grad(value)(logits))
  assert not np.any(np.asarray(gradient)[~np.asarray(mask)])


def test_bfloat16_is_summed_in_float32_and_forbidden_words_stay_finite(case):
  logits, target, mask = case
  assert cross_entropy(logits.astype(jnp.bfloat16), target, mask)['loss'].dtype == jnp.float32
  forbidden = logits.at[..., 0].set(-jnp.inf)
  assert jnp.isfinite(cross_entropy(forbidden, jnp.maximum(target, 1), mask)['loss'])


@pytest.mark.parametrize(('at_a_time', 'smoothing'), [(1, 0.0), (2 * B * V, 0.1), (2**21, 0.1)])
def test_of_a_linear_layer_it_needs_no_logits(case, monkeypatch, at_a_time, smoothing):
  monkeypatch.setattr(vocabulary, 'MAX_LOGITS', at_a_time)
  _, target, mask = case
  rng = np.random.default_rng(0)
  linear = LinearLogits(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, 4), (4, V), (V,))))
  dirty = linear._replace(features=jnp.where(mask[..., None], linear.features, 1e30))

  def shorter(linear):
    loss, accuracy = vocabulary.linear_cross_entropy(linear, target, mask, smoothing)
    return 3 * loss, accuracy

  def longer(linear):
    sums = cross_entropy(linear.logits(), target, mask, smoothing)
    return 3 * sums['loss'], sums['accuracy']

  for fn in (shorter, jax.value_and_grad(shorter, has_aux=True)):
    wanted = (longer if fn is shorter else jax.value_and_grad(longer, has_aux=True))(linear)
    for given in (linear, dirty):
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), jax.jit(fn)(given), wanted)


def test_of_equal_logits_the_first_is_what_is_said():
  linear = LinearLogits(jnp.ones((1, 3, 2), jnp.bfloat16), jnp.ones((2, V)), jnp.zeros(V).at[0].set(-1.0))
  target = jnp.array([[1, 2, 0]])
  assert vocabulary.linear_cross_entropy(linear, target, jnp.ones((1, 3), bool), 0.0)[1] == 1
  assert cross_entropy(linear.logits(), target, jnp.ones((1, 3), bool))['accuracy'] == 1


def test_padding_and_filler_rows_change_nothing():
  loss, params, batch = sequence_loss(Toy(), 0.1), init_params(), make_batch(0)
  rows = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
  wide = rows._replace(
    **{k: np.pad(getattr(rows, k), ((0, 0), (0, 3))) for k in ('source', 'source_mask', 'target', 'target_mask')}
  )
  for name, value in loss(params, batch).items():
    np.testing.assert_allclose(loss(params, wide)[name], value, rtol=1e-5)


def test_rngs_switch_dropout_on():
  loss, params, batch = sequence_loss(Toy(dropout=0.5)), init_params(), make_batch(0)
  dropped = [loss(params, batch, {'dropout': jax.random.key(i)})['loss'] for i in range(2)]
  assert len({float(x) for x in (*dropped, loss(params, batch)['loss'])}) == 3
