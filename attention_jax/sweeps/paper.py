"""What a report offers for a paper: sentences, a table in LaTeX and Markdown, and BibTeX entries of the mechanisms.

The papers of a mechanism are those that its docstring names, as 'Luong, Pham & Manning 2015'. papers.bib has an entry
for each, whose key is the first name and the year: 'luong2015'.
"""

import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.losses.auxiliary import CLASSIFIER_LOSSES, LOSSES
from attention_jax.losses.objectives import OBJECTIVES
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoders import ENCODERS
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.modules.pooling import POOLINGS
from attention_jax.modules.positions import POSITIONS
from attention_jax.specs import parse_sum
from attention_jax.sweeps.contrasts import Contrast, MetricColumn
from attention_jax.sweeps.report import (
  MISSING,
  TEST_NAMES,
  Report,
  ReportCell,
  escape_markdown,
  format_difference,
  format_number,
)
from attention_jax.sweeps.space import PRESET
from attention_jax.systems.config import RunConfig, flatten_config
from attention_jax.systems.presets import PRESETS
from attention_jax.systems.registry import SYSTEMS

PAPERS = Path(__file__).parent / 'papers.bib'
FIGURE = 'figure.pdf'
BIBLIOGRAPHY = 'paper.bib'
CITATION = re.compile(r'([A-Z][\w-]+)(?: Team|(?:, [A-Z][\w-]+)*(?: & [A-Z][\w-]+)| et al\.)? ((?:19|20)\d\d)\b')
SECTIONS = re.compile(r'^(?:Args|Attributes|Returns|Raises):', re.MULTILINE)  # of a docstring, after its description
VERDICTS = {
  'better': 'a significant improvement',
  'worse': 'significantly worse',
  'no difference found': 'no difference was found',
  'not tested': 'not tested',
}
LATEX = str.maketrans(
  {char: f'\\{char}' for char in '#$%&_{}'}
  | {'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}', MISSING: '--', '±': r'$\pm$'}
  | {'<': r'\textless{}', '>': r'\textgreater{}', '|': r'\textbar{}', '[': '{[}', ']': '{]}', '"': "''"}
)


class Paper(NamedTuple):
  """The texts that a report offers for a paper.

  Attributes:
    sentences: one for each comparison with the baseline in the first metric; without any, one for each setting.
    latex: sentences, table and figure, with citations.
    markdown: sentences and table.
    bibtex: entries of the mechanisms that the configs of the runs name.
  """

  sentences: list[str]
  latex: str
  markdown: str
  bibtex: str


def make_paper(report: Report) -> Paper:
  """Returns the texts of a report of which at least one metric was measured."""
  sentences = _sentences(report)
  table = paper_table(report)
  citations = cited_papers(report)
  entries = [bibliography().get(key, f'% No entry: {citation}\n') for key, citation in citations.items()]
  return Paper(
    sentences,
    _latex(report, sentences, table, [key for key in citations if key in bibliography()]),
    '\n\n'.join([*map(escape_markdown, sentences), _markdown(table)]) + '\n',
    '\n'.join(entries),
  )


def paper_table(report: Report) -> pd.DataFrame:
  """Returns a row per setting as text: mean ± standard deviation of each metric, and the difference from the baseline.

  The columns have two levels: a metric, and 'mean', 'difference' and 'p'.
  """
  records = []
  for row in report.rows:
    record = {('', 'setting'): row.setting.label, ('', 'seeds'): str(len(row.setting.runs))}
    for column in report.main_columns:
      name = f'{column.metric} ({column.unit})'
      record[name, 'mean'] = _cell(row.cells.get(column))
      contrasts = {id(contrast.setting): contrast for contrast in report.contrasts if contrast.column == column}
      if contrasts:
        contrast = contrasts.get(id(row.setting))
        record[name, 'difference'] = format_difference(contrast.difference) if contrast else MISSING
        record[name, 'p'] = _p(contrast.corrected_p) if contrast else MISSING
    records.append(record)
  return pd.DataFrame(records, columns=pd.MultiIndex.from_tuples(records[0]))


