"""BLEU of ids against a loop, and against sacrebleu on the same tokens."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import sacrebleu

from attention_jax.losses.sentence_bleu import ORDER, sentence_bleu

PAIRS, T, R, WORDS = 400, 9, 7, 4


def literal(hypothesis, reference):
  """Papineni et al. 2002, with one more match and one more n-gram for n > 1."""
  logs = []
  for n in range(1, ORDER + 1):
    grams = lambda ids, n=n: collections.Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    own, wanted = grams(hypothesis), grams(reference)
    matches = sum(min(count, wanted[gram]) for gram, count in own.items())
    if n == 1 and not matches:
      return 0.0
    smooth = int(n > 1)
    logs.append(math.log((matches + smooth) / (sum(own.values()) + smooth)))
  brevity = min(0.0, 1 - len(reference) / len(hypothesis))
  return math.exp(brevity + sum(logs) / ORDER)


def test_it_is_that_of_a_loop_and_of_sacrebleu():
  random = np.random.default_rng(0)
  sides = [random.integers(4, 4 + WORDS, (PAIRS, size)) for size in (T, R)]
  sides[0][: PAIRS // 2, :R] = sides[1][: PAIRS // 2]  # many that have long n-grams in common
  lengths = [random.integers(0, size + 1, PAIRS) for size in (T, R)]
  masks = [np.arange(size) < length[:, None] for size, length in zip((T, R), lengths, strict=True)]
  found = jax.jit(jax.vmap(sentence_bleu))(sides[0], masks[0], sides[1], masks[1])
  dirty = [jnp.where(mask, side, 4) for side, mask in zip(sides, masks, strict=True)]
  np.testing.assert_array_equal(jax.vmap(sentence_bleu)(dirty[0], masks[0], dirty[1], masks[1]), found)
  for i, value in enumerate(np.asarray(found)):
    hypothesis, reference = (side[i, : length[i]].tolist() for side, length in zip(sides, lengths, strict=True))
    np.testing.assert_allclose(value, literal(hypothesis, reference), rtol=1e-5, err_msg=f'{hypothesis} {reference}')
    words = [' '.join(f'w{id}' for id in ids) for ids in (hypothesis, reference)]
    theirs = sacrebleu.sentence_bleu(
      words[0], [words[1]], smooth_method='add-k', smooth_value=1, tokenize='none', use_effective_order=False
    )
    np.testing.assert_allclose(100 * value, theirs.score, rtol=1e-4, atol=1e-6)
  assert np.sum(found == 0) > 5 and np.sum(found == 1) > 5
