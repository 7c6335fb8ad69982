"""Heatmaps of what a trained run attends to."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attention_jax.analysis.plots import Heatmap, grid
from attention_jax.data import tasks
from attention_jax.data.text import Corpus
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, SPECIAL
from attention_jax.training.evaluation import Scorer
from attention_jax.training.experiment import Run, open_run

END = SPECIAL[EOS]


def draw(
  folder: str | Path, path: str | Path, *, split: str, rows: Sequence[str], lines: Sequence[str], checkpoint: str
) -> None:
  """Writes one PNG with a heatmap for each of `rows` of a split (forced targets, gold links) or, if given, of `lines`.

  Raises: UserError for rows that do not exist or lines without an output.
  """
  run = open_run(folder, checkpoint)
  grid(_of_lines(run, lines) if lines else _of_rows(run, split, rows), path)


def _of_lines(run: Run, lines: Sequence[str]) -> list[Heatmap]:
  if not all(line.strip() for line in lines):
    raise UserError('an empty line attends to nothing; possible: a line of text')
  items, beams = [], run.config['evaluation']['beams']
  for line, prediction in zip(lines, run.predictor(lines, beams=beams), strict=True):
    if not prediction.hypotheses:
      raise UserError(f'no output for {line!r}')
    best = prediction.hypotheses[0]
    items.append(Heatmap(best.weights, [*prediction.tokens, END], [*best.tokens, END], title=f'{line} → {best.text}'))
  return items


def _of_rows(run: Run, split: str, rows: Sequence[str]) -> list[Heatmap]:
  data = tasks.load(run.config['data'], str(run.folder))
  corpus, encoded = tasks.split_of(data, split)
  if bad := [row for row in rows or [''] if not row.strip().isdecimal() or int(row) >= encoded.rows]:
    raise UserError(f"row '{bad[0]}' is not in split '{split}'; possible: 0 to {encoded.rows - 1}")
  chosen = [int(row) for row in rows]
  some = Corpus([corpus.source[r] for r in chosen], [corpus.target[r] for r in chosen])
  few = tasks.encode(some, data.source_vocab, data.target_vocab)
  forced = Scorer(run.model, run.config['data']['buckets'], len(chosen))(run.params, few)
  items = []
  for i, row in enumerate(chosen):
    if forced.weights[i] is None:
      raise UserError(f"row {row} of split '{split}' fits no bucket; see config.data.buckets")
    source, target = some.source[i], some.target[i]
    items.append(
      Heatmap(
        np.asarray(forced.weights[i]),
        [*data.source_vocab.tokens(source), END],
        [*data.target_vocab.tokens(target), END],
        gold=None if encoded.links is None else encoded.row_links(row),
        title=f'{split} {row}',
      )
    )
  return items
