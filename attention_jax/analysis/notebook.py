"""Pages of attention inside of a notebook."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_jax.analysis.reading import ReadingRequest, SupportsReadings, read_runs
from attention_jax.analysis.reading_page import render_page
from attention_jax.atomic import write_text
from attention_jax.errors import UserError, report_write_errors


class Page:
  """An HTML page that a notebook shows as the value of a cell.

  Attributes:
    text: the page.
    height: of the frame in a notebook, pixels.
  """

  def __init__(self, text: str, height: int):
    self.text = text
    self.height = height

  def _repr_html_(self) -> str:
    """Called by notebooks: returns a frame with the page, whose style and script do not affect the notebook."""
    style = f'width: 100%; height: {self.height}px; border: 0'
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.text)}"></iframe>'

  def save(self, path: str | Path) -> None:
    """Writes the page as a file, which opens from disk. Raises UserError if it cannot be written."""
    with report_write_errors(path):
      write_text(path, self.text)


def show(
  run: Any,
  *lines: str,
  layers: bool = False,
  analyses: Sequence[str] = (),
  hypotheses: int = 1,
  edit: str = '',
  relative: bool = False,
  height: int = 720,
) -> Page:
  """Returns a page, shown by a notebook, of the attention weights of a trained run for lines of text.

  Args:
    run: a run of a system with readings, as `attention_jax.open_run('runs/dates')` returns it.
    *lines: the sources.
    layers: whether to add the weights of every layer and head.
    analyses: specs of analysis.analyses.ANALYSES, such as 'leave_one_out'.
    hypotheses: number of hypotheses of each line, at most the beam size.
    edit: a spec of functional.edits.EDITS, such as 'uniform(layer=0)'; the page compares the run with and without it.
    relative: whether the darkest colour initially stands for the largest weight instead of 1.
    height: of the frame, pixels.

  Raises:
    UserError: without a line, for lines or analyses of another type, for a system without readings, and as
      `reading.read_runs`.
  """
  if not lines:
    raise UserError("show: expected at least one line of text, as in show(run, '5 mars 1999')")
  if wrong := [line for line in lines if not isinstance(line, str)]:
    raise UserError(f"show: a line must be a str, as in show(run, 'a', 'b'), got {wrong[0]!r}")
  if isinstance(analyses, str):
    raise UserError(f'show: analyses must be a list, such as [{analyses!r}], got {analyses!r}')
  if not isinstance(run.system, SupportsReadings):
    raise UserError(f'show: {run.folder} is a run of a system without readings; expected a run of translation')
  request = ReadingRequest(inputs=lines, layers=layers, analyses=analyses, hypotheses=hypotheses, edit=edit)
  return Page(render_page(read_runs([run], request), relative), height)
