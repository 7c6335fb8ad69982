"""docs/papers.md: every preset has rows, and every difference from a paper has its reason."""

import re
from pathlib import Path

import pytest

from attention_jax.systems.presets import PRESETS

PAGE = Path(__file__).parents[2] / 'docs' / 'papers.md'


def read_rows(page):
  """Returns (preset, part, verdict, reason) of every row, by system."""
  rows = {}
  for section in page.split('\n## ')[1:]:
    system, _, body = section.partition('\n')
    lines = [line for line in body.splitlines() if line.startswith('| `')]
    rows[system] = [tuple(cell.strip() for cell in line.strip('|').split('|')) for line in lines]
  return rows


ROWS = read_rows(PAGE.read_text('utf-8'))


@pytest.mark.parametrize('system', PRESETS)
def test_every_preset_has_rows_and_every_row_a_preset(system):
  assert {row[0].strip('`') for row in ROWS[system]} == set(PRESETS[system])


@pytest.mark.parametrize('system', PRESETS)
def test_every_difference_has_a_reason(system):
  for preset, part, verdict, reason in ROWS[system]:
    assert part and verdict in ('same', 'differs'), preset
    assert bool(reason) == (verdict == 'differs'), (preset, part)


def test_exact_presets_differ_in_what_their_rows_say_alone():
  exact = {name for presets in PRESETS.values() for name in presets if name.endswith('_exact')}
  same = {row[0].strip('`') for rows in ROWS.values() for row in rows if row[2] == 'same'}
  assert exact and exact <= same


def test_presets_named_in_reasons_exist():
  names = {name for presets in PRESETS.values() for name in presets}
  for rows in ROWS.values():
    for row in rows:
      assert {name for name in re.findall(r'`(\w+2\d{3}\w*)`', row[3])} <= names
