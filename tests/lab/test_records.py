"""Records of results: reading and writing, tables in Markdown, blocks of documents."""

import pytest

from attention_jax.errors import UserError
from lab.records import (
  Column,
  Table,
  add_rows,
  fill_blocks,
  find_table,
  format_conditions,
  format_table,
  read_table,
  write_table,
)

COLUMNS = [
  Column('PRESET, FLAGS', ['title', 'preset', 'flags']),
  Column('score', ['score']),
  Column('PER', metric='test/per', digits=1, suffix=' %'),
  Column('difference', metric='test/per', digits=1, shows_difference=True),
  Column('time', ['time', 'hardware']),
]
ROWS = [
  {'preset': 'a', 'metrics': {'test/per': {'value': 9.96, 'deviation': 0.04}}, 'time': '2 min', 'hardware': '1 core'},
  {
    'preset': 'a',
    'flags': "--config.x='p(q=1)' --config.y=2",
    'note': 'slow',
    'factors': {'score': 'dot'},
    'metrics': {'test/per': {'value': 12, 'digits': 0, 'difference': {'value': 2, 'low': 1, 'high': 3, 'p': 0.0004}}},
  },
  {'published': 'B 2015', 'metrics': {'test/per': {'value': 8.25}}},
  {'title': 'none', 'metrics': {'test/per': {'text': 'no attention'}}},
  {'preset': 'a', 'flags': '--config.z=3', 'label': 'large', 'note': 'slow'},
  {'preset': 'c', 'hidden': True},
]
TABLE = Table(COLUMNS, ROWS, abbreviations={'X=': '--config.x='})
MARKDOWN = """\
| PRESET, FLAGS | score | PER | difference | time |
| --- | --- | --- | --- | --- |
| `a` | | 10.0 ± 0.0 % | baseline | 2 min, 1 core |
| `a`, `X='p(q=1)' --config.y=2` (slow) | dot | 12 % | +2.0 [+1.0, +3.0], p < 0.001 | |
| *published: B 2015* | | *8.2 %* | | |
| none | | no attention | | |
| `a`, large (slow) | | | | |
"""


def test_a_table_is_formatted_as_markdown():
  assert format_table(TABLE) == MARKDOWN


@pytest.mark.parametrize(
  ('difference', 'text'), [({'value': -1.25}, '-1.2'), ({'value': 0, 'p': 1.0}, '+0.0, p = 1.000'), ({}, '')]
)
def test_a_difference_may_have_no_interval_or_no_value(difference, text):
  row = {'metrics': {'test/per': {'value': 12, 'difference': difference}}}
  assert format_table(Table([COLUMNS[3]], [row])).splitlines()[2] == f'| {text} |'.replace('  ', ' ')


def test_a_row_without_flags_is_named_none_and_rows_are_selected_by_their_factors():
  columns = [Column('FLAGS', ['flags']), Column('x', ['x'])]
  rows = [{'factors': {'x': 1}}, {'note': 'softmax', 'factors': {'x': 2}}, {'factors': {'x': 3}}]
  table = Table(columns, rows, shown={'x': [1, 2]})
  assert format_table(table).splitlines()[2:] == ['| (none) | 1 |', '| (none: softmax) | 2 |']


def test_a_table_is_read_as_it_was_written(tmp_path):
  path = tmp_path / 'claims' / 'x.json'
  write_table(path, TABLE)
  assert format_table(read_table(path)) == MARKDOWN
  assert sum(line.startswith('    {') for line in path.read_text('utf-8').splitlines()) == len(COLUMNS) + len(ROWS)
  assert find_table(tmp_path, 'claims/x') == path
  with pytest.raises(UserError, match="unknown table 'claims/y'"):
    find_table(tmp_path, 'claims/y')


@pytest.mark.parametrize('text', ['', '{}', '{"columns": [{"titel": "x"}], "rows": []}'])
def test_mistakes_in_a_file_raise(tmp_path, text):
  path = tmp_path / 'x.json'
  path.write_text(text)
  with pytest.raises(UserError, match=r'cannot read the results in .*x\.json'):
    read_table(path)


def test_blocks_are_filled_and_nothing_else_changes(tmp_path):
  write_table(tmp_path / 'x.json', TABLE)
  text = '# Title\n\n<!-- table: x -->\n| old |\n| --- |\n\nText.\n<!-- table: x -->\n\nEnd.\n'
  block = f'<!-- table: x -->\n{MARKDOWN}\n'
  filled = fill_blocks(text, tmp_path)
  assert filled == f'# Title\n\n{block}Text.\n{block}End.\n'
  assert fill_blocks(filled, tmp_path) == filled
  assert fill_blocks('<!-- table: x -->\n| old |', tmp_path) == block.removesuffix('\n')  # without a line end
  with pytest.raises(UserError, match=r'y\.json'):
    fill_blocks('<!-- table: y -->\n', tmp_path)
  with pytest.raises(UserError, match="table 'x' has no conditions"):
    fill_blocks('<!-- conditions: x -->\n', tmp_path)


def test_references_read_other_tables(tmp_path):
  write_table(tmp_path / 'x.json', TABLE)

  def fill(**changes):
    where = {'table': 'x', 'metric': 'test/per'}
    references = {'result': where | {'preset': 'a', 'flags': ''} | changes}
    references['published'] = where | {'published': 'B 2015'}
    columns = [Column('result', metric='result'), Column('published', metric='published', published=True)]
    write_table(tmp_path / 'y.json', Table(columns, [{'references': references}]))
    return fill_blocks('<!-- table: y -->\n', tmp_path)

  assert '| 10.0 ± 0.0 | *8.2 (B 2015)* |\n' in fill()
  with pytest.raises(UserError, match="0 rows of table 'x' have"):
    fill(preset='b')
  with pytest.raises(UserError, match=r"table 'x': .* no metric 'test/pre'; expected one of: .*test/per"):
    fill(metric='test/pre')


def test_a_row_replaces_the_one_with_the_same_flags():
  new = {'preset': 'a', 'flags': "--config.y=2 --config.x='p(q=1)'", 'time': 'new'}
  rows = add_rows(TABLE, [new, {'preset': 'c'}, {'preset': 'b'}]).rows
  assert rows == [ROWS[0], new | {'note': 'slow'}, *ROWS[2:5], {'preset': 'c', 'hidden': True}, {'preset': 'b'}]
  rows = [{'config': 'a.py', 'preset': 'b', 'metrics': {'m': {'value': value}}} for value in (1.0, 2.0)]
  with pytest.raises(UserError, match=r'2 new rows have the same config, preset and flags, a\.py:b without flags; '):
    add_rows(TABLE, rows)


def test_conditions_are_formatted_as_a_sentence():
  conditions = {'runs': 27, 'commits': ['abc'], 'processes': 2, 'hardware': 'two cores'}
  conditions |= {'seconds': 150, 'date': 'today'}
  expected = '27 runs at commit abc, 2 at a time, on two cores: 2 minutes, today.\n'
  assert format_conditions(Table([], [], conditions=conditions)) == expected
