"""Writes readings as a file: a picture with heatmaps, a page, or JSON."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from attention_jax.analysis.fonts import isolate
from attention_jax.analysis.plots import Heatmap, grid
from attention_jax.analysis.reading import WEIGHTS, Reading, to_record
from attention_jax.analysis.reading_page import write_page
from attention_jax.atomic import to_json, write_text
from attention_jax.errors import choose, report_write_errors


def write_heatmaps(readings: Sequence[Reading], path: str | Path, *, relative: bool = False) -> None:
  """Writes one PNG with heatmaps of the weights of every reading, and of every measurement with two axes.

  If a reading has weights of layers and heads, these are drawn instead of the weights of the model, which are computed
  from them. Measurements are drawn as absolute values, as they may be negative. Those with fewer axes are not drawn,
  see `unwritten_measurements`.

  Args:
    readings: what to draw.
    path: ends with .png.
    relative: whether the darkest colour is the largest weight of a heatmap, instead of 1; always so for measurements.

  Raises:
    UserError: for a path that does not end with .png or cannot be written, and if there is no reading.
  """
  has_several_runs = len({reading.run for reading in readings}) > 1
  heatmaps = []
  for reading in readings:
    title = reading.name if reading.score is None else f'{isolate(reading.source)} → {isolate(reading.target)}'
    title = f'{reading.run}: {title}' if has_several_runs else title
    tokens = (reading.source_tokens, reading.target_tokens)
    layers = {name: weights for name, weights in reading.matrices.items() if name != WEIGHTS}
    for name, weights in (layers or {'': reading.weights}).items():
      gold, sure = (None, None) if layers else (reading.gold, reading.sure)
      heading = f'{title}, {name}' if name else title
      heatmaps.append(Heatmap(weights, *tokens, gold, heading, relative, sure))
    for spec, measured in reading.measurements.items():
      if measured.values.ndim == 2:
        rows, columns = measured.axes
        gold, sure = (reading.gold, reading.sure) if spec in reading.maps else (None, None)
        heatmaps.append(Heatmap(np.abs(measured.values), columns, rows, gold, f'{title}, {spec}', True, sure))
  grid(heatmaps, path)


def unwritten_measurements(readings: Sequence[Reading], path: str | Path) -> list[str]:
  """Returns the specs of the measurements that are not written to `path`: a picture has only those with two axes."""
  if WRITERS[check_format(path)] is not write_heatmaps:
    return []
  measurements = (pair for reading in readings for pair in reading.measurements.items())
  return list(dict.fromkeys(spec for spec, measured in measurements if measured.values.ndim != 2))


def write_json(readings: Sequence[Reading], path: str | Path, *, relative: bool = False) -> None:
  """Writes a JSON array with a record of each reading, see `reading.to_record`.

  Args:
    readings: what to write.
    path: the file.
    relative: not used, as JSON has no colours.

  Raises:
    UserError: if the file cannot be written.
  """
  with report_write_errors(path):
    write_text(path, to_json([to_record(reading) for reading in readings], ensure_ascii=False) + '\n')


WRITERS: Mapping[str, Callable[..., None]] = {
  '.png': write_heatmaps,
  '.html': write_page,
  '.json': write_json,
}


def check_format(path: str | Path) -> str:
  """Returns the suffix of a path. Raises UserError unless it is a key of WRITERS."""
  return choose(Path(path).suffix.lower(), WRITERS, f'format of {path}:')


def write(readings: Sequence[Reading], path: str | Path, *, relative: bool = False) -> None:
  """Writes readings in the format that the suffix of `path` names.

  Args:
    readings: what to write.
    path: the file; its suffix is a key of WRITERS.
    relative: whether colours are relative to the largest weight of a matrix, see the writers.

  Raises:
    UserError: for another suffix, if the file cannot be written, and for a picture without readings.
  """
  WRITERS[check_format(path)](readings, path, relative=relative)
