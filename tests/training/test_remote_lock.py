"""The lock of a folder behind a URL is exclusive, renewed, and expires."""

import os
import socket
import time

import pytest
from attention_jax.training.remote_files import RemoteFiles
from attention_jax.training.remote_lock import LOCK, RemoteLock, process_table

from attention_jax.errors import UserError


def test_a_lock_is_exclusive_and_renewed(url):
  files = RemoteFiles(url)
  with RemoteLock(files, print, renewal=0.05, lease=0.5) as lock:
    lines = []
    with pytest.raises(UserError, match=rf'process {os.getpid()} of {socket.gethostname()} trains in it; choose'):
      RemoteLock(files, lines.append, renewal=0.05, lease=2).__enter__()
    assert lines[0].endswith('has locked it; waiting 2 s for a renewal')
    lock.check()
    files.write_json(LOCK, {'owner': 'another', 'host': 'b', 'pid': 7, 'time': time.time()})
    with pytest.raises(UserError, match=r'process 7 of b trains in it; this process has lost its lock'):
      lock.check()
  assert files.read_json(LOCK)['owner'] == 'another'  # the lock of the other process is not removed


def test_a_removed_lock_names_no_other_process(url):
  files = RemoteFiles(url)
  with RemoteLock(files, print, renewal=60) as lock:
    files.remove(LOCK)
    with pytest.raises(UserError, match=rf'^{url}: lock\.json was removed; this process has lost its lock$'):
      lock.check()


@pytest.mark.parametrize(
  ('table', 'pid', 'age', 'is_awaited'),  # Linux has no pid above 2**22
  [('b', 7, 0, True), ('b', 7, 1e4, False), ('b', 2**22 + 1, 0, True), (process_table(), 2**22 + 1, 0, False)],
  ids=['a lost machine', 'long ago', 'a container of the same host name', 'a process of this machine that has ended'],
)
def test_the_lock_of_a_lost_process_expires(url, table, pid, age, is_awaited):
  files = RemoteFiles(url)
  record = {'owner': 'another', 'host': socket.gethostname(), 'pid': pid, 'process_table': table}
  files.write_json(LOCK, record | {'time': time.time() - age})
  lines = []
  with RemoteLock(files, lines.append, renewal=0.05, lease=1) as lock:
    lock.check()
  assert len(lines) == is_awaited and files.read_json(LOCK) is None
