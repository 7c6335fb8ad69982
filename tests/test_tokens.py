"""Special tokens."""

from attention_jax.tokens import BOS, EOS, PAD, content_ids


def test_content_ends_at_eos_and_has_no_other_special_tokens():
  assert content_ids([BOS, 7, PAD, 3, EOS, 9]) == [7, 3]
  assert content_ids([5, 4]) == [5, 4] and content_ids([EOS]) == []
