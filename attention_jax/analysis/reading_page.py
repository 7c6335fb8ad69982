"""Readings as one HTML page that needs no network: tokens joined by lines, a heatmap, and a slider over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax.analysis.alignment import alignment_scores, links_from_weights
from attention_jax.analysis.fonts import visible_form
from attention_jax.analysis.pages import render
from attention_jax.analysis.reading import Reading, to_record
from attention_jax.atomic import write_text
from attention_jax.errors import report_write_errors
from attention_jax.pharaoh import Link

DIGITS = 3  # significant digits of the numbers on a page


def write_page(readings: Sequence[Reading], path: str | Path, *, relative: bool = False) -> None:
  """Writes one HTML page with all readings; those of several runs stand side by side.

  Args:
    readings: what the page shows, each with the name of its run.
    path: the file.
    relative: whether colours are initially relative to the largest weight of a matrix.

  Raises:
    UserError: if the file cannot be written.
  """
  with report_write_errors(path):
    write_text(path, render_page(readings, relative))


class SourceForm(NamedTuple):
  """Content of the form for a source, on a page that a server returns.

  Attributes:
    text: the source in it.
    edit: the edit of weights in it, or ''.
    error: a message below it, or ''.
    max_length: maximum number of characters of a source and of an edit.
  """

  text: str
  edit: str
  error: str
  max_length: int


def render_page(readings: Sequence[Reading], relative: bool = False, form: SourceForm | None = None) -> str:
  """Returns the HTML of the page; every value in it is escaped.

  Args:
    readings: what the page shows, each with the name of its run.
    relative: whether colours are initially relative to the largest weight of a matrix.
    form: the content of the form; None for a page without a form.
  """
  names = list(dict.fromkeys(reading.run for reading in readings))
  runs = [{'name': name, 'readings': [_record(r) for r in readings if r.run == name]} for name in names]
  title = 'Attention of ' + (' and '.join(name or 'a trained run' for name in names) or 'a trained run')
  return render('pair.html.jinja', title=title, data=runs, relative=relative, form=form)


def _record(reading: Reading) -> dict[str, Any]:
  """The record of a reading for the page: tokens in visible form, and `Reading.maps` among the matrices."""
  record = to_record(reading, DIGITS)
  record |= {side: [visible_form(token) for token in record[side]] for side in ('source_tokens', 'target_tokens')}
  for measured in record['measurements'].values():
    measured['axes'] = [list(map(visible_form, axis)) for axis in measured['axes']]
  for spec in reading.maps:
    record['matrices'][spec] = record['measurements'][spec]['values']
  return record | {'agreement': _agreement(reading)}


def _agreement(reading: Reading) -> dict[str, float] | None:
  """Precision and recall of the largest weights against the gold links; target tokens without a gold link are left out.

  Omits 'precision' if no link is predicted, and 'recall' if there is no sure link. Returns None if there are no gold
  links.
  """
  if reading.gold is None or not len(reading.gold):
    return None
  gold = _link_set(reading.gold)
  sure = gold if reading.sure is None else _link_set(reading.sure)
  linked_targets = {target for _, target in gold}
  links = links_from_weights(reading.weights, len(reading.source_tokens) - 1, len(reading.target_tokens) - 1)
  predicted = [link for link in links if link[1] in linked_targets]
  scores = alignment_scores([predicted], [sure], [gold])
  agreement = {'precision': scores.precision} if predicted else {}
  return agreement | ({'recall': scores.recall} if sure else {})


def _link_set(links: Sequence[Link]) -> set[Link]:
  return {(int(source), int(target)) for source, target in links}
