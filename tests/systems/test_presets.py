"""docs/papers.md: every preset has rows, and plain names mean the papers' settings."""

import re
from pathlib import Path

import pytest

from attention_jax.systems.presets import PRESETS

PAGE = Path(__file__).parents[2] / 'docs' / 'papers.md'
PAPER = r'[a-z]+[0-9]{4}'
# The part of a name that states how the preset differs from its paper.
STATED_CHANGE = r'_(deep_tanh|mapped|birnn|immediate_reward)(?=_|$)'
# Parts of a preset with a plain name that may differ from the paper: those of pictures on a small grid, the weight of
# a loss, and an estimate with the expected gradient of the paper.
ACCEPTED_DIFFERENCES = {
  'captioning': {'image encoder, output layer', 'weight of the doubly stochastic loss', 'reward, baseline'}
}


def read_rows(page):
  """Returns (preset, part, difference from the paper or '') by system; a row of the page may name several presets."""
  rows = {}
  for section in page.split('\n## ')[1:]:
    system, *lines = section.splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split('|')] for line in lines if line.startswith('| `')]
    rows[system] = [(preset, *rest) for presets, *rest in cells for preset in presets.split(', ')]
  return rows


ROWS = read_rows(PAGE.read_text('utf-8'))


@pytest.mark.parametrize('system', PRESETS)
def test_every_preset_has_rows_and_every_row_a_preset_and_a_part(system):
  assert {row[0].strip('`') for row in ROWS[system]} == set(PRESETS[system])
  assert [row for row in ROWS[system] if len(row) != 3 or not row[1]] == []


def plain_name(preset):
  """Returns the name without the change that it states."""
  return re.sub(STATED_CHANGE, '', preset)


def parts(system, preset, differ):
  """Returns part -> difference from the paper of a preset, of the parts that differ, or of those that do not."""
  rows = [row[1:] for row in ROWS[system] if row[0] == f'`{preset}`']
  return {part: difference for part, difference in rows if bool(difference) == differ}


ALL = [(system, preset) for system, presets in PRESETS.items() for preset in presets]
CHANGED = [(system, preset) for system, preset in ALL if plain_name(preset) != preset]
PAPERS = {re.match(PAPER, preset).group() for _, preset in CHANGED}
PLAIN = [pair for pair in ALL if re.match(PAPER, pair[1]).group() in PAPERS and pair not in CHANGED]


def test_the_papers_with_changed_presets_are_found():
  assert {'bahdanau2015', 'sutskever2014', 'luong2015', 'xu2015'} == PAPERS
  assert {*PAPERS - {'xu2015'}, 'luong2015_local_p', 'xu2015_hard'} <= {name for _, name in PLAIN}


@pytest.mark.parametrize(('system', 'preset'), PLAIN)
def test_a_preset_with_the_plain_name_of_its_paper_has_only_accepted_differences(system, preset):
  assert parts(system, preset, differ=False)
  assert parts(system, preset, differ=True).keys() <= ACCEPTED_DIFFERENCES.get(system, set())


@pytest.mark.parametrize(('system', 'preset'), CHANGED)
def test_a_stated_change_is_a_difference_from_the_preset_with_the_plain_name(system, preset):
  plain = plain_name(preset)
  plain_settings = [presets[plain].settings for presets in PRESETS.values() if plain in presets]
  assert plain_settings and PRESETS[system][preset].settings not in plain_settings
  assert parts(system, preset, differ=False)
  assert any(f'`{plain}`' in difference for difference in parts(system, preset, differ=True).values())


def test_presets_named_in_differences_exist_and_none_is_named_exact():
  names = {name for _, name in ALL}
  for rows in ROWS.values():
    for row in rows:
      assert {name for name in re.findall(r'`(\w+2\d{3}\w*)`', row[2])} <= names
  assert not any('exact' in name for name in names)
