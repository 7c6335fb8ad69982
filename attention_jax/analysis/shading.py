"""Documents as a page whose sentences and words are shaded by their weights."""

import os
from collections.abc import Mapping, Sequence
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
.word { border-radius: 3px; padding: .1rem .15rem } .legend { color: #57606a; font-size: .85rem }
"""


class Document(NamedTuple):
  """A document as it is drawn.

  Attributes:
    title: what stands above it.
    label: the right one; '' where nobody knows.
    probabilities: of each label.
    tokens: of each sentence.
    words: of each sentence the weights [H, W] of its words; heads and hops that look at any are averaged.
    sentences: the weights [H, N] of sentences.
  """

  title: str
  label: str
  probabilities: Mapping[str, float]
  tokens: Sequence[Sequence[str]]
  words: Sequence[np.ndarray]
  sentences: np.ndarray


def write(documents: Sequence[Document], path: str | Path) -> None:
  """One HTML page with all documents. Raises: UserError where it cannot be written."""
  legend = 'Blue: the weight of a word beside the heaviest of its sentence. Bars: the weight of a sentence.'
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


def _document(document: Document) -> str:
  said = max(document.probabilities, key=document.probabilities.get)
  known = f' (right: {escape(document.label)})' if document.label else ''
  wrong = ' wrong' if document.label and said != document.label else ''
  each = ', '.join(f'{escape(label)} {value:.3f}' for label, value in document.probabilities.items())
  shares = document.sentences.mean(0)
  lines = zip(document.tokens, document.words, shares, strict=True)
  rows = '\n'.join(_sentence(tokens, _mean(weights), float(share)) for tokens, weights, share in lines)
  head = f'<h2>{escape(document.title[:200])}</h2><div class="said{wrong}">said: {escape(said)}{known} · {each}</div>'
  return f'{head}\n{rows}'


def _mean(weights: np.ndarray) -> np.ndarray:
  return weights.sum(0) / max(np.count_nonzero(weights.any(1)), 1)


def _sentence(tokens: Sequence[str], weights: np.ndarray, share: float) -> str:
  most = max(float(weights.max(initial=0)), 1e-9)
  words = ' '.join(
    f'<span class="word" style="background:rgba(9,105,218,{0.65 * weight / most:.3f})" title="{weight:.3f}">'
    f'{escape(token)}</span>'
    for token, weight in zip(tokens, map(float, weights), strict=True)
  )
  bar = f'<span class="bar" title="{share:.3f}"><i style="width:{100 * min(share, 1):.1f}%"></i></span>'
  return f'<div class="sentence">{bar}<span>{words}</span></div>'
