"""A bucket of Google Cloud Storage for tests: `python -m tests.gcs_server PORT FOLDER` serves the bucket `bucket`.

It is gcp-storage-emulator, which keeps its objects in FOLDER, with what that lacks: generations in the headers of
downloads, requests that fail because of the generation of their object, and buckets without permission: the bucket
`read-only` may be read, `forbidden` not even that, and `private` needs credentials.
"""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from http import HTTPStatus
from pathlib import Path

BUCKET = 'bucket'
READ_ONLY = 'read-only'
DENIED = {READ_ONLY: HTTPStatus.FORBIDDEN, 'forbidden': HTTPStatus.FORBIDDEN, 'private': HTTPStatus.UNAUTHORIZED}
ROOT = Path(__file__).parents[1]


def _generation(storage, bucket: str, name: str) -> int:
  """The generation of an object; 0 if it does not exist."""
  from gcp_storage_emulator.exceptions import NotFound

  try:
    return int(storage.get_file_obj(bucket, name)['generation'])
  except NotFound:
    return 0


def _with_generations(handle):
  """A handler of requests that checks the conditions on generations, and returns the generation of a download."""

  def handle_conditionally(request, response, storage, *args, **kwargs):
    name = request.params.get('object_id') or request.query.get('name', [None])[0] or request.data['meta']['name']
    generation = _generation(storage, request.params['bucket_name'], name)
    expected = request.query.get('ifGenerationMatch')
    excluded = request.query.get('ifGenerationNotMatch')
    if expected and int(expected[0]) != generation:
      response.status = HTTPStatus.PRECONDITION_FAILED
    elif excluded and int(excluded[0]) == generation:
      response.status = HTTPStatus.NOT_MODIFIED if request.method == 'GET' else HTTPStatus.PRECONDITION_FAILED
    else:
      handle(request, response, storage, *args, **kwargs)
      response['x-goog-generation'] = str(_generation(storage, request.params['bucket_name'], name))

  return handle_conditionally


def _with_permissions(handle):
  """A handler of requests that denies those for which a bucket needs a permission."""

  def handle_permitted(request, response, storage, *args, **kwargs):
    bucket = request.params.get('bucket_name')
    if bucket in DENIED and not (bucket == READ_ONLY and request.method == 'GET'):
      response.status = DENIED[bucket]
      response.json({'error': {'code': response.status, 'message': 'the caller has no storage access'}})
    else:
      handle(request, response, storage, *args, **kwargs)

  return handle_permitted


def _refuse(request, response, storage):
  """gcsfs then copies and deletes at once; an unknown request it would repeat for half a minute."""
  response.status = HTTPStatus.BAD_REQUEST


def serve(port: int, folder: str) -> None:
  """Serves until the process is killed."""
  from gcp_storage_emulator import server
  from gcp_storage_emulator.handlers import buckets, objects

  logging.disable()
  conditional = {
    handle: _with_generations(handle) for handle in (objects.insert, objects.get, objects.download, objects.delete)
  }
  for _, handlers in server.HANDLERS:
    handlers |= {method: _with_permissions(conditional.get(handle, handle)) for method, handle in handlers.items()}
  objects.insert = conditional[objects.insert]
  server.HANDLERS = ((r'.*/moveTo/o/.*', {'POST': _refuse}), *server.HANDLERS)
  Path(folder).mkdir(parents=True, exist_ok=True)
  emulator = server.create_server('127.0.0.1', port, in_memory=False, default_bucket=BUCKET, data_dir=folder)
  buckets.create_bucket(READ_ONLY, emulator._storage)
  emulator.start()
  signal.pause()


class Server:
  """A server in a process of its own, which may be stopped and started again; a context manager.

  Args:
    folder: the folder of its objects.
  """

  def __init__(self, folder: Path):
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      self._port = probe.getsockname()[1]
    self.folder = folder
    self.url = f'http://127.0.0.1:{self._port}'

  def start(self) -> None:
    command = [sys.executable, '-m', 'tests.gcs_server', str(self._port), str(self.folder)]
    self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while True:
      with contextlib.suppress(ConnectionError), socket.create_connection(('127.0.0.1', self._port)):
        return
      assert self._process.poll() is None
      time.sleep(0.05)

  def stop(self) -> None:
    self._process.kill()
    self._process.wait()

  def __enter__(self) -> 'Server':
    self.start()
    return self

  def __exit__(self, *error) -> None:
    self.stop()


def environment(url: str) -> dict[str, str]:
  """The environment variables with which gcsfs, google-cloud-storage, tensorstore and ArrayRecord use a server."""
  return {
    'STORAGE_EMULATOR_HOST': url,
    'TENSORSTORE_GCS_HTTP_URL': url,
    'CLOUD_STORAGE_EMULATOR_ENDPOINT': url,
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # it asks for credentials to find the kind of the bucket
  }


if __name__ == '__main__':
  serve(int(sys.argv[1]), sys.argv[2])
