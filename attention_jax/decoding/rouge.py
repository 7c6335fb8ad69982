"""ROUGE of summaries (Lin 2004), as rouge-score computes it."""

import functools
from collections.abc import Callable, Mapping, Sequence

from attention_jax.errors import UserError, choose

# The tokenizer of rouge-score drops everything but ASCII letters and digits, and lower-cases; None stands for it.
TOKENIZERS: Mapping[str, Callable[[str], list[str]] | None] = {'ascii': None, 'space': str.split}


class _Tokenizer:
  """The interface of rouge-score around a function."""

  def __init__(self, tokenize: Callable[[str], list[str]]):
    self.tokenize = tokenize


def f_measures(
  hypotheses: Sequence[str], references: Sequence[Sequence[str]], kind: str, tokenize: str, stem: bool
) -> list[float]:
  """Returns the F-measure of each row against its best reference, from 0 to 1.

  Args:
    hypotheses: one string per row.
    references: one or more strings per row.
    kind: 'rouge1', 'rouge2' or 'rougeL'.
    tokenize: a key of TOKENIZERS.
    stem: whether suffixes of English words are removed (Porter), with the tokenizer 'ascii' only.

  Raises:
    UserError: for an unknown tokenizer, and if `stem` is set with a tokenizer other than 'ascii'.
  """
  if stem and TOKENIZERS.get(tokenize):
    raise UserError(f"rouge: stem=True needs tokenize='ascii', got {tokenize!r}")
  scorer = _make_scorer(kind, choose(tokenize, TOKENIZERS, 'tokenizer of rouge'), stem)
  rows = zip(hypotheses, references, strict=True)
  return [scorer.score_multi(texts, hypothesis)[kind].fmeasure for hypothesis, texts in rows]


@functools.cache
def _make_scorer(kind: str, tokenize: str, stem: bool):
  from rouge_score import rouge_scorer  # imports nltk, which takes a second

  split = TOKENIZERS[tokenize]
  return rouge_scorer.RougeScorer([kind], use_stemmer=stem, tokenizer=_Tokenizer(split) if split else None)
