"""What a report offers for a paper: sentences, tables, the figure, and the papers of mechanisms."""

import re

import numpy as np
import pytest

from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row
from attention_jax.sweeps.paper import (
  bibliography,
  cited_papers,
  describe,
  documented_mechanisms,
  escape_latex,
  find_citations,
  make_paper,
  mechanism_texts,
  paper_table,
)
from attention_jax.sweeps.plots import draw_figure
from attention_jax.sweeps.report import format_difference, format_number
from attention_jax.sweeps.statistics import Interval, RowComparison
from attention_jax.systems.config import parse_config
from attention_jax.systems.presets import PRESETS
from attention_jax.systems.registry import SYSTEMS
from tests.sweeps.helpers import base_config

EVIL = r'a_b%{c}\d [e] #1 & ~^<|> "quoted" -3'


def test_every_paper_that_a_mechanism_or_a_preset_names_has_an_entry():
  tables = [table for system in SYSTEMS for table in documented_mechanisms(system).values()]
  texts = [describe(mechanism) for table in tables for mechanism in table.values()]
  texts += [preset.paper for presets in PRESETS.values() for preset in presets.values()]
  named = {key: citation for text in texts for key, citation in find_citations(text).items()}
  assert sorted(named) == sorted(bibliography()) and len(named) > 50
  for key, entry in bibliography().items():
    fields = dict(re.findall(r'^  (\w+) = \{(.*)\},$', entry, re.MULTILINE))
    assert {'author', 'title', 'year'} < set(fields) and key.endswith(fields['year']), key
    assert set(fields) & {'booktitle', 'journal', 'eprint', 'howpublished'}, key
    first = fields['author'].split(' and ')[0].partition(',')[0].strip('{}').split()[0]
    assert key == f'{first.lower()}{fields["year"]}'
    assert entry.count('{') == entry.count('}'), key


def test_citations_are_found_with_all_forms_of_names():
  text = 'Luong, Pham & Manning 2015; Tu et al. 2016,\nGraves 2016; Gemma Team 2024, Gemma 2; 100 updates in 1800.'
  assert find_citations(text) == {
    'luong2015': 'Luong, Pham & Manning 2015',
    'tu2016': 'Tu et al. 2016',
    'graves2016': 'Graves 2016',
    'gemma2024': 'Gemma Team 2024',
  }


def test_mechanisms_of_a_config_are_those_of_its_specs_and_their_options():
  fields = {
    'model__encoder': 'transformer(position="shaw")',
    'model__attention__score': 'location',
    'model__attention__alignment': 'sparsemax',
    'training__auxiliary': 'coverage + diagonal',
  }
  keys = {key for text in mechanism_texts(parse_config(base_config(**fields))) for key in find_citations(text)}
  assert keys == {'vaswani2017', 'shaw2018', 'luong2015', 'martins2016', 'see2017', 'tachibana2018'}


def test_a_sentence_has_the_numbers_of_each_comparison_in_the_first_metric(report):
  paper = make_paper(report)
  assert len(paper.sentences) == 3
  contrast = report.contrasts[2]
  means = [format_number(report.rows[row].cells[report.columns[0]].mean.value) for row in (3, 0)]
  assert paper.sentences[2] == (
    f'On test, exact_match (%) was {means[0]} with score=general, alignment=local_p(width=10) and {means[1]} with '
    f'score=dot, alignment=softmax (means of 3 seeds); the difference is {format_difference(contrast.difference)} '
    f'(95 % interval, paired t-test over 3 seeds, p = {contrast.corrected_p:.2g} after correction for 3 comparisons): '
    'a significant improvement.'
  )
  assert all(sentence in paper.markdown.replace('\\', '') for sentence in paper.sentences)
  (alone,) = make_paper(report._replace(contrasts=[], rows=report.rows[:1])).sentences
  cell = report.rows[0].cells[report.columns[0]]
  value = f'{cell.mean.value:.2f} ± {cell.deviation:.2f}'
  assert alone == f'On test, exact_match (%) was {value} with score=dot, alignment=softmax (mean of 3 seeds).'


