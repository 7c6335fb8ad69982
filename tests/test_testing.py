"""Variants of one's own that break the contract of masks and weights, each in one way."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj


def ignores_mask(scores, mask):
  return jax.nn.softmax(scores)


def is_nan_for_an_empty_row(scores, mask):
  return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))


def reads_masked_scores(scores, mask):
  return jnp.where(mask, jax.nn.softmax(scores), 0.0)


def branches(scores, mask):
  return aj.alignments.softmax(scores if scores[0] > 0 else 2 * scores, mask)


def casts(scores, mask):
  return aj.alignments.softmax(scores, mask).astype(jnp.bfloat16)


def depends_on_other_keys(query, key):
  scores = key @ query
  return scores - jnp.abs(scores).mean() * jnp.arange(key.shape[0])


@pytest.mark.parametrize(
  ('alignment', 'message'),
  [
    (ignores_mask, r"^alignment 'ignores_mask': weights of an example without unmasked .* must be 0, got 0\.14\d*$"),
    (is_nan_for_an_empty_row, 'weights of an example without unmasked positions must be 0, got nan$'),
    (reads_masked_scores, 'must not change the weights of a query for which it is masked, got a difference of'),
    (branches, 'must work under jax.jit, vmap and grad, got TracerBoolConversionError: '),
    (casts, 'weights must be float32, got bfloat16$'),
  ],
)
def test_alignments_that_break_a_law_raise(alignment, message):
  with pytest.raises(aj.UserError, match=message) as error:
    aj.testing.check_alignment(alignment, quick=True)
  assert '\n' not in str(error.value)


@pytest.mark.long
def test_a_score_that_depends_on_masked_keys_raises():
  with pytest.raises(aj.UserError, match=r"^score 'depends_on_other_keys': the key of a position must not change"):
    aj.testing.check_score(depends_on_other_keys, quick=True)


def test_a_score_of_the_table_passes():
  assert aj.testing.check_score('additive') is None


@pytest.mark.long
def test_an_alignment_of_the_table_passes():
  assert aj.testing.check_alignment('hard') is None
