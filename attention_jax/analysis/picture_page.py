"""Pictures and memories step by step as one HTML page that needs no network: a slider over words, glimpses or steps."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_jax.analysis.pages import render
from attention_jax.analysis.reading import rounded
from attention_jax.atomic import write_text
from attention_jax.errors import report_write_errors

DIGITS = 3  # significant digits of the numbers on a page
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom; the picture extends from 0 to 1


class StepTable(NamedTuple):
  """Values at each step.

  Attributes:
    title: line above the values.
    rows: name of each row.
    values: [rows, T].
  """

  title: str
  rows: Sequence[str]
  values: np.ndarray


class SteppedExample(NamedTuple):
  """One example of T steps. A page has a picture with marks, tables, or both.

  Attributes:
    name: heading.
    steps: name of each step.
    facts: lines below the heading.
    frames: pictures [height, width, C] uint8: none, one, or one for all steps together followed by one for each step.
    boxes: rectangles that are outlined in the picture: none, or a list of them for all steps together, followed by one
      for each step.
    path: [T, 2], points (x, y), which are numbered; the picture extends from 0 to 1. Empty by default.
    details: pictures beside the frame, one for each step; empty by default.
    tables: values at each step.
  """

  name: str
  steps: Sequence[str]
  facts: Sequence[str] = ()
  frames: Sequence[np.ndarray] = ()
  boxes: Sequence[Sequence[Rectangle]] = ()
  path: Sequence[Sequence[float]] | np.ndarray = ()
  details: Sequence[np.ndarray] = ()
  tables: Sequence[StepTable] = ()


def write_page(examples: Sequence[SteppedExample], path: str | Path, title: str) -> None:
  """Writes one page with all examples.

  Args:
    examples: what the page shows, one at a time.
    path: the file.
    title: heading of the page.

  Raises:
    UserError: if the file cannot be written.
  """
  with report_write_errors(path):
    write_text(path, render('steps.html.jinja', title=title, data=list(map(_record, examples)), relative=False))


def as_colours(picture: np.ndarray) -> np.ndarray:
  """Returns a picture [height, width, C] with three channels: itself, or three copies of the mean of its channels."""
  if picture.shape[-1] == 3:
    return picture
  grey = picture.astype(np.float64).mean(-1, keepdims=True)
  return np.repeat(np.round(grey).astype(np.uint8), 3, axis=-1)


def _record(example: SteppedExample) -> dict[str, Any]:
  """The JSON object of an example."""
  return {
    'name': example.name,
    'steps': list(example.steps),
    'facts': list(example.facts),
    'frames': list(map(_data_url, example.frames)),
    'boxes': [[rounded(np.array(box), DIGITS) for box in boxes] for boxes in example.boxes],
    'path': rounded(np.array(example.path), DIGITS),
    'details': list(map(_data_url, example.details)),
    'tables': [table._asdict() | {'values': rounded(table.values, DIGITS)} for table in example.tables],
  }


def _data_url(picture: np.ndarray) -> str:
  """Returns a data URL with the picture as a PNG."""
  from PIL import Image

  file = io.BytesIO()
  Image.fromarray(as_colours(picture)).save(file, 'PNG')
  return f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
