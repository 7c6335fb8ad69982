"""Helpers for pages of attention: their tags and data, checks of every page, and a browser that opens them."""

import contextlib
import json
from html.parser import HTMLParser

import pytest

HOSTILE = '</script><img src=x onerror=alert(1)>&"\'{{ 7 * 7 }}'


class Page(HTMLParser):
  """Tags with their attributes, and the text inside of each script."""

  def __init__(self, text):
    super().__init__()
    self.tags = []
    self.scripts = []
    self.is_in_script = False
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    self.is_in_script = tag == 'script'

  def handle_endtag(self, tag):
    self.is_in_script = False

  def handle_data(self, data):
    if self.is_in_script:
      self.scripts.append(data)

  @property
  def data(self):
    return json.loads(self.scripts[0])

  @property
  def ids(self):
    return {attributes['id'] for _, attributes in self.tags if 'id' in attributes}


def check_page(page: Page) -> None:
  """Checks that a page loads nothing, never assigns innerHTML, and has every element whose id its script reads."""
  assert not [attributes for _, attributes in page.tags if {'src', 'href'} & attributes.keys()]
  policy = next(a['content'] for _, a in page.tags if a.get('http-equiv') == 'Content-Security-Policy')
  assert policy.startswith("default-src 'none'")
  script = page.scripts[-1]
  assert 'innerHTML' not in script and 'http' not in script.replace('http://www.w3.org/2000/svg', '')
  script_ids = {part.partition("')")[0] for part in script.split("byId('")[1:]}
  assert script_ids <= page.ids and {'example', 'step', 'step-name', 'theme', 'panels'} <= script_ids


@contextlib.contextmanager
def open_page(address: str):
  """Opens a page in Chromium in dark colours; fails for console messages, errors and requests to other addresses.

  Needs the package playwright, without which the test is skipped, and Debian's chromium in /usr/bin.
  """
  playwright = pytest.importorskip('playwright.sync_api')
  problems = []
  scheme = address.partition('//')[0]
  allowed = ('data:', address if scheme == 'file:' else '/'.join(address.split('/')[:3]))
  with playwright.sync_playwright() as browsers:
    browser = browsers.chromium.launch(executable_path='/usr/bin/chromium', args=['--no-sandbox'])
    page = browser.new_page(color_scheme='dark')
    page.on('console', lambda message: problems.append(message.text))
    page.on('pageerror', lambda error: problems.append(str(error)))
    page.on('request', lambda request: None if request.url.startswith(allowed) else problems.append(request.url))
    page.goto(address)
    yield page
    browser.close()
  assert problems == []


def move_slider(page, steps: int) -> None:
  """Presses the right arrow on the slider of steps, then removes the focus from it."""
  page.locator('#step').focus()
  for _ in range(steps):
    page.keyboard.press('ArrowRight')
  page.locator('#step').evaluate('node => node.blur()')
