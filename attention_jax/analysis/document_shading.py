"""Documents as a page whose sentences and words are shaded by their weights."""

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError

STYLE = """
body { font: 16px/1.9 system-ui, sans-serif; color: #24292f; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 2.5rem 0 .3rem } .said { color: #57606a; font-size: .9rem; margin-bottom: .8rem }
.wrong { color: #b42318 } .sentence { display: flex; gap: .8rem; align-items: baseline; padding: .1rem 0 }
.bar { flex: 0 0 4.5rem; background: #eef1f4; border-radius: 3px; height: .8rem; align-self: center }
.bar i { display: block; height: 100%; background: #e8590c; border-radius: 3px }
details { font-size: .9rem } summary { color: #57606a; cursor: pointer }
.word { border-radius: 3px; padding: .1rem .15rem } .legend { color: #57606a; font-size: .85rem }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.3; margin: .4rem 0 1rem }
th { font-weight: normal; padding: .1rem .4rem; text-align: right }
td { width: 3rem; height: 1.3rem; border: 1px solid #eef1f4 }
"""


class ShadedDocument(NamedTuple):
  """A document as it is drawn.

  Attributes:
    title: what stands above it.
    label: the right one; '' where nobody knows.
    probabilities: of each label.
    tokens: of each sentence.
    words: of each sentence the weights [H, W] of its words by heads or hops: the mean of those that look at any, and
      then each by itself. Of a pair of texts those by each word of the other one.
    sentences: the weights [H, N] of sentences.
    is_pair: whether it is a pair of texts, of which is drawn which word looks at which.
    unread_tokens: how many tokens it has besides, which nobody has read.
  """

  title: str
  label: str
  probabilities: Mapping[str, float]
  tokens: Sequence[Sequence[str]]
  words: Sequence[np.ndarray]
  sentences: np.ndarray
  is_pair: bool = False
  unread_tokens: int = 0


def write(documents: Sequence[ShadedDocument], path: str | Path) -> None:
  """One HTML page with all documents. Raises: UserError where it cannot be written."""
  legend = (
    'Blue: the weight of a word beside the heaviest of its sentence, paler the less the sentence counts. Bars: the '
    'weight of a sentence. Of pairs of texts each row says where its word looks in the other one.'
  )
  body = '\n'.join(map(_document, documents))
  page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>attention</title><style>{STYLE}</style>\n'
  page += f'<p class="legend">{legend}</p>\n{body}\n</html>\n'
  partial = f'{path}.part'
  try:
    with open(partial, 'w', encoding='utf-8') as file:
      file.write(page)
    os.replace(partial, path)
  except OSError as error:
    raise UserError(f'{path}: cannot be written ({error.strerror})') from error


def _document(document: ShadedDocument) -> str:
  said = max(document.probabilities, key=document.probabilities.get)
  known = f' (right: {escape(document.label)})' if document.label else ''
  wrong = ' wrong' if document.label and said != document.label else ''
  each = ', '.join(f'{escape(label)} {value:.3f}' for label, value in document.probabilities.items())
  rows = '\n'.join(_looks(document) if document.is_pair else [*_sentences(document, document.words), *_hops(document)])
  head = f'<h2>{escape(document.title[:200])}</h2><div class="said{wrong}">said: {escape(said)}{known} · {each}</div>'
  more = (
    f'\n<p class="legend">… and {document.unread_tokens:,} more words that were not read</p>'
    if document.unread_tokens
    else ''
  )
  return f'{head}\n{rows}{more}'


def _hops(document: ShadedDocument) -> Iterator[str]:
  """What each of several heads or hops looks at, to be unfolded; nothing of those that look at nothing."""
  several = max((len(words) for words in document.words), default=0)
  each = [[words[hop : hop + 1] for words in document.words] for hop in range(several)]
  looking = [words for words in each if any(own.any() for own in words)]
  for number, words in enumerate(looking if len(looking) > 1 else [], 1):
    rows = '\n'.join(_sentences(document, words))
    yield f'<details><summary>weights {number} of {len(looking)}</summary>\n{rows}\n</details>'


def _sentences(document: ShadedDocument, words: Sequence[np.ndarray]) -> Iterator[str]:
  shares = document.sentences.mean(0)
  for tokens, weights, share in zip(document.tokens, map(_mean, words), shares.tolist(), strict=True):
    light = (share / max(float(shares.max()), 1e-9)) ** 0.5  # Yang et al. 2016, section 3.6
    yield _sentence(tokens, weights / max(float(weights.max(initial=0)), 1e-9), weights, light, share)


def _mean(weights: np.ndarray) -> np.ndarray:
  return weights.sum(0) / max(np.count_nonzero(weights.any(1)), 1)


def _sentence(tokens: Sequence[str], shades: np.ndarray, weights: np.ndarray, light: float, share: float) -> str:
  words = ' '.join(
    f'<span class="word" style="{_blue(light * shade)}" title="{weight:.3f}">{escape(token)}</span>'
    for token, shade, weight in zip(tokens, shades.tolist(), weights.tolist(), strict=True)
  )
  bar = f'<span class="bar" title="{share:.3f}"><i style="width:{100 * min(share, 1):.1f}%"></i></span>'
  return f'<div class="sentence">{bar}<span>{words}</span></div>'


def _looks(document: ShadedDocument) -> Iterator[str]:
  for mine, other in ((0, 1), (1, 0)):
    head = ''.join(f'<th>{escape(token)}</th>' for token in document.tokens[other])
    rows = ''.join(
      f'<tr><th>{escape(token)}</th>{"".join(map(_cell, weights.tolist()))}</tr>'
      for token, weights in zip(document.tokens[mine], document.words[other], strict=False)  # then come filler words
    )
    yield f'<table><tr><th></th>{head}</tr>{rows}</table>'


def _cell(weight: float) -> str:
  return f'<td style="{_blue(weight)}" title="{weight:.3f}"></td>'


def _blue(shade: float) -> str:
  return f'background:rgba(9,105,218,{0.65 * shade:.3f})'
