"""BLEU of single sentences as a function of ids, inside a compiled step: n-grams are counted by comparing them."""

import jax
import jax.numpy as jnp

ORDER = 4  # the longest n-grams


def sentence_bleu(hypothesis: jax.Array, mask: jax.Array, reference: jax.Array, reference_mask: jax.Array) -> jax.Array:
  """BP · exp(¼ Σ_n log p_n), from 0 to 1. Papineni et al. 2002; of n > 1, p_n = (matches + 1) / (n-grams + 1), as in
  Lin & Och 2004: 'add-k' with k = 1 in sacrebleu.

  Args: hypothesis [T] ids; mask [T], True = real, with nothing real behind what is not; reference [R] and its mask.
  Returns: [] float32; 0 where no token matches, and where there is none.
  """
  length, wanted = jnp.sum(mask), jnp.sum(reference_mask)
  own = one_own = (hypothesis[:, None] == hypothesis[None]) & mask[:, None] & mask[None]
  shared = one_shared = (hypothesis[:, None] == reference[None]) & mask[:, None] & reference_mask[None]
  total = jnp.zeros(())
  for n in range(1, ORDER + 1):
    if n > 1:  # n-grams are alike where those of n - 1 are and the tokens that follow them
      own, shared = own & _later(one_own, n - 1), shared & _later(one_shared, n - 1)
    matches, grams = _matches(own, shared), jnp.maximum(length - n + 1, 0)
    smooth = int(n > 1)
    total += jnp.log(jnp.maximum(matches + smooth, 1)) - jnp.log(jnp.maximum(grams + smooth, 1))
    if n == 1:
      any_token_matches = matches > 0
  brevity = jnp.minimum(0.0, 1.0 - wanted / jnp.maximum(length, 1))
  return jnp.where(any_token_matches, jnp.exp(brevity + total / ORDER), 0.0)


def _matches(own: jax.Array, shared: jax.Array) -> jax.Array:
  """How many n-grams are among the reference's, each as often as it is there at most.

  own [T, T], shared [T, R]: whether the n-grams that begin at two places are the same.
  """
  earlier = jnp.sum(jnp.tril(own, -1), axis=1)
  return jnp.sum(jnp.diagonal(own) & (earlier < jnp.sum(shared, axis=1)))


def _later(same: jax.Array, by: int) -> jax.Array:
  """[i, j] -> what stands at [i + by, j + by], False beyond the end."""
  return jnp.pad(same, ((0, by), (0, by)))[by:, by:]
