"""Pages in a notebook: a frame with the whole page, escaped, and the request that `show` makes."""

import html
import types

import pytest

from attention_jax import analysis
from attention_jax.errors import UserError
from tests.analysis.helpers import Page
from tests.analysis.test_reading import READING


class FakeSystem:
  """Returns one reading for each input of a request, and keeps the request."""

  def read(self, params, request):
    self.params = params
    self.request = request
    return [READING._replace(name=line, target=request.edit) for line in request.inputs]


@pytest.fixture
def run():
  return types.SimpleNamespace(system=FakeSystem(), params='params', folder='runs/dates')


def test_show_requests_readings_of_its_arguments(run):
  page = analysis.show(run, 'a <b>', 'c', analyses=['entropy'], hypotheses=2, height=400)
  assert run.system.params == 'params'
  assert run.system.request.inputs == ('a <b>', 'c') and run.system.request.hypotheses == 2
  assert run.system.request.analyses == ['entropy'] and not run.system.request.layers
  assert 'a \\u003cb\\u003e' in page.text and 'runs/dates' in page.text and page.height == 400


def test_an_edit_is_shown_beside_the_run(run):
  runs = Page(analysis.show(run, 'a', edit='uniform').text).data
  shown = [(run['name'], run['readings'][0]['target']) for run in runs]
  assert shown == [('runs/dates', ''), ('runs/dates, uniform', 'uniform')]


def test_a_notebook_gets_the_page_in_a_frame(run, tmp_path):
  page = analysis.show(run, 'a')
  frame = page._repr_html_()
  assert frame.startswith('<iframe sandbox="allow-scripts"') and 'height: 720px' in frame
  assert html.unescape(frame.partition('srcdoc="')[2].removesuffix('"></iframe>')) == page.text
  page.save(tmp_path / 'page.html')
  assert (tmp_path / 'page.html').read_text('utf-8') == page.text
  with pytest.raises(UserError, match=r'missing/page\.html: cannot be written \(No such file or directory\)'):
    page.save(tmp_path / 'missing' / 'page.html')


@pytest.mark.parametrize(
  ('lines', 'options', 'message'),
  [
    ([], {}, 'at least one line'),
    ([['a', 'b']], {}, r"show: a line must be a str, as in show\(run, 'a', 'b'\), got \['a', 'b'\]"),
    (['a'], {'analyses': 'entropy'}, r"show: analyses must be a list, such as \['entropy'\], got 'entropy'"),
  ],
)
def test_invalid_lines_and_analyses_raise(run, lines, options, message):
  with pytest.raises(UserError, match=message):
    analysis.show(run, *lines, **options)


def test_a_system_without_readings_raises(run):
  run.system = object()
  with pytest.raises(UserError, match='runs/dates is a run of a system without readings'):
    analysis.show(run, 'a')