def test_a_single_pair_of_runs_is_described_as_such(report):
  rows = RowComparison(Interval(-2.0, -3.0, -1.0), 0.01)
  seeds = report.contrasts[0].comparison._replace(seeds=1, difference=Interval(-2.0, np.nan, np.nan), p=np.nan)
  contrast = report.contrasts[0]._replace(comparison=seeds, row_comparisons=[rows], corrected_p=0.02)
  column = contrast.column
  single = [
    row._replace(cells={column: row.cells[column]._replace(values=[1.0], deviation=np.nan)}) for row in report.rows[:2]
  ]
  report = report._replace(rows=single, contrasts=[contrast])
  (sentence,) = make_paper(report).sentences
  expected = '(single runs); the difference is -2 [-3, -1] (95 % interval, test over the rows of one pair of runs, '
  assert sentence.endswith(expected + 'p = 0.02): significantly worse; other seeds may differ as much.')
  assert 'p is that of a test over the rows of one pair of runs' in make_paper(report).latex
  untested = contrast._replace(row_comparisons=[], corrected_p=np.nan)
  (sentence,) = make_paper(report._replace(contrasts=[untested])).sentences
  assert sentence.endswith('(single runs); the difference is -2 [no interval]: not tested.')


def test_tables_have_a_row_for_each_setting_and_latex_is_escaped(report):
  evil = report.rows[1].setting._replace(label=EVIL)
  rows = [report.rows[0], report.rows[1]._replace(setting=evil)]
  contrasts = [x._replace(setting=evil) for x in report.contrasts if x.setting is report.rows[1].setting]
  report = report._replace(title=EVIL, rows=rows, contrasts=contrasts)
  table = paper_table(report)
  cell = rows[1].cells[report.columns[1]]
  assert table['alignment_error_rate (%)', 'mean'].tolist()[1] == f'{cell.mean.value:.2f} ± {cell.deviation:.2f}'
  assert table['exact_match (%)', 'difference'].tolist() == ['–', format_difference(contrasts[0].difference)]
  latex = make_paper(report).latex
  lines = latex[latex.index(r'\midrule') : latex.index(r'\bottomrule')].splitlines()[1:]
  assert [len(re.findall(r'(?<!\\)&', line)) for line in lines] == [7, 7]
  plain = re.sub(r'\\[#$%&_{}]', '', latex)
  assert plain.count('{') == plain.count('}') and not re.search(r'(?<!\\)[#^~]|–|±', plain)
  assert not re.search(r'(?<!^)(?<!\\)%', plain, re.MULTILINE)  # comments are whole lines
  assert escape_latex(EVIL) in latex and '\\\\\n[' not in latex
  assert escape_latex('[-0.5] 1e-3 a-2 x=-1') == r'{[}$-$0.5{]} 1e-3 a-2 x=$-$1'
  for line in make_paper(report).markdown.splitlines()[-4:]:
    assert len(re.findall(r'(?<!\\)\|', line)) == 9


def test_the_bibliography_has_the_mechanisms_of_all_settings_and_names_papers_without_an_entry(report, restored_tables):
  assert sorted(cited_papers(report)) == ['bahdanau2015', 'luong2015']
  paper = make_paper(report)
  assert re.findall(r'@\w+\{(\w+),', paper.bibtex) == ['bahdanau2015', 'luong2015']
  assert r'\cite{bahdanau2015,luong2015}' in paper.latex
  with_preset = report.rows[0].setting._replace(factors={'preset': 'gu2016'})
  assert 'gu2016' in cited_papers(report._replace(rows=[report.rows[0]._replace(setting=with_preset)]))

  def dot(query, key):
    """A score of one's own. Doe & Roe 1999."""

  SCORES['dot'] = Row(dot)
  paper = make_paper(report)
  assert '% No entry: Doe & Roe 1999\n' in paper.bibtex and 'doe1999' not in paper.latex


@pytest.mark.long
@pytest.mark.parametrize('count', [1, 4])
def test_the_figure_is_a_pdf_with_truetype_fonts(report, count):
  data = draw_figure(report._replace(rows=report.rows[:count]))
  assert data.startswith(b'%PDF') and b'/Type3' not in data and b'/FontFile2' in data