@functools.cache
def bibliography() -> Mapping[str, str]:
  """Returns the entries of papers.bib by key."""
  entries = re.split(r'\n(?=@)', PAPERS.read_text('utf-8'))
  return {re.match(r'@\w+\{(\w+),', entry)[1]: entry for entry in entries}


def cited_papers(report: Report) -> dict[str, str]:
  """Returns the papers of the mechanisms that the runs of a report name: key -> the citation in a docstring."""
  papers: dict[str, str] = {}
  for row in report.rows:
    preset = row.setting.factors.get(PRESET, '')
    presets = PRESETS.get(row.setting.config.system, {})
    texts = [*mechanism_texts(row.setting.config), *([presets[preset].paper] if preset in presets else [])]
    for text in texts:
      papers = find_citations(text) | papers
  return dict(sorted(papers.items()))


def find_citations(text: str) -> dict[str, str]:
  """Returns the papers that a text names: 'luong2015' -> 'Luong, Pham & Manning 2015'."""
  return {f'{match[1].lower()}{match[2]}': match[0] for match in CITATION.finditer(' '.join(text.split()))}


def documented_mechanisms(system: str) -> dict[str, Mapping[str, Any]]:
  """Returns field of a config, or option of a spec -> name of a mechanism -> the object with a docstring about it."""

  def functions(table):
    return {name: row.fn for name, row in table.items()}

  scores, alignments = functions(SCORES), functions(ALIGNMENTS)
  return {
    'model.attention.score': scores,
    'model.attention.alignment': alignments,
    'model.score': scores,
    'model.alignment': alignments,
    'model.encoder': ENCODERS,
    'model.decoder': DECODERS,
    'model.output': OUTPUTS,
    'model.pooling': POOLINGS,
    'position': POSITIONS,
    'training.auxiliary': functions({**LOSSES, **CLASSIFIER_LOSSES}),
    'training.objective': {name: row.build for name, row in OBJECTIVES.items()},
    **SYSTEMS[system].mechanisms,
  }


def mechanism_texts(config: RunConfig) -> Iterator[str]:
  """Yields the description of each mechanism that a config names, without those of plug-ins that are not loaded."""
  tables = documented_mechanisms(config.system)
  specs = [(field, value) for field, value in flatten_config(config).items() if field in tables]
  while specs:
    field, spec = specs.pop(0)
    for name, options in parse_sum(spec).items():
      if name in tables[field]:
        yield describe(tables[field][name])
      specs += [(option, value) for option, value in options.items() if option in tables]


def describe(mechanism: Any) -> str:
  """Returns the docstring of a mechanism without the sections about its arguments."""
  return SECTIONS.split(inspect.cleandoc(mechanism.__doc__ or ''))[0]


def escape_latex(text: str) -> str:
  """Returns plain text for LaTeX; a hyphen before a number becomes a minus sign."""
  return re.sub(r'(?<![\w-])-(?=\d)', '$-$', text.translate(LATEX))


def _sentences(report: Report) -> list[str]:
  column = report.columns[0]
  contrasts = [contrast for contrast in report.contrasts if contrast.column == column]
  if contrasts:
    tested = sum(not math.isnan(contrast.corrected_p) for contrast in contrasts)
    cells = {id(row.setting): row.cells[column] for row in report.rows if column in row.cells}
    baseline = report.baseline
    return [
      f'{_name(column)} was {format_number(cells[id(x.setting)].mean.value)} with {x.setting.label} and '
      f'{format_number(cells[id(baseline)].mean.value)} with {baseline.label} '
      f'({_counts(cells[id(x.setting)], cells[id(baseline)])}); the difference is {format_difference(x.difference)}'
      f'{_describe_test(report, x, tested)}: {VERDICTS[x.verdict]}{"; other seeds may differ as much" * x.tests_rows}.'
      for x in contrasts
    ]
  return [
    f'{_name(column)} was {_cell(row.cells[column])} with {row.setting.label} ({_counts(row.cells[column])}).'
    for row in report.rows
    if column in row.cells
  ]


