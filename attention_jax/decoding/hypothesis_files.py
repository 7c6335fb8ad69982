"""Reads files of hypotheses: one text per line, or lists of the best hypotheses as `translate --json` prints them."""

import json
import math
import re
from typing import Any

from attention_jax.data.files import read_lines
from attention_jax.decoding.minimum_bayes_risk import Candidates
from attention_jax.errors import UserError

LIST_SUFFIXES = ('.jsonl', '.json')

# JSON can escape them, but no line of text has them: a line feed ends it, and an unpaired surrogate is no character
_INVALID_CHARACTERS = re.compile('[\n\ud800-\udfff]')


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
  except (ValueError, RecursionError):  # ValueError also for a number of too many digits
    raise _line_error(place, line) from None
  hypotheses = record.get('hypotheses') if isinstance(record, dict) else None
  if not isinstance(hypotheses, list) or not all(_is_hypothesis(hypothesis) for hypothesis in hypotheses):
    raise _line_error(place, line)
  sampled = record.get('sampled', False)
  if not isinstance(sampled, bool):
    raise UserError(f'{place}: "sampled" must be true or false, got {str(sampled)[:60]!r}')
  if not hypotheses:
    return Candidates([''])
  texts = [hypothesis['text'] for hypothesis in hypotheses]
  log_probs = [float(hypothesis['log_prob']) for hypothesis in hypotheses]
  return Candidates(texts, None if sampled else log_probs)


def _is_hypothesis(value: Any) -> bool:
  """Whether a value has a text of one line and a finite log-probability."""
  if not isinstance(value, dict) or not isinstance(value.get('text'), str):
    return False
  if _INVALID_CHARACTERS.search(value['text']):
    return False
  log_prob = value.get('log_prob')
  if not isinstance(log_prob, int | float) or isinstance(log_prob, bool):
    return False
  try:
    return math.isfinite(log_prob)
  except OverflowError:  # an integer beyond the range of floats
    return False


def _line_error(place: str, line: str) -> UserError:
  expected = 'an object with "hypotheses", each with a "text" of one line and a finite "log_prob" (translate --json)'
  return UserError(f'{place}: expected {expected}, got {line[:60]!r}')
