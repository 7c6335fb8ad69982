"""Cross entropy against loops and optax; masked positions have no effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.tokens import UNK
from tests.losses.helpers import B, T, V
from tests.training.helpers import WORDS, Toy, init_params, make_batch


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_cross_entropy_equals_a_loop(case, smoothing):
  logits, target, mask = map(np.asarray, case)
  loss = 0.0
  correct = 0
  for b in range(B):
    for t in range(T):
      if mask[b, t]:
        p = np.exp(logits[b, t].astype(np.float64))
        p /= p.sum()
        labels = np.full(V, smoothing / V)
        labels[target[b, t]] += 1 - smoothing
        loss -= sum(labels[v] * np.log(p[v]) for v in range(V))
        correct += p.argmax() == target[b, t]
  sums = cross_entropy(*case, smoothing)
  np.testing.assert_allclose(sums['loss'], loss, rtol=1e-5)
  assert sums['tokens'] == 7 and sums['accuracy'] == correct


@pytest.mark.parametrize('junk', [np.nan, np.inf, 1e30])
def test_masked_positions_affect_neither_value_nor_gradient(case, junk):
  logits, target, mask = case

  def loss(logits):
    return cross_entropy(logits, target, mask, 0.1)['loss']

  run = jax.jit(jax.value_and_grad(loss))
  value, gradient = run(jnp.where(mask[..., None], logits, junk))
  jax.tree.map(np.testing.assert_array_equal, (value, gradient), run(logits))
  assert not np.any(np.asarray(gradient)[~np.asarray(mask)])


def test_bfloat16_logits_are_computed_in_float32(case):
  logits, target, mask = case
  rounded = logits.astype(jnp.bfloat16)
  loss = cross_entropy(rounded, target, mask)['loss']
  assert loss.dtype == jnp.float32 and loss == cross_entropy(rounded.astype(jnp.float32), target, mask)['loss']


def test_forbidden_words_leave_the_loss_finite(case):
  logits, target, mask = case
  forbidden = logits.at[..., 0].set(-jnp.inf)
  assert jnp.isfinite(cross_entropy(forbidden, jnp.maximum(target, 1), mask)['loss'])


def test_padding_and_filler_rows_do_not_change_the_sums():
  loss = sequence_loss(Toy(), 0.1)
  params = init_params()
  batch = make_batch(0)
  with_fillers = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
  padded = with_fillers._replace(
    **{
      field: np.pad(getattr(with_fillers, field), ((0, 0), (0, 3)))
      for field in ('source', 'source_mask', 'target', 'target_mask')
    }
  )
  actual, expected = jax.jit(lambda params: (loss(params, padded), loss(params, batch)))(params)
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5)


def test_target_ids_that_the_model_cannot_emit_count_as_unknown():
  loss = jax.jit(sequence_loss(Toy(), 0.1))
  batch = make_batch(0)

  def with_first_token(id):
    target = batch.target.copy()
    target[::2, 0] = id
    return loss(init_params(), batch._replace(target=target))

  jax.tree.map(np.testing.assert_array_equal, with_first_token(WORDS + 2), with_first_token(UNK))


def test_rngs_enable_dropout():
  loss = jax.jit(sequence_loss(Toy(dropout=0.5)))
  params = init_params()
  batch = make_batch(0)
  with_dropout = [loss(params, batch, {'dropout': jax.random.key(i)})['loss'] for i in range(2)]
  assert len({float(x) for x in (*with_dropout, loss(params, batch)['loss'])}) == 3
