"""Finds and rewrites documents whose result tables are out of date, and adds records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_jax import atomic
from attention_jax.errors import UserError
from experiments.config_files import PROJECT, load_config
from lab.measured import measured_rows
from lab.records import add_rows, fill_blocks, find_table, read_table, write_table

RECORDS = PROJECT / 'lab' / 'results'


def documents(root: Path = PROJECT) -> list[Path]:
  """Returns the documents that may contain tables."""
  return sorted([*root.glob('*.md'), *(root / 'docs').rglob('*.md'), *(root / 'lab').glob('*.md')])


def outdated_documents(root: Path = PROJECT) -> Mapping[Path, str]:
  """Returns the documents that differ from the records, with the text that they should have."""
  texts = {path: path.read_text('utf-8') for path in documents(root)}
  filled = {path: fill_blocks(text, root / 'lab' / 'results') for path, text in texts.items()}
  return {path: text for path, text in filled.items() if text != texts[path]}


def write_documents(root: Path = PROJECT) -> None:
  """Writes the documents whose tables differ from the records."""
  for path, text in outdated_documents(root).items():
    atomic.write_text(path, text)
    print(f'written to {path}')


def check_flags(values: Mapping[str, Any]) -> None:
  """Checks the flags of `lab.results`.

  Args:
    values: value by name.

  Raises:
    UserError: for --check with --add, and for a flag of --add without it.
  """
  if values['check'] and values['add']:
    raise UserError('--check writes nothing, but --add adds rows; leave one of them out')
  unused = [name for name, value in values.items() if value and name != 'check']
  if unused and not values['add']:
    raise UserError(f'--{unused[0]} has no effect without --add, the folder of a run or of a sweep')


def add_results(folder: Path, name: str, config: str, hardware: str, records: Path = RECORDS) -> None:
  """Adds the rows of a run folder or of a sweep to a table.

  Args:
    folder: the folder.
    name: the table.
    config: 'FILE:PRESET' of a run folder, or of a sweep that was started without a preset; otherwise ''.
    hardware: the hardware on which the runs were measured.
    records: the folder of the tables.

  Raises:
    UserError: for an unknown table, and as `measured_rows` does.
  """
  path = find_table(records, name)
  table = read_table(path)
  rows = measured_rows(folder, table, config, lambda config: load_config(config).to_dict(), hardware)
  write_table(path, add_rows(table, rows))
  for row in rows:
    print(f'{name}: {row["config"]}:{row.get("preset", "")} {row.get("flags", "")}, {len(row["seeds"])} seeds')
