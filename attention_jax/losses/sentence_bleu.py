"""BLEU of single sentences as a compilable function of token ids; it counts n-grams by pairwise comparison."""

import jax
import jax.numpy as jnp

ORDER = 4  # number of tokens of the longest n-grams


def sentence_bleu(hypothesis: jax.Array, mask: jax.Array, reference: jax.Array, reference_mask: jax.Array) -> jax.Array:
  """BP · exp(¼ Σ_n log p_n), from 0 to 1. Papineni et al. 2002.

  BP is the brevity penalty min(1, exp(1 - r / h)) for h tokens of the hypothesis and r of the reference. p_n is the
  fraction of n-grams of the hypothesis that match the reference. For n > 1, p_n = (matches + 1) / (n-grams + 1), as in
  Lin & Och 2004: 'add-k' with k = 1 in sacrebleu.

  Args:
    hypothesis: [T] ids.
    mask: [T], True = real; real tokens come first.
    reference: [R] ids.
    reference_mask: [R], as `mask`.

  Returns:
    [] float32; 0 where no token matches, also for an empty hypothesis.
  """
  length = jnp.sum(mask)
  reference_length = jnp.sum(reference_mask)
  # equal[i, j]: whether the n-grams of the hypothesis at i and at j are equal.
  # matching[i, j]: whether the n-gram of the hypothesis at i equals that of the reference at j.
  equal_tokens = (hypothesis[:, None] == hypothesis[None]) & mask[:, None] & mask[None]
  matching_tokens = (hypothesis[:, None] == reference[None]) & mask[:, None] & reference_mask[None]
  equal = equal_tokens
  matching = matching_tokens
  total = jnp.zeros(())
  for n in range(1, ORDER + 1):
    if n > 1:  # n-grams are equal if their first n - 1 tokens and their last tokens are
      equal = equal & _shift(equal_tokens, n - 1)
      matching = matching & _shift(matching_tokens, n - 1)
    matches = _clipped_matches(equal, matching)
    ngrams = jnp.maximum(length - n + 1, 0)
    smoothing = int(n > 1)
    total += jnp.log(jnp.maximum(matches + smoothing, 1)) - jnp.log(jnp.maximum(ngrams + smoothing, 1))
    if n == 1:
      any_token_matches = matches > 0
  brevity = jnp.minimum(0.0, 1.0 - reference_length / jnp.maximum(length, 1))
  return jnp.where(any_token_matches, jnp.exp(brevity + total / ORDER), 0.0)


def _clipped_matches(equal: jax.Array, matching: jax.Array) -> jax.Array:
  """Number of n-grams that match the reference, each counted at most as often as it occurs there.

  Args:
    equal: [T, T], whether the n-grams of the hypothesis at i and j are equal.
    matching: [T, R], whether the n-gram of the hypothesis at i equals that of the reference at j.
  """
  earlier = jnp.sum(jnp.tril(equal, -1), axis=1)
  return jnp.sum(jnp.diagonal(equal) & (earlier < jnp.sum(matching, axis=1)))


def _shift(same: jax.Array, by: int) -> jax.Array:
  """[i, j] -> the entry at [i + by, j + by], False beyond the end."""
  return jnp.pad(same, ((0, by), (0, by)))[by:, by:]
