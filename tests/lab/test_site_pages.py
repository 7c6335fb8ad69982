"""The documentation site: its navigation, the API reference, links, the lesson, and a build of all of it."""

import os
import pydoc
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

import attention_jax as aj
from lab import site_pages
from lab.site_pages import ROOT, api_entries, lesson_files, nav_pages, navigation, resolve_links, site_files


def test_the_navigation_has_every_page_and_every_mechanism_a_page_and_a_picture():
  pages = list(nav_pages(navigation(yaml.safe_load((ROOT / 'mkdocs.yml').read_text('utf-8'))['nav'])))
  files = set(site_files())
  assert len(pages) == len(set(pages)) and set(pages) == {path for path in files if path.endswith('.md')}
  names = [f'score_{name}' for name in aj.SCORES] + [f'alignment_{name}' for name in aj.ALIGNMENTS]
  assert {f'mechanisms/{name}.{suffix}' for name in names for suffix in ('md', 'png')} <= files


@pytest.mark.parametrize('page', site_pages.API_MODULES)
def test_every_public_name_has_an_entry_with_a_docstring(page):
  entries = api_entries(page)
  expected = {'attention_jax': aj.__all__, 'scores': aj.SCORES, 'alignments': aj.ALIGNMENTS}
  expected['analysis'] = aj.analysis.__all__
  assert list(entries) == list(expected[page])
  for name, path in entries.items():
    assert path is None or pydoc.locate(path).__doc__, f'{name} has no docstring'
    assert (path or f'({name}.md)') in site_pages.api_page(page)


def test_links_to_files_that_are_no_pages_become_text():
  text = '[page](config.md#top) [code](../Makefile) ![picture](a.png) [web](https://jax.dev) [lost](nothing.md)'
  paths = {'docs/config.md'}
  expected = '[page](config.md#top) code ![picture](a.png) [web](https://jax.dev) [lost](nothing.md)'
  assert resolve_links(text, 'docs/systems.md', paths) == expected
  assert resolve_links('[lesson](docs/attention_basics.ipynb)', 'README.md', paths) == (
    '[lesson](docs/attention_basics.md)'
  )


def test_the_site_shows_the_ready_made_models_that_exist(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setitem(site_pages.TRAINED_BY_MAKE, 'dates', tmp_path / 'runs')
  (page,) = site_pages.model_files().values()
  assert '--names=dates' in page() and '--names=shapes' in page() and '<iframe' not in page()
  for name in ('dates', 'nettalk'):  # the data of nettalk may not be distributed
    site_pages.ready_made_folder(name).mkdir(parents=True)
  files = site_pages.model_files()
  assert set(files) == {'attention/dates.html', 'attention/index.md'}
  page = files['attention/index.md']()
  assert '<iframe src="dates.html"' in page and '--names=shapes' in page and '--names=dates' not in page
  written = SimpleNamespace(plot=lambda params, path, **selection: path.write_text(f'{params} {selection["rows"]}'))
  monkeypatch.setattr(site_pages.runs, 'open_run', lambda folder: SimpleNamespace(system=written, params=folder))
  assert files['attention/dates.html']() == f'{site_pages.ready_made_folder("dates")} {site_pages.MODEL_ROWS}'
  assert site_pages.model_folder('dates') == site_pages.ready_made_folder('dates')
  (tmp_path / 'runs').mkdir()
  (tmp_path / 'runs' / 'results.json').touch()  # `make train` has finished
  assert site_pages.model_folder('dates') == tmp_path / 'runs'


def test_a_lesson_has_its_text_code_outputs_and_plots():
  outputs = [{'text': ['1\n']}, {'data': {'image/png': 'cG5n', 'text/plain': 'a figure'}}]
  cells = [
    {'cell_type': 'markdown', 'source': ['# Title\n', 'text']},
    {'cell_type': 'code', 'source': ['print(1)'], 'outputs': outputs},
  ]
  (picture, png), (_, page) = lesson_files({'cells': cells}).items()
  assert png() == b'png'
  plot = f'![Plot of the code above]({picture.removeprefix("docs/")})'
  assert page() == f'# Title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n{plot}\n'


@pytest.mark.packaging
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path):
  command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', f'--site-dir={tmp_path}']
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'NO_MKDOCS_2_WARNING': '1', 'XLA_FLAGS': ''}
  result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  assert 'WARNING' not in result.stderr
  loaded = r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//'
  for page in tmp_path.rglob('*.html'):
    assert not re.search(loaded, page.read_text('utf-8')), page
  for name in site_pages.API_MODULES:
    html = (tmp_path / 'api' / f'{name}.html').read_text('utf-8')
    assert [path for path in api_entries(name).values() if path and f'id="{path}"' not in html] == []
