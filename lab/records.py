"""Measured results as small JSON files, one per table: the rows, and how their columns are shown in Markdown.

A row records what was run (config with preset, flags, seeds), what was measured, and where: hardware, commits, time.
Rows of published numbers have a source instead. Documents contain the tables below comments, see `fill_blocks`.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax import atomic
from attention_jax.errors import UserError, choose

Row = Mapping[str, Any]
BLOCK = re.compile(r'(<!-- (table|conditions): ([\w/]+) -->\n)(?:.+(?:\n|\Z))*')  # ends at an empty line or the end
LOWEST_P = 0.001
SHOWN_FIELDS = ('title', 'label', 'note', 'hidden')  # fields of a row that only affect how it is shown


class Column(NamedTuple):
  """A column of a table: fields of the rows, joined by commas, or a metric.

  Attributes:
    title: its heading.
    parts: keys of TEXTS, or of the factors of a row.
    metric: key of the metrics of a row, see Table; '' for a column of fields.
    digits: decimal places of the metric; an entry of a row may have digits of its own for its value.
    suffix: shown after the value, but not after a difference.
    published: whether the values are published numbers, which are shown in italics.
    shows_difference: whether the difference from the baseline is shown instead of the value.
  """

  title: str
  parts: Sequence[str] = ()
  metric: str = ''
  digits: int = 2
  suffix: str = ''
  published: bool = False
  shows_difference: bool = False


class Table(NamedTuple):
  """A table of results.

  A row has some of the fields config, preset, flags, title, label, note, metric, epochs, seeds, factors, time,
  hardware, commits, metrics, references and hidden. A row of published numbers has only published (the
  source) and metrics.

  - `label` is shown in place of the flags, as Markdown. A row with `hidden` is a record that no document shows.
  - `metric` is the name of what the row measures, as a text.
  - `factors` maps the name of each varied factor to its value in the row.
  - `metrics` maps 'SPLIT/METRIC', or in tables of claims another name such as 'probe/accuracy', to an entry. An entry
    has either a text, or a value and some of: deviation (n - 1), values (of the seeds), digits, and difference.
  - The difference of an entry from the baseline has a value, and low, high and the corrected p, if they are known, see
    claims.setting_rows. It is empty if it could not be computed, and missing in the baseline.
  - `references` maps further names of metrics to entries of other tables: an object with table, metric, and the fields
    that select one row of that table.

  Attributes:
    columns: columns, from left to right.
    rows: rows, each with the fields above.
    config: config file of the rows.
    flags: flags of all rows, in addition to their own.
    abbreviations: text that is shown -> the text that it replaces: the beginning of a flag, or several flags.
    conditions: the conditions under which a sweep was run: commits, hardware, runs, seconds, processes, date.
    shown: factor -> the values of the rows that are shown; {} for all rows.
  """

  columns: Sequence[Column]
  rows: Sequence[Row]
  config: str = ''
  flags: str = ''
  abbreviations: Mapping[str, str] = {}
  conditions: Mapping[str, Any] = {}
  shown: Mapping[str, Sequence[Any]] = {}


def read_table(path: Path) -> Table:
  """Reads a table.

  Raises:
    UserError: for a file that is missing or no table.
  """
  try:
    record = json.loads(path.read_text('utf-8'))
    columns = [Column(**column) for column in record['columns']]
    return Table(**record | {'columns': columns})
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise UserError(f'cannot read the results in {path}: {type(error).__name__}: {error}') from error


def write_table(path: Path, table: Table) -> None:
  """Writes a table, a row per line."""
  path.parent.mkdir(parents=True, exist_ok=True)
  fields = {name: value for name, value in table._asdict().items() if name not in ('columns', 'rows') and value}
  lines = [f'  {json.dumps(name)}: {_dump(value)}' for name, value in fields.items()]
  columns = [_without_defaults(column) for column in table.columns]
  for name, records in (('columns', columns), ('rows', table.rows)):
    entries = ',\n'.join(f'    {_dump(record)}' for record in records)
    lines.append(f'  {json.dumps(name)}: [\n{entries}\n  ]')
  atomic.write_text(path, '{\n' + ',\n'.join(lines) + '\n}\n')


def _dump(value: Any) -> str:
  return atomic.to_json(value, ensure_ascii=False)


def _without_defaults(column: Column) -> dict[str, Any]:
  return {name: value for name, value in column._asdict().items() if value != Column._field_defaults.get(name)}


# Key of Column.parts -> its text; code is in backquotes.
TEXTS: Mapping[str, Callable[[Row], str]] = {
  'title': lambda row: row.get('title', ''),
  'preset': lambda row: f'`{row["preset"]}`' if row.get('preset') else '',
  'flags': lambda row: row.get('label') or (f'`{row["flags"]}`' if row.get('flags') else ''),
  'seeds': lambda row: ', '.join(map(str, row.get('seeds', ()))),
  'num_seeds': lambda row: str(len(row['seeds'])) if row.get('seeds') else '',
  'epochs': lambda row: row.get('epochs', ''),
  'metric': lambda row: row.get('metric', ''),
  'time': lambda row: row.get('time', ''),
  'hardware': lambda row: row.get('hardware', ''),
  'commits': lambda row: ', '.join(row.get('commits', ())),
}


def format_table(table: Table) -> str:
  """Returns a table in Markdown."""
  lines = [[column.title for column in table.columns], ['---'] * len(table.columns)]
  for row in table.rows:
    is_selected = all(row.get('factors', {}).get(name) in values for name, values in table.shown.items())
    if is_selected and not row.get('hidden'):
      lines.append([_format_cell(table, row, column) for column in table.columns])
  return ''.join('|' + ''.join(f' {cell} |' if cell else ' |' for cell in line) + '\n' for line in lines)


def _format_cell(table: Table, row: Row, column: Column) -> str:
  if column.metric:
    return format_metric(row, column)
  if row.get('published'):
    return f'*published: {row["published"]}*' if column is table.columns[0] else ''
  row = dict(row, flags=_abbreviate(row.get('flags', ''), table.abbreviations))
  texts = [TEXTS[part](row) if part in TEXTS else str(row.get('factors', {}).get(part, '')) for part in column.parts]
  text = ', '.join(filter(None, texts))
  if 'flags' not in column.parts:
    return text
  note = row.get('note', '')
  if text:
    return f'{text} ({note})' if note else text
  return f'(none: {note})' if note else '(none)'


def _abbreviate(flags: str, abbreviations: Mapping[str, str]) -> str:
  for short, long in abbreviations.items():
    flags = flags.replace(long, short)
  return flags


def format_metric(row: Row, column: Column) -> str:
  """Returns the metric of a row: '99.5 ± 0.3 %', its text, or its difference from the baseline; '' if it has none."""
  entry = row.get('metrics', {}).get(column.metric, {})
  if column.shows_difference:
    is_measured = 'value' in entry and not row.get('published')
    return _format_difference(entry.get('difference'), column.digits) if is_measured else ''
  if 'value' not in entry:
    return entry.get('text', '')
  digits = entry.get('digits', column.digits)
  text = f'{entry["value"]:.{digits}f}'
  if 'deviation' in entry:
    text += f' ± {entry["deviation"]:.{digits}f}'
  text += column.suffix
  text += f' ({entry["source"]})' if 'source' in entry else ''
  return f'*{text}*' if row.get('published') or column.published else text


def _format_difference(difference: Mapping[str, float] | None, digits: int) -> str:
  """'+1.20 [+0.50, +1.90], p = 0.012'; 'baseline' for None, and '' for a difference that could not be computed."""
  if not difference:
    return 'baseline' if difference is None else ''
  text = f'{difference["value"]:+.{digits}f}'
  if 'low' in difference:
    text += f' [{difference["low"]:+.{digits}f}, {difference["high"]:+.{digits}f}]'
  if 'p' not in difference:
    return text
  p = difference['p']
  return f'{text}, p < {LOWEST_P}' if p < LOWEST_P else f'{text}, p = {p:.3f}'


def format_conditions(table: Table) -> str:
  """Returns a sentence with the conditions of a sweep."""
  x = table.conditions
  minutes = x['seconds'] / 60
  return (
    f'{x["runs"]} runs at commit {", ".join(x["commits"])}, {x["processes"]} at a time, on {x["hardware"]}: '
    f'{minutes:.0f} minutes, {x["date"]}.\n'
  )


FORMATS: Mapping[str, Callable[[Table], str]] = {'table': format_table, 'conditions': format_conditions}


def fill_blocks(text: str, folder: Path) -> str:
  """Replaces the lines below `<!-- table: NAME -->` or `<!-- conditions: NAME -->`, up to an empty line or the end.

  Args:
    text: a document.
    folder: the folder of NAME.json.

  Raises:
    UserError: for a table that cannot be read, conditions that it does not have, or a reference that does not
      select one row with its metric.
  """

  def fill(match: re.Match) -> str:
    table = _resolve_references(read_table(folder / f'{match[3]}.json'), folder)
    if match[2] == 'conditions' and not table.conditions:
      raise UserError(f'table {match[3]!r} has no conditions; only a table of a sweep has them')
    return f'{match[1]}{FORMATS[match[2]](table)}'

  return BLOCK.sub(fill, text)


def block_names(text: str) -> set[str]:
  """Returns the names of the tables that a document shows, or whose conditions it states."""
  return {match[3] for match in BLOCK.finditer(text)}


def add_rows(table: Table, rows: Sequence[Row]) -> Table:
  """Returns the table with new rows: each replaces the row with the same config, preset and flags, or is appended.

  A new row takes over the title, label and note of the row that it replaces, and whether it is hidden.

  Raises:
    UserError: for two new rows with the same config, preset and flags, such as those of settings that differ only in
      data.folder, which no flag of a row names.
  """
  merged = list(table.rows)
  identities = [_identity(row) for row in rows]
  if repeated := [identity for identity in identities if identities.count(identity) > 1]:
    path, preset, *flags = repeated[0]
    raise UserError(
      f'{identities.count(repeated[0])} new rows have the same config, preset and flags, {path}:{preset} '
      f'{" ".join(flags) or "without flags"}; expected settings that differ in more than config.data.folder'
    )
  for row in rows:
    matches = [i for i, old in enumerate(merged) if _identity(old) == _identity(row)]
    if matches:
      old = merged[matches[0]]
      merged[matches[0]] = {name: old[name] for name in SHOWN_FIELDS if name in old} | dict(row)
    else:
      merged.append(row)
  return table._replace(rows=merged)


def _identity(row: Row) -> tuple[str, ...]:
  return row.get('config', ''), row.get('preset', ''), *sorted(shlex.split(row.get('flags', '')))


def _resolve_references(table: Table, folder: Path) -> Table:
  """Reads the metrics of rows that refer to rows of other tables by `references`, see Table."""
  rows = []
  for row in table.rows:
    metrics = {name: _read_reference(folder, **where) for name, where in row.get('references', {}).items()}
    rows.append(dict(row, metrics=row.get('metrics', {}) | metrics))
  return table._replace(rows=rows)


def _read_reference(folder: Path, table: str, metric: str, **fields: str) -> dict[str, Any]:
  """Returns an entry of another table's row, with the digits that are shown there and the source of a published one."""
  other = read_table(folder / f'{table}.json')
  rows = [row for row in other.rows if all(row.get(field, '') == value for field, value in fields.items())]
  if len(rows) != 1:
    raise UserError(f'{len(rows)} rows of table {table!r} have {fields}; expected one')
  columns = {column.metric: column for column in reversed(other.columns) if column.metric}  # the first one of a metric
  entries = rows[0].get('metrics', {})
  if metric not in columns or metric not in entries:
    expected = ', '.join(name for name in columns if name in entries)
    raise UserError(f'table {table!r}: the row with {fields} has no metric {metric!r}; expected one of: {expected}')
  source = {'source': rows[0]['published']} if 'published' in rows[0] else {}
  return {'digits': columns[metric].digits} | source | entries[metric]


def find_table(folder: Path, name: str) -> Path:
  """Returns the file of a table. Raises UserError for an unknown name."""
  names = [str(path.relative_to(folder).with_suffix('')) for path in sorted(folder.rglob('*.json'))]
  return folder / f'{choose(name, names, "table")}.json'
