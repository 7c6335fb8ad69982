"""An HTML page of attention weights: documents with shaded words and bars for sentences, pairs of texts as tables."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.atomic import write_text
from attention_jax.errors import report_write_errors

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#24292f, #e6e9ee); --paper: light-dark(#ffffff, #14171c);
  --soft: light-dark(#57606a, #9aa4b1); --line: light-dark(#eef1f4, #343b45); --wrong: light-dark(#b42318, #ff8a7a) }
body { font: 16px/1.9 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 2.5rem 0 .3rem }
.prediction { color: var(--soft); font-size: .9rem; margin-bottom: .8rem }
.wrong { color: var(--wrong) } .sentence { display: flex; gap: .8rem; align-items: baseline; padding: .1rem 0 }
.bar { flex: 0 0 4.5rem; background: var(--line); border-radius: 3px; height: .8rem; align-self: center }
.bar i { display: block; height: 100%; background: #e8590c; border-radius: 3px }
details { font-size: .9rem } summary { color: var(--soft); cursor: pointer }
.word { border-radius: 3px; padding: .1rem .15rem } .legend { color: var(--soft); font-size: .85rem }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.3; margin: .4rem 0 1rem }
th { font-weight: normal; padding: .1rem .4rem; text-align: right }
td { width: 3rem; height: 1.3rem; border: 1px solid var(--line) }
"""
LEGEND = (
  'Blue: the weight of a word relative to the largest weight of its sentence, paler in sentences of small weight. '
  'Bars: the weight of a sentence. For a pair of texts, each row shows the weights of its word over the other text: '
  'the mean over the heads; the strongest blue is then a weight of 1.'
)


class ShadedDocument(NamedTuple):
  """A document, its prediction and its weights.

  Attributes:
    title: heading.
    label: gold label; '' if unknown.
    probabilities: predicted probability of each label.
    tokens: tokens of each sentence, or of each text of a pair.
    word_weights: per sentence, weights [H, W] of its words by heads or hops. The page shows their mean over the heads
      that are not all zero, then each of these heads if there are several. For a pair of texts: per text, weights
      [T, W] of its words, with a row for each of the T words of the other text, filler words included.
    sentence_weights: weights [H, N] of sentences.
    is_pair: whether it is a pair of texts; the page then shows which word attends to which.
    unread_tokens: number of further tokens, which the model did not read.
  """

  title: str
  label: str
  probabilities: Mapping[str, float]
  tokens: Sequence[Sequence[str]]
  word_weights: Sequence[np.ndarray]
  sentence_weights: np.ndarray
  is_pair: bool = False
  unread_tokens: int = 0


def write(documents: Sequence[ShadedDocument], path: str | Path) -> None:
  """Writes one HTML page with all documents.

  Raises:
    UserError: if the file cannot be written.
  """
  body = '\n'.join(map(_render_document, documents))
  page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>attention</title><style>{STYLE}</style>\n'
  page += f'<p class="legend">{LEGEND}</p>\n{body}\n</html>\n'
  with report_write_errors(path):
    write_text(path, page)


def _render_document(document: ShadedDocument) -> str:
  prediction = max(document.probabilities, key=document.probabilities.get)
  gold = f' (gold: {escape(document.label)})' if document.label else ''
  style = 'prediction wrong' if document.label and prediction != document.label else 'prediction'
  probabilities = ', '.join(f'{escape(label)} {value:.3f}' for label, value in document.probabilities.items())
  lines = [
    f'<h2 dir="auto">{escape(document.title[:200])}</h2>'
    f'<div class="{style}">predicted: {escape(prediction)}{gold} · {probabilities}</div>'
  ]
  if document.is_pair:
    lines += _render_pair(document)
  else:
    lines += _render_sentences(document, document.word_weights)
    lines += _render_heads(document)
  if document.unread_tokens:
    lines.append(f'<p class="legend">… and {document.unread_tokens:,} more tokens that were not read</p>')
  return '\n'.join(lines)


def _render_heads(document: ShadedDocument) -> Iterator[str]:
  """One collapsed block for each head or hop that is not all zero; none if there are fewer than two."""
  num_heads = max((len(weights) for weights in document.word_weights), default=0)
  heads = [[weights[head : head + 1] for weights in document.word_weights] for head in range(num_heads)]
  nonzero_heads = [head for head in heads if any(weights.any() for weights in head)]
  if len(nonzero_heads) < 2:
    return
  for number, word_weights in enumerate(nonzero_heads, 1):
    rows = '\n'.join(_render_sentences(document, word_weights))
    yield f'<details><summary>weights {number} of {len(nonzero_heads)}</summary>\n{rows}\n</details>'


def _render_sentences(document: ShadedDocument, word_weights: Sequence[np.ndarray]) -> Iterator[str]:
  sentence_weights = document.sentence_weights.mean(0)
  largest = max(float(sentence_weights.max()), 1e-9)
  for tokens, by_head, sentence_weight in zip(document.tokens, word_weights, sentence_weights.tolist(), strict=True):
    weights = _mean_over_nonzero_heads(by_head)
    opacity = (sentence_weight / largest) ** 0.5  # Yang et al. 2016, section 3.6
    shades = weights / max(float(weights.max(initial=0)), 1e-9)
    yield _render_sentence(tokens, shades, weights, opacity, sentence_weight)


def _mean_over_nonzero_heads(weights: np.ndarray) -> np.ndarray:
  return weights.sum(0) / max(np.count_nonzero(weights.any(1)), 1)


def _render_sentence(
  tokens: Sequence[str], shades: np.ndarray, weights: np.ndarray, opacity: float, sentence_weight: float
) -> str:
  words = ' '.join(
    f'<span class="word" style="{_blue(opacity * shade)}" title="{weight:.3f}">{escape(token)}</span>'
    for token, shade, weight in zip(tokens, shades.tolist(), weights.tolist(), strict=True)
  )
  width = 100 * min(sentence_weight, 1)
  bar = f'<span class="bar" title="{sentence_weight:.3f}"><i style="width:{width:.1f}%"></i></span>'
  return f'<div class="sentence">{bar}<span dir="auto">{words}</span></div>'


def _render_pair(document: ShadedDocument) -> Iterator[str]:
  """For each text of a pair, a table with a row per word and a column per word of the other text."""
  for text, other in ((0, 1), (1, 0)):
    head = ''.join(f'<th>{escape(token)}</th>' for token in document.tokens[other])
    # strict=False: weights have further rows, of filler words.
    rows = ''.join(
      f'<tr><th>{escape(token)}</th>{"".join(map(_render_cell, weights.tolist()))}</tr>'
      for token, weights in zip(document.tokens[text], document.word_weights[other], strict=False)
    )
    yield f'<table><tr><th></th>{head}</tr>{rows}</table>'


def _render_cell(weight: float) -> str:
  return f'<td style="{_blue(weight)}" title="{weight:.3f}"></td>'


def _blue(shade: float) -> str:
  return f'background:rgba(9,105,218,{0.65 * shade:.3f})'
