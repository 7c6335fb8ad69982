"""Reads files of hypotheses: one text per line, or lists of the best hypotheses as `translate --json` prints them."""

import json
import math
from typing import Any

from attention_jax.data.files import read_lines
from attention_jax.errors import UserError
from attention_jax.inference.minimum_bayes_risk import Candidates

LIST_SUFFIXES = ('.jsonl', '.json')


def has_lists(path: str) -> bool:
  """Whether a file contains lists of hypotheses, by its name."""
  return path.endswith(LIST_SUFFIXES)


def read_candidates(path: str) -> list[Candidates]:
  """Returns the hypotheses of each line of a file.

  A line of a file whose name ends with one of LIST_SUFFIXES is a JSON object of `translate --json`. Of its fields,
  `hypotheses` is needed, a list of objects with `text` and `log_prob`, best first; with `sampled` true all of them have
  equal weights. A source without a hypothesis has an empty text. A line of any other file is one text.

  Raises:
    UserError: if the file cannot be read as text, and for a line that is no such object.
  """
  lines = read_lines(path)
  if not has_lists(path):
    return [Candidates([line]) for line in lines]
  return [_parse_line(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def _parse_line(line: str, place: str) -> Candidates:
  """The hypotheses of one JSON object; errors name `place`."""
  try:
    record = json.loads(line)
  except json.JSONDecodeError:
    raise _line_error(place, line) from None
  hypotheses = record.get('hypotheses') if isinstance(record, dict) else None
  if not isinstance(hypotheses, list) or not all(_is_hypothesis(hypothesis) for hypothesis in hypotheses):
    raise _line_error(place, line)
  if not hypotheses:
    return Candidates([''])
  texts = [hypothesis['text'] for hypothesis in hypotheses]
  log_probs = [hypothesis['log_prob'] for hypothesis in hypotheses]
  return Candidates(texts, None if record.get('sampled') else log_probs)


def _is_hypothesis(value: Any) -> bool:
  """Whether a value has a text and a finite log-probability."""
  if not isinstance(value, dict) or not isinstance(value.get('text'), str):
    return False
  log_prob = value.get('log_prob')
  return isinstance(log_prob, int | float) and not isinstance(log_prob, bool) and math.isfinite(log_prob)


def _line_error(place: str, line: str) -> UserError:
  expected = 'an object with "hypotheses", each with "text" and a finite "log_prob", as translate --json prints it'
  return UserError(f'{place}: expected {expected}, got {line[:60]!r}')
