"""Special tokens: their ids are the same in every vocabulary, and the data, models and losses all use them."""

from collections.abc import Iterable

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ('<pad>', '<s>', '</s>', '<unk>')


def content_ids(ids: Iterable[int]) -> list[int]:
  """Returns the ids up to the first EOS, without PAD and BOS."""
  content = []
  for id in map(int, ids):
    if id == EOS:
      break
    if id not in (PAD, BOS):
      content.append(id)
  return content
