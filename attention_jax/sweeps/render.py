"""Writes a report as Markdown, CSV and one self-contained HTML page."""

import base64
import math
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd

from attention_jax import atomic
from attention_jax.sweeps.contrasts import SIGNIFICANCE, Contrast
from attention_jax.sweeps.estimate import format_seconds
from attention_jax.sweeps.paper import BIBLIOGRAPHY, FIGURE, make_paper
from attention_jax.sweeps.plots import Picture, draw_figure, draw_pictures
from attention_jax.sweeps.report import (
  MISSING,
  Report,
  ReportCell,
  escape_markdown,
  format_difference,
  format_number,
)
from attention_jax.sweeps.statistics import Interval

TEMPLATES = Path(__file__).parent
PICTURES = 'report_pictures'


def write_files(report: Report, folder: Path) -> list[Path]:
  """Writes report.md, report.html, report.csv, runs.csv and the pictures, and the files for a paper.

  The files for a paper are paper.tex, paper.md, paper.bib and figure.pdf; none if no metric was measured.

  Args:
    report: the report.
    folder: where to write; created if it does not exist.

  Returns:
    The paths of the documents, without the pictures.
  """
  pictures = draw_pictures(report)
  (folder / PICTURES).mkdir(parents=True, exist_ok=True)
  for picture in pictures:
    atomic.write_bytes(folder / PICTURES / f'{picture.name}.png', picture.png)
  texts = {
    'report.md': render(report, pictures, folder, 'md'),
    'report.html': render(report, pictures, folder, 'html'),
    'report.csv': summary_table(report).to_csv(index=False),
    'runs.csv': runs_table(report).to_csv(index=False),
  }
  if report.columns:
    paper = make_paper(report)
    texts |= {'paper.tex': paper.latex, 'paper.md': paper.markdown, BIBLIOGRAPHY: paper.bibtex}
    atomic.write_bytes(folder / FIGURE, draw_figure(report))
  for name, text in texts.items():
    atomic.write_text(folder / name, text)
  return [folder / name for name in [*texts, *([FIGURE] if report.columns else [])]]


def render(report: Report, pictures: list[Picture], folder: Path, kind: str) -> str:
  """Returns the report as text.

  Args:
    report: the report.
    pictures: its pictures; with any, the text names the files for a paper, which `write_files` writes.
    folder: the folder that links are relative to.
    kind: 'md' or 'html'. In HTML, every value is escaped.
  """
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=kind == 'html',
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
  )
  environment.filters |= FILTERS | {
    'relative': lambda path: os.path.relpath(path, folder),
    'href': lambda path: quote(os.path.relpath(Path(folder, path), folder), safe='/=+'),
  }
  runs = [run for row in report.rows for run in row.setting.runs]
  return environment.get_template(f'report.{kind}.jinja').render(
    report=report,
    pictures=pictures,
    pictures_folder=PICTURES,
    runs=runs,
    paper=make_paper(report) if report.columns else None,
    paper_files=['paper.tex', 'paper.md', BIBLIOGRAPHY, FIGURE] if pictures else [],
  )


def summary_table(report: Report) -> pd.DataFrame:
  """Returns a row per setting, split and metric: mean, interval, interquartile mean, deviation, and the comparison."""
  records = []
  for row in report.rows:
    for column, cell in row.cells.items():
      record = {
        'setting': row.setting.label,
        **{field: str(value) for field, value in row.setting.factors.items()},
        'split': column.split,
        'metric': column.metric,
        'unit': column.unit,
        'seeds': len(cell.values),
        'mean': cell.mean.value,
        'mean_low': cell.mean.low,
        'mean_high': cell.mean.high,
        'interquartile_mean': cell.interquartile_mean.value,
        'interquartile_mean_low': cell.interquartile_mean.low,
        'interquartile_mean_high': cell.interquartile_mean.high,
        'deviation': cell.deviation,
        'parameters': row.parameters,
        'update_flop': row.update_flop,
        'training_seconds': row.seconds,
      }
      # Not by their ids: run folders that differ only in the seed are settings with the same id.
      contrasts = [x for x in report.contrasts if x.setting is row.setting and x.column == column]
      records.append(record | (_contrast_fields(*contrasts) if contrasts else {}))
  return pd.DataFrame(records)


def _contrast_fields(contrast: Contrast) -> dict[str, Any]:
  difference = contrast.difference
  return {
    'difference': difference.value,
    'difference_low': difference.low,
    'difference_high': difference.high,
    'uncorrected_p': contrast.p,
    'corrected_p': contrast.corrected_p,
    'probability_of_improvement': contrast.comparison.improvement,
    'uncorrected_rows_p': ' '.join(f'{comparison.p:.4g}' for comparison in contrast.row_comparisons),
    'verdict': contrast.verdict,
  }


def runs_table(report: Report) -> pd.DataFrame:
  """Returns a row per run, split and metric, of every metric that was measured."""
  records = [
    {
      'setting': row.setting.label,
      **{field: str(value) for field, value in row.setting.factors.items()},
      'seed': run.seed,
      'split': split,
      'metric': metric,
      'value': entry['value'],
      'unit': entry['unit'],
      'signature': entry['signature'],
      'step': run.step,
      'parameters': run.parameters,
      'training_seconds': run.training_seconds,
      'folder': str(run.folder),
      'commit': run.commit,
    }
    for row in report.rows
    for run in row.setting.runs
    for split, metrics in run.results.items()
    for metric, entry in metrics.items()
  ]
  return pd.DataFrame(records)


def _ends(interval: Interval) -> str:
  return '' if math.isnan(interval.low) else f'[{format_number(interval.low)}, {format_number(interval.high)}]'


def _cell(cell: ReportCell) -> str:
  if math.isnan(cell.mean.low):
    return format_number(cell.mean.value)
  return f'{format_number(cell.mean.value)} {_ends(cell.mean)}, IQM {format_number(cell.interquartile_mean.value)}'


def _p(value: float) -> str:
  if math.isnan(value):
    return MISSING
  return '< 0.001' if value < 0.001 else f'{value:.3f}'


def _row_comparisons(contrast: Contrast) -> str:
  """'2 of 3': the pairs of runs whose outputs differ with p < SIGNIFICANCE; 'p = 0.012' for a single pair."""
  comparisons = contrast.row_comparisons
  if not comparisons:
    return MISSING
  if len(comparisons) == 1:
    p = _p(comparisons[0].p)
    return f'p {p}' if p.startswith('<') else f'p = {p}'
  return f'{sum(comparison.p < SIGNIFICANCE for comparison in comparisons)} of {len(comparisons)}'


FILTERS = {
  'base64': lambda data: base64.b64encode(data).decode(),
  'cell': _cell,
  'difference': format_difference,
  'count': lambda number: f'{number:,}' if number else MISSING,
  'ends': _ends,
  'md': escape_markdown,
  'mflop': lambda flop: MISSING if math.isnan(flop) else f'{flop / 1e6:,.0f}',
  'number': format_number,
  'p': _p,
  'row_comparisons': _row_comparisons,
  'share': lambda value: MISSING if math.isnan(value) else f'{value:.2f}',
  'time': format_seconds,
}
