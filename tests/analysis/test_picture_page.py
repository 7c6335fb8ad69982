"""Pages with a slider over words, glimpses or steps: their data, escaped text, and a browser."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from attention_jax.analysis.picture_page import SteppedExample, as_colours, write_page
from attention_jax.errors import UserError
from attention_jax.systems.captioning import overlays as image_overlays
from attention_jax.systems.glimpsing import paths as glimpse_paths
from attention_jax.systems.recall import tapes as memory_tapes
from tests.analysis.helpers import HOSTILE, Page, check_page, move_slider, open_page

RED = np.full((4, 8, 3), (255, 0, 0), np.uint8)


def read_page(path):
  return Page(path.read_text('utf-8'))


def decode(address):
  return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.removeprefix('data:image/png;base64,')))))


def test_pictures_are_embedded_and_text_is_escaped(tmp_path):
  example = SteppedExample(HOSTILE, [HOSTILE], [HOSTILE], frames=[RED], boxes=[[], [(0, 0.25, 1, 1 / 3)]])
  write_page([example], tmp_path / 'page.html', HOSTILE)
  page = read_page(tmp_path / 'page.html')
  check_page(page)
  assert 'img' not in {tag for tag, _ in page.tags}
  (record,) = page.data
  assert record['name'] == record['steps'][0] == record['facts'][0] == HOSTILE
  assert np.array_equal(decode(record['frames'][0]), RED)
  assert record['boxes'] == [[], [[0, 0.25, 1, 0.333]]] and record['path'] == record['tables'] == []


def test_pictures_of_any_number_of_channels_get_three():
  assert as_colours(RED) is RED
  assert as_colours(RED[..., :1]).tolist() == np.full((4, 8, 3), 255).tolist()
  assert as_colours(np.concatenate([RED, RED], -1)).tolist() == np.full((4, 8, 3), 85).tolist()


CAPTION = image_overlays.CaptionOverlay(
  RED, ['a', 'cat'], np.eye(4).reshape(4, 2, 2)[:2], 'test 0', [None, (2, 1, 6, 3)], None, ['a cat'], [(2, 1, 6, 3)]
)


def test_a_caption_has_a_picture_for_all_words_and_one_for_each(tmp_path):
  image_overlays.write([CAPTION], tmp_path / 'page.html')
  (record,) = read_page(tmp_path / 'page.html').data
  whole, *lit = map(decode, record['frames'])
  assert np.array_equal(whole, RED) and len(lit) == 2
  assert lit[0][0, 0, 0] > lit[0][3, 7, 0] and lit[1][0, 7, 0] > lit[1][0, 0, 0]
  box = [0.25, 0.25, 0.75, 0.75]
  assert record['boxes'] == [[box], [], [box]] and record['facts'] == ['reference: a cat']
  assert not (tmp_path / 'page.gif').exists()
  with pytest.raises(UserError, match=r'a\.svg: expected a path that ends with \.html or \.png'):
    image_overlays.write([CAPTION], tmp_path / 'a.svg')


GLIMPSES = glimpse_paths.GlimpsePath(np.zeros((8, 16, 1), np.uint8), np.array([[0.0, 0.0], [-0.5, 0.5]]), 'test 1')


def test_each_glimpse_has_a_place_boxes_and_a_picture_of_its_patches(tmp_path):
  glimpse_paths.write([GLIMPSES], tmp_path / 'page.html', 4, 2)
  (record,) = read_page(tmp_path / 'page.html').data
  assert record['steps'] == ['glimpse 1', 'glimpse 2'] and len(record['frames']) == 1
  assert record['path'] == [[0.5, 0.5], [0.75, 0.25]]
  boxes = [[0.375, 0.25, 0.625, 0.75], [0.625, 0, 0.875, 0.5]]
  assert record['boxes'] == [boxes, [boxes[0]], [boxes[1]]]
  assert [decode(detail).shape for detail in record['details']] == [(8, 8, 3)] * 2


def test_a_memory_has_a_table_for_each_panel(tmp_path):
  weights = np.zeros((5, 1, 8))
  weights[range(5), 0, [6, 7, 0, 1, 2]] = 1
  tape = memory_tapes.MemoryTape(np.eye(2), np.ones((3, 2)), np.full((3, 2), 0.5), {'write': weights}, 2, 'test 2')
  memory_tapes.write([tape], tmp_path / 'page.html')
  (record,) = read_page(tmp_path / 'page.html').data
  assert record['steps'] == ['input 1', 'input 2', 'answer 1', 'answer 2', 'answer 3'] and record['frames'] == []
  assert [table['title'] for table in record['tables']][2:] == ['predictions', 'write weights, slots 6 to 2']
  assert record['tables'][-1]['rows'] == ['6', '7', '0', '1', '2']
  assert record['tables'][-1]['values'] == np.eye(5).tolist()


@pytest.mark.packaging
def test_the_pages_work_in_a_browser(tmp_path):
  image_overlays.write([CAPTION._replace(title=HOSTILE), CAPTION], tmp_path / 'captions.html')
  with open_page((tmp_path / 'captions.html').as_uri()) as page:
    assert page.locator('h2').text_content() == HOSTILE and page.locator('.box').count() == 1
    page.keyboard.press('n')
    assert page.locator('h2').text_content() == 'test 0'
    whole = page.locator('.picture').get_attribute('src')
    move_slider(page, 2)
    assert page.locator('#step-name').text_content() == '2 cat'
    assert page.locator('.picture').get_attribute('src') != whole
    assert page.locator('.picture').get_attribute('alt') == 'step 2 of 2: cat'
    page.locator('.token').first.hover()
    assert page.locator('.box').count() == 0
    page.mouse.move(0, 0)
    assert page.locator('.box').count() == 1 and page.locator('.token.current').text_content() == 'cat'
  glimpse_paths.write([GLIMPSES], tmp_path / 'glimpses.html', 4, 2)
  with open_page((tmp_path / 'glimpses.html').as_uri()) as page:
    assert page.locator('.number').count() == 2 and page.locator('.detail').is_hidden()
    move_slider(page, 1)
    assert page.locator('.number').count() == 1 and page.locator('.detail').is_visible()
  inputs = np.random.default_rng(0).integers(0, 2, (51, 10))
  weights = np.random.default_rng(1).dirichlet(np.ones(60), (101, 2))
  tape = memory_tapes.MemoryTape(
    inputs, inputs[:50], np.full((50, 10), 0.5), {'write': weights, 'read': weights}, len(inputs)
  )
  memory_tapes.write([tape] * 4, tmp_path / 'memories.html')
  with open_page((tmp_path / 'memories.html').as_uri()) as page:
    start = page.evaluate('performance.now()')
    move_slider(page, 20)
    assert page.evaluate('performance.now()') - start < 10_000
    assert 'step 20 of 101: input 20 · inputs: ' in page.locator('.reading').text_content()
    page.locator('.token').nth(60).focus()
    page.keyboard.press('Enter')
    assert page.locator('#step-name').text_content() == '61 answer 10'
    page.keyboard.press('d')
    assert not page.evaluate("document.documentElement.classList.contains('dark')")
