"""Heatmaps of the attention weights of trained models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.analysis.plots import Heatmap, grid
from attention_jax.data import tasks
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.inference.evaluation import TeacherForcedScorer
from attention_jax.inference.predictor import Predictor
from attention_jax.inference.scoring import score_pairs
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.systems.base import parse_rows
from attention_jax.tokens import EOS, SPECIAL_TOKENS

END = SPECIAL_TOKENS[EOS]


def plot_lines(predictor: Predictor, lines: Sequence[str], beams: int, path: str | Path) -> None:
  """Writes one PNG with a heatmap of the best hypothesis of each line.

  Raises:
    UserError: for an empty line, and for a line without a hypothesis.
  """
  if not all(line.strip() for line in lines):
    raise UserError('an empty line has no attention weights; expected a line of text')
  heatmaps = []
  for line, prediction in zip(lines, predictor(lines, beams=beams), strict=True):
    if not prediction.hypotheses:
      raise UserError(f'no output for {line!r}')
    best = prediction.hypotheses[0]
    source = [*prediction.tokens, END]
    heatmaps.append(Heatmap(best.weights, source, [*best.tokens, END], title=f'{line} → {best.text}'))
  grid(heatmaps, path)


def select_pairs(data: tasks.TranslationData, split: str, rows: Sequence[str]) -> tuple[list[int], Corpus]:
  """Returns the numbers of the given rows of a split, and their pairs.

  Raises:
    UserError: for rows that do not exist.
  """
  corpus, encoded = tasks.get_split(data, split)
  numbers = parse_rows(rows, split, encoded.rows)
  return numbers, Corpus([corpus.source[row] for row in numbers], [corpus.target[row] for row in numbers])


def plot_rows(
  model: EncoderDecoder,
  params: Any,
  data: tasks.TranslationData,
  split: str,
  rows: Sequence[str],
  buckets: Sequence[Sequence[int]],
  path: str | Path,
) -> None:
  """Writes one PNG with a heatmap of each row of a split: the weights of its reference, and its gold links.

  Args:
    model, params: the trained model.
    data: vocabularies and splits.
    split, rows: the rows to plot, as numbers from 0.
    buckets: of the config.
    path: the file to write.

  Raises:
    UserError: for rows that do not exist, or fit no bucket.
  """
  encoded = tasks.get_split(data, split)[1]
  numbers, corpus = select_pairs(data, split, rows)
  selected = encode(corpus, data.source_vocab, data.target_vocab)
  scores = TeacherForcedScorer(model, buckets, len(numbers))(params, selected)
  heatmaps = []
  for row, source, target, weights in zip(numbers, corpus.source, corpus.target, scores.weights, strict=True):
    if weights is None:
      raise UserError(f"row {row} of split '{split}' fits no bucket; see config.data.buckets")
    heatmaps.append(
      Heatmap(
        np.asarray(weights),
        [*data.source_vocab.tokenize(source), END],
        [*data.target_vocab.tokenize(target), END],
        gold=None if encoded.links is None else encoded.row_links(row),
        title=f'{split} {row}',
      )
    )
  grid(heatmaps, path)


def plot_layers(
  model: EncoderDecoder,
  params: Any,
  corpus: Corpus,
  titles: Sequence[str],
  source_vocab: Vocabulary,
  target_vocab: Vocabulary,
  buckets: Sequence[Sequence[int]],
  path: str | Path,
) -> None:
  """Writes one PNG with a heatmap for every layer and head of each pair of a corpus.

  Raises:
    UserError: for a model with a single layer of attention.
  """
  heatmaps = []
  scored = score_pairs(model, params, corpus, source_vocab, target_vocab, buckets, layers=True)
  for title, source, pair in zip(titles, corpus.source, scored, strict=True):
    source_tokens = [*source_vocab.tokenize(source), END]
    target_tokens = [*pair.tokens, END]
    for layer, heads in enumerate(pair.layers):
      for head, weights in enumerate(heads):
        suffix = f', head {head}' if len(heads) > 1 else ''
        heatmaps.append(Heatmap(weights, source_tokens, target_tokens, title=f'{title}, layer {layer}{suffix}'))
  grid(heatmaps, path)
