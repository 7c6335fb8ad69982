"""The page of readings: its structure, its data, and that nothing in it is read as HTML or loaded from elsewhere."""

import numpy as np
import pytest

from attention_jax.analysis import reading_files
from attention_jax.analysis.reading import WEIGHTS, Measurement
from attention_jax.analysis.reading_page import render_page
from tests.analysis.helpers import HOSTILE, Page, check_page, move_slider, open_page
from tests.analysis.test_reading import READING, SOURCE


def test_the_page_has_its_controls_and_its_data():
  page = Page(render_page([READING, READING._replace(name='test 1')]))
  assert {'example', 'hypothesis', 'matrix', 'step', 'relative', 'gold', 'theme', 'panels', 'data'} <= page.ids
  (run,) = page.data
  assert [reading['name'] for reading in run['readings']] == ['test 0', 'test 1']
  runs = Page(render_page([READING._replace(run='a'), READING._replace(run='b')])).data
  assert [run['name'] for run in runs] == ['a', 'b']
  assert run['readings'][0]['source_tokens'] == SOURCE
  assert list(run['readings'][0]['matrices']) == ['weights', 'map']
  check_page(page)


def test_hostile_text_stays_text():
  hostile = READING._replace(
    name=HOSTILE, run=HOSTILE, source=HOSTILE, source_tokens=[HOSTILE, 'b', '</s>'], measurements={}
  )
  page = Page(render_page([hostile]))
  assert 'img' not in {tag for tag, _ in page.tags}
  (run,) = page.data
  assert run['name'] == run['readings'][0]['source_tokens'][0].replace('␣', ' ') == HOSTILE


def test_agreement_with_gold_links_is_precision_and_recall():
  def shown(**fields):
    return Page(render_page([READING._replace(**fields)])).data[0]['readings'][0]

  none = np.zeros((0, 2), np.int32)
  gold = np.array([[1, 0], [0, 0]])
  assert shown()['agreement'] == {'precision': 0, 'recall': 0}  # the largest weight of x is on b, its gold link on a
  assert shown(gold=gold)['agreement'] == {'precision': 1, 'recall': 0.5}
  possible = shown(gold=gold, sure=gold[:1])
  assert possible['agreement'] == {'precision': 1, 'recall': 1}
  assert possible['sure'] == [[1, 0]] and possible['gold'] == [[1, 0], [0, 0]]
  assert shown(gold=gold, sure=none)['agreement'] == {'precision': 1}
  assert shown(gold=gold, matrices={WEIGHTS: np.zeros_like(READING.weights)})['agreement'] == {'recall': 0}
  assert shown(gold=None)['agreement'] is None and shown(gold=none)['agreement'] is None


def test_invisible_tokens_are_visible(tmp_path):
  coverage = Measurement(np.ones(3), (['a', ' ', '</s>'],))
  spaced = READING._replace(source_tokens=['a', ' ', '</s>'], measurements={'coverage': coverage})
  reading_files.write([spaced], tmp_path / 'page.html', relative=True)
  page = Page((tmp_path / 'page.html').read_text('utf-8'))
  (reading,) = page.data[0]['readings']
  assert reading['source_tokens'][1] == reading['measurements']['coverage']['axes'][0][1] == '␣'
  assert next(a for _, a in page.tags if a.get('id') == 'relative').keys() >= {'checked'}


@pytest.mark.packaging
def test_the_page_works_in_a_browser(tmp_path):
  rng = np.random.default_rng(0)
  readings = []
  for example in range(500):
    weights = rng.dirichlet(np.ones(20), 20)
    tokens = [f'слово{i}' for i in range(10)] + [f'كلمة{i}' for i in range(9)] + ['</s>']
    values = {'map': Measurement(weights - 0.05, (tokens, tokens), is_map=True)}
    reading = READING._replace(
      name=f'test {example}', source_tokens=tokens, target_tokens=tokens, matrices={'weights': weights}
    )
    readings += [reading._replace(run=run, measurements=values) for run in ('a', 'b')]
  square = {'rollout': Measurement(np.eye(20), (readings[0].source_tokens,) * 2)}
  readings[0] = readings[0]._replace(
    name='test 0', source_tokens=[HOSTILE, *readings[0].source_tokens[1:]], measurements=square
  )
  reading_files.write(readings, tmp_path / 'page.html')
  with open_page((tmp_path / 'page.html').as_uri()) as page:
    assert page.locator('.panel').count() == 2
    assert page.evaluate("document.documentElement.classList.contains('dark')")
    target = page.locator('.panel').first.locator('.target .token').nth(3)
    target.hover()
    assert 'current' in target.get_attribute('class')
    assert page.locator('.panel').first.locator('caption').text_content() == 'rollout'
    assert page.locator('caption').count() == 1  # the map of the other run is one of its matrices
    assert page.locator('.panel').first.locator('.reading').text_content().startswith('слово3: ')
    page.mouse.move(0, 0)
    move_slider(page, 3)
    assert page.locator('#step-name').text_content() == '3 слово2'
    assert page.locator('.target .token.current').count() == 2
    start = page.evaluate('performance.now()')
    for _ in range(20):
      page.keyboard.press('n')
    assert page.evaluate('performance.now()') - start < 20_000
    assert page.locator('#example').input_value() == '20'
    page.select_option('#matrix', 'map')
    assert page.locator('.links line.negative').count() > 0
    page.keyboard.press('d')
    assert not page.evaluate("document.documentElement.classList.contains('dark')")
