"""The page of readings for sources that are typed into it, served on this machine alone."""

import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from attention_jax.analysis.reading import Reading
from attention_jax.analysis.reading_page import SourceForm, render_page
from attention_jax.errors import UserError

HOST = '127.0.0.1'
MAX_LENGTH = 1000  # characters of a source, and of an edit
Read = Callable[[Sequence[str], str], Sequence[Reading]]


def make_server(read: Read, port: int, *, edit: str = '', relative: bool = False) -> ThreadingHTTPServer:
  """Returns a server of the page, which is bound to HOST and not started yet.

  It answers GET / with the form, and GET /?text=SOURCE&edit=EDIT with the readings of a source below it. Requests whose
  host is not this machine are rejected, so that the page of another site cannot read the answers through a host name
  that resolves to this machine (DNS rebinding).

  Args:
    read: ([source], edit of its weights or '') -> readings; may raise UserError, which is shown on the page. Called for
      one source at a time.
    port: the port; 0 for any that is free.
    edit: the initial edit in the form.
    relative: as for `render_page`.

  Raises:
    UserError: if the port is in use or needs permissions.
  """
  lock = threading.Lock()

  class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
      if self.headers.get('Host', '').partition(':')[0] not in (HOST, 'localhost'):  # without a port if it is 80
        self._answer(HTTPStatus.FORBIDDEN, 'this page is served to its own machine only\n', 'text/plain')
        return
      try:
        url = urlsplit(self.path)
      except ValueError:  # such as an unclosed bracket of a host
        self._answer(HTTPStatus.BAD_REQUEST, 'the address cannot be parsed\n', 'text/plain')
        return
      if url.path != '/':
        self._answer(HTTPStatus.NOT_FOUND, 'the page is at /\n', 'text/plain')
        return
      fields = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
      with lock:
        page = _render(read, fields.get('text', ''), fields.get('edit', '' if fields else edit), relative)
      self._answer(HTTPStatus.OK, page, 'text/html')

    def _answer(self, status: HTTPStatus, text: str, content_type: str) -> None:
      data = text.encode()
      self.send_response(status)
      self.send_header('Content-Type', f'{content_type}; charset=utf-8')
      self.send_header('Content-Length', str(len(data)))
      self.send_header('X-Content-Type-Options', 'nosniff')
      with contextlib.suppress(ConnectionError):  # the browser may have been closed, or the page reloaded, meanwhile
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
      """Logs nothing: the text that a user enters is not stored."""

  try:
    return ThreadingHTTPServer((HOST, port), Handler)
  except OSError as error:
    reason = 'is in use' if error.errno == errno.EADDRINUSE else f'cannot be used ({error.strerror})'
    raise UserError(f'port {port} of {HOST} {reason}; choose another --port') from None


def serve(read: Read, port: int, *, edit: str = '', relative: bool = False) -> None:
  """Serves the page until interrupted; prints its address. Arguments and errors are those of `make_server`."""
  with make_server(read, port, edit=edit, relative=relative) as server:
    print(f'serving http://{HOST}:{server.server_port}/ until interrupted (Ctrl+C)', flush=True)
    server.serve_forever()


def _render(read: Read, text: str, edit: str, relative: bool) -> str:
  """The page for one source; without a source, the form alone."""
  readings: Sequence[Reading] = []
  error = ''
  if (length := max(len(text), len(edit))) > MAX_LENGTH:
    error = f'a source and an edit must have at most {MAX_LENGTH} characters each, got {length}'
  elif text.strip():
    try:
      readings = read([text], edit.strip())
    except UserError as user_error:
      error = ' '.join(user_error.lines)
  return render_page(readings, relative, SourceForm(text, edit, error, MAX_LENGTH))
