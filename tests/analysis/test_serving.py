"""The server of the page of readings: the form, its answers, and what it rejects."""

import contextlib
import http.client
import socket
import struct
import sys
import threading
from urllib.parse import quote

import pytest

from attention_jax.analysis.serving import HOST, MAX_LENGTH, make_server
from attention_jax.errors import UserError
from tests.analysis.helpers import HOSTILE, Page, open_page
from tests.analysis.test_reading import READING


def read(texts, edit):
  (text,) = texts
  if 'wrong' in text:
    raise UserError(f'no output for {text!r}')
  return [READING._replace(source=text, name=text, run=edit)]


@pytest.fixture
def port():
  with make_server(read, 0, edit='largest') as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()


def get(port: int, path: str, host: str = ''):
  """Returns status and text of an answer."""
  with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=20)) as connection:
    connection.request('GET', path, headers={'Host': host or f'localhost:{port}'})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.long
def test_a_typed_source_and_edit_are_answered(port):
  def page_of(path):
    status, text = get(port, path)
    assert status == 200
    return Page(text)

  assert page_of('/').ids == {'source-form'} and field(page_of('/'), 'edit') == 'largest'
  page = page_of(f'/?text={quote("5 марта")}')
  assert {'source-form', 'controls', 'panels'} <= page.ids
  assert page.data[0]['readings'][0]['source'] == '5 марта'
  assert field(page, 'text') == '5 марта' and field(page, 'edit') == ''
  page = page_of(f'/?text=a&edit={quote("uniform(head=1)")}')
  assert field(page, 'edit') == 'uniform(head=1)' and page.data[0]['name'] == 'uniform(head=1)'
  assert field(page_of('/?text=&edit='), 'edit') == ''  # the form without a source and without the edit


def field(page: Page, name: str) -> str:
  """Returns the value of a field of the form."""
  return next(attributes for _, attributes in page.tags if attributes.get('name') == name)['value']


def test_hostile_text_stays_text(port):
  for text in (HOSTILE, f'wrong {HOSTILE}'):
    _, answer = get(port, f'/?text={quote(text)}&edit={quote(HOSTILE)}')
    page = Page(answer)
    assert 'img' not in {tag for tag, _ in page.tags}
    assert field(page, 'text') == text and field(page, 'edit') == HOSTILE


def test_mistakes_are_shown_on_the_page(port):
  messages = {'wrong': 'no output for &#39;wrong&#39;', 'a' * 1001: f'at most {MAX_LENGTH} characters'}
  for source, message in messages.items():
    status, text = get(port, f'/?text={source}')
    assert status == 200 and message in text


def test_other_paths_and_other_hosts_are_rejected(port):
  assert get(port, '/favicon.ico')[0] == 404
  assert get(port, 'http://[/')[0] == 400
  for host in ('example.org', f'example.org:{port}', 'localhost.example.org'):
    assert get(port, '/?text=a', host)[0] == 403
  for host in ('localhost', HOST):  # browsers leave out port 80
    assert get(port, '/', host)[0] == 200


def test_a_closed_connection_is_no_error(monkeypatch):
  is_reading = threading.Event()
  is_closed = threading.Event()
  errors = []

  def read_slowly(texts, edit):
    is_reading.set()
    is_closed.wait(20)
    return []

  with make_server(read_slowly, 0) as server:
    monkeypatch.setattr(server, 'daemon_threads', False)  # closing the server waits for the answer
    monkeypatch.setattr(server, 'handle_error', lambda *arguments: errors.append(sys.exception()))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with socket.create_connection((HOST, server.server_port)) as connection:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))  # closed by a reset
      connection.sendall(b'GET /?text=a HTTP/1.1\r\nHost: localhost:1\r\n\r\n')
      assert is_reading.wait(20)
    is_closed.set()
    server.shutdown()
    thread.join()
  assert not errors


def test_a_port_in_use_is_reported_in_one_line(port):
  with pytest.raises(UserError, match=f'^port {port} of 127.0.0.1 is in use; choose another --port$'):
    make_server(read, port)


@pytest.mark.packaging
def test_the_page_answers_in_a_browser(port):
  with open_page(f'http://localhost:{port}/') as page:
    page.keyboard.type('5 марта')  # the field of the source has the focus
    page.fill('input[name=edit]', 'uniform(head=1)')
    page.keyboard.press('Enter')
    page.wait_for_selector('.panel')
    assert page.locator('h2').text_content() == 'uniform(head=1)'
    assert page.input_value('input[name=text]') == '5 марта'
    page.fill('input[name=text]', 'wrong')
    page.keyboard.press('Enter')
    page.wait_for_selector('#error')
    assert page.locator('#error').text_content() == "no output for 'wrong'"