def _name(column: MetricColumn) -> str:
  return f'On {column.split}, {column.metric} ({column.unit})'


def _counts(*cells: ReportCell) -> str:
  """'means of 3 seeds', 'means of 3 and 5 seeds', or 'single runs'."""
  counts = list(dict.fromkeys(len(cell.values) for cell in cells))
  if counts == [1]:
    return 'single runs' if len(cells) > 1 else 'a single run'
  return f'{"means" if len(cells) > 1 else "mean"} of {" and ".join(map(str, counts))} seeds'


def _describe_test(report: Report, contrast: Contrast, tested: int) -> str:
  """' (95 % interval, paired t-test over 3 seeds, p = 0.16 after correction for 4 comparisons)'; '' without a test."""
  parts = [] if math.isnan(contrast.difference.low) else ['95 % interval']
  if not math.isnan(contrast.corrected_p):
    over = '' if contrast.tests_rows else f' over {contrast.comparison.seeds} seeds'
    correction = f' after correction for {tested} comparisons' if tested > 1 else ''
    parts.append(f'{_test_name(report, contrast)}{over}, p = {contrast.corrected_p:.2g}{correction}')
  return f' ({", ".join(parts)})' if parts else ''


def _test_name(report: Report, contrast: Contrast) -> str:
  return 'test over the rows of one pair of runs' if contrast.tests_rows else f'paired {TEST_NAMES[report.test]}'


def _cell(cell: ReportCell | None) -> str:
  """'84.02 ± 0.95'; without the deviation if there is none, and MISSING without a cell."""
  if cell is None:
    return MISSING
  mean = format_number(cell.mean.value)
  if math.isnan(cell.deviation):
    return mean
  decimals = len(mean.partition('.')[2])
  return f'{mean} ± {cell.deviation:.{decimals}f}'


def _p(value: float) -> str:
  return MISSING if math.isnan(value) else f'{value:.2g}'


def _latex(report: Report, sentences: list[str], table: pd.DataFrame, keys: list[str]) -> str:
  escaped = table.map(escape_latex)
  escaped.columns = pd.MultiIndex.from_tuples([tuple(map(escape_latex, names)) for names in table.columns])
  alignment = 'l' + 'r' * (len(table.columns) - 1)
  tabular = escaped.to_latex(index=False, column_format=alignment, multicolumn_format='c').rstrip()
  citation = f' Mechanisms: \\cite{{{",".join(keys)}}}.' if keys else ''
  split = report.columns[0].split
  caption = f'{report.title}: mean ± standard deviation over seeds, {split}.'
  if report.contrasts:
    tests = ' or a '.join(dict.fromkeys(_test_name(report, contrast) for contrast in report.contrasts))
    caption += f' Differences from {report.baseline.label} have 95 % intervals; p is that of a {tests}, corrected for '
    caption += 'the comparisons in each metric.'
  figure = 'Means with 95 % intervals. A point is a run; the dotted line is the baseline.'
  return '\n'.join(
    [
      f'% Needs the packages booktabs and graphicx, and {BIBLIOGRAPHY} as bibliography.',
      *map(escape_latex, sentences),
      '',
      r'\begin{table}',
      r'\centering',
      f'\\caption{{{escape_latex(caption)}{citation}}}',
      r'\label{tab:settings}',
      tabular,
      r'\end{table}',
      '',
      r'\begin{figure}',
      r'\centering',
      f'\\includegraphics[width=\\linewidth]{{{FIGURE}}}',
      f'\\caption{{{escape_latex(figure)}}}',
      r'\label{fig:settings}',
      r'\end{figure}',
      '',
    ]
  )


def _markdown(table: pd.DataFrame) -> str:
  names = [', '.join(filter(None, names)) for names in table.columns]
  rows = [names, ['---'] * len(names), *table.to_numpy().tolist()]
  return '\n'.join(f'| {" | ".join(map(escape_markdown, row))} |' for row in rows)
