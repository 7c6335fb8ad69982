"""Heatmaps of what a trained model attends to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.analysis.plots import Heatmap, grid
from attention_jax.data import tasks
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
  """Writes one PNG with a heatmap for the best hypothesis of each line. Raises: UserError for one without an output."""
  if not all(line.strip() for line in lines):
    raise UserError('an empty line attends to nothing; possible: a line of text')
  items = []
  for line, prediction in zip(lines, predictor(lines, beams=beams), strict=True):
    if not prediction.hypotheses:
      raise UserError(f'no output for {line!r}')
    best = prediction.hypotheses[0]
    items.append(Heatmap(best.weights, [*prediction.tokens, END], [*best.tokens, END], title=f'{line} → {best.text}'))
  grid(items, path)


def select_pairs(data: tasks.TranslationData, split: str, rows: Sequence[str]) -> tuple[list[int], Corpus]:
  """The numbers of some rows of a split, and the pairs. Raises: UserError for rows that do not exist."""
  corpus, encoded = tasks.get_split(data, split)
  chosen = parse_rows(rows, split, encoded.rows)
  return chosen, Corpus([corpus.source[r] for r in chosen], [corpus.target[r] for r in chosen])


def plot_rows(
  model: EncoderDecoder,
  params: Any,
  data: tasks.TranslationData,
  split: str,
  rows: Sequence[str],
  buckets: Sequence[Sequence[int]],
  path: str | Path,
) -> None:
  """The same for rows of a split: forced targets, gold links. Raises: UserError for rows that do not exist."""
  encoded = tasks.get_split(data, split)[1]
  chosen, some = select_pairs(data, split, rows)
  few = tasks.encode(some, data.source_vocab, data.target_vocab)
  forced = TeacherForcedScorer(model, buckets, len(chosen))(params, few)
  items = []
  for i, row in enumerate(chosen):
    if forced.weights[i] is None:
      raise UserError(f"row {row} of split '{split}' fits no bucket; see config.data.buckets")
    source, target = some.source[i], some.target[i]
    items.append(
      Heatmap(
        np.asarray(forced.weights[i]),
        [*data.source_vocab.tokenize(source), END],
        [*data.target_vocab.tokenize(target), END],
        gold=None if encoded.links is None else encoded.row_links(row),
        title=f'{split} {row}',
      )
    )
  grid(items, path)


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
  """A heatmap for every layer and head, of each pair of a corpus. Raises: UserError where there are not several."""
  items = []
  scored = score_pairs(model, params, corpus, source_vocab, target_vocab, buckets, layers=True)
  for title, source, pair in zip(titles, corpus.source, scored, strict=True):
    tokens = [*source_vocab.tokenize(source), END], [*pair.tokens, END]
    for layer, heads in enumerate(pair.layers):
      names = [f', head {head}' for head in range(len(heads))] if len(heads) > 1 else ['']
      each = zip(heads, names, strict=True)
      items += [Heatmap(weights, *tokens, title=f'{title}, layer {layer}{name}') for weights, name in each]
  grid(items, path)
