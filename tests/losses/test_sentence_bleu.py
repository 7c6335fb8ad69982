"""BLEU of token ids against a loop, and against sacrebleu on the same tokens."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from attention_jax.losses.sentence_bleu import ORDER, sentence_bleu

PAIRS, T, R, WORDS = 400, 9, 7, 4


def reference_bleu(hypothesis, reference):
  """Papineni et al. 2002, with one more match and one more n-gram for n > 1."""
  logs = []
  for n in range(1, ORDER + 1):
    hypothesis_counts = count_ngrams(hypothesis, n)
    reference_counts = count_ngrams(reference, n)
    matches = sum(min(count, reference_counts[ngram]) for ngram, count in hypothesis_counts.items())
    if n == 1 and not matches:
      return 0.0
    smoothing = int(n > 1)
    logs.append(math.log((matches + smoothing) / (sum(hypothesis_counts.values()) + smoothing)))
  brevity = min(0.0, 1 - len(reference) / len(hypothesis))
  return math.exp(brevity + sum(logs) / ORDER)


def count_ngrams(ids, n):
  return collections.Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))


@pytest.mark.long
def test_sentence_bleu_equals_a_loop_and_sacrebleu():
  random = np.random.default_rng(0)
  hypotheses = random.integers(4, 4 + WORDS, (PAIRS, T))
  references = random.integers(4, 4 + WORDS, (PAIRS, R))
  hypotheses[: PAIRS // 2, :R] = references[: PAIRS // 2]  # half of the pairs share long n-grams
  hypothesis_lengths = random.integers(0, T + 1, PAIRS)
  reference_lengths = random.integers(0, R + 1, PAIRS)
  mask = np.arange(T) < hypothesis_lengths[:, None]
  reference_mask = np.arange(R) < reference_lengths[:, None]
  run = jax.jit(jax.vmap(sentence_bleu))
  values = run(hypotheses, mask, references, reference_mask)

  other_padding = (jnp.where(mask, hypotheses, 4), jnp.where(reference_mask, references, 4))
  same_values = run(other_padding[0], mask, other_padding[1], reference_mask)
  np.testing.assert_array_equal(same_values, values)

  for i, value in enumerate(np.asarray(values)):
    hypothesis = hypotheses[i, : hypothesis_lengths[i]].tolist()
    reference = references[i, : reference_lengths[i]].tolist()
    expected = reference_bleu(hypothesis, reference)
    np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=f'{hypothesis} {reference}')
    hypothesis_text, reference_text = (' '.join(f'w{id}' for id in ids) for ids in (hypothesis, reference))
    options = {'smooth_method': 'add-k', 'smooth_value': 1, 'tokenize': 'none', 'use_effective_order': False}
    score = sacrebleu.sentence_bleu(hypothesis_text, [reference_text], **options)
    np.testing.assert_allclose(100 * value, score.score, rtol=1e-4, atol=1e-6)
  assert np.sum(values == 0) > 5 and np.sum(values == 1) > 5
