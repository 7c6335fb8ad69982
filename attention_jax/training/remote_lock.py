"""The lock of a run folder behind a URL: a file that its owner renews, so that the lock of a lost machine expires."""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_jax.errors import UserError
from attention_jax.training.remote_files import RemoteFiles

LOCK = 'lock.json'
RENEWAL = 15.0  # seconds between two renewals
LEASE = 60.0  # seconds without renewal after which a lock has expired
ABANDONED = 600.0  # seconds without renewal, by the clocks of both machines, after which a lock is taken at once


class LostLockError(UserError):
  """The lock file names another process, or does not exist any more."""


class RemoteLock:
  """Exclusive ownership of a folder behind a URL, as a context manager.

  Args:
    files: the folder.
    log: called with a line when the lock of another process has to expire first.
    renewal: seconds between two renewals.
    lease: seconds without renewal after which the lock of another process has expired.

  Raises:
    UserError: on entering, if another process holds the lock and renews it, or if the lock cannot be read or written.
  """

  def __init__(self, files: RemoteFiles, log: Callable[[str], None], renewal: float = RENEWAL, lease: float = LEASE):
    self._files = files
    self._log = log
    self._renewal = renewal
    self._lease = lease
    self._record = {
      'owner': uuid.uuid4().hex,
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'process_table': process_table(),
    }
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='remote lock', daemon=True)

  def __enter__(self) -> 'RemoteLock':
    self._wait_for_expiry()
    self._write()
    self.check()  # of two processes that found no lock, the one that wrote last owns it
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._stop.set()
    self._thread.join()
    with contextlib.suppress(UserError):  # a lock that cannot be removed expires
      if self._is_mine(self._files.read_json(LOCK)):
        self._files.remove(LOCK)

  def check(self) -> None:
    """Raises LostLockError if this process has lost the lock, or UserError if the lock file cannot be read."""
    record = self._files.read_json(LOCK)
    if record is None:
      raise LostLockError(f'{self._files.url}: {LOCK} was removed; this process has lost its lock')
    if not self._is_mine(record):
      raise LostLockError(f'{self._files.url}: {_describe(record)} trains in it; this process has lost its lock')

  def _wait_for_expiry(self) -> None:
    """Returns when no process owns the lock; raises UserError if its owner renews it in the meantime."""
    record = self._files.read_json(LOCK)
    if record is None or _is_abandoned(record):
      return
    self._log(f'{self._files.url}: {_describe(record)} has locked it; waiting {self._lease:.0f} s for a renewal')
    deadline = time.monotonic() + self._lease
    while time.monotonic() < deadline:
      time.sleep(self._renewal / 4)
      now = self._files.read_json(LOCK)
      if now is None:
        return
      if now != record:
        raise UserError(f'{self._files.url}: {_describe(now)} trains in it; choose another folder')

  def _write(self) -> None:
    self._files.write_json(LOCK, self._record | {'time': time.time()})

  def _is_mine(self, record: dict[str, Any] | None) -> bool:
    return record is not None and record.get('owner') == self._record['owner']

  def _renew(self) -> None:
    while not self._stop.wait(self._renewal):
      try:
        if not self._is_mine(self._files.read_json(LOCK)):
          return
        self._write()
      except UserError:  # the network: `check` reports a lock that was lost meanwhile
        continue


def _describe(record: dict[str, Any]) -> str:
  """Names the owner of a lock by process and host: 'process 12 of example.org'."""
  return f'process {record.get("pid")} of {record.get("host")}'


def process_table() -> str:
  """Returns an identifier of the process table of this machine or container, in which a pid names one process.

  On Linux it is not the host name, which several containers or machines may share.
  """
  try:
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:  # not Linux
    return socket.gethostname()


def _is_abandoned(record: dict[str, Any]) -> bool:
  """Whether the owner of a lock is known to have ended, or has not renewed it for ABANDONED seconds."""
  if time.time() - record.get('time', 0) > ABANDONED:
    return True
  if record.get('process_table') != process_table():
    return False
  try:
    os.kill(int(record['pid']), 0)
    return False
  except (ProcessLookupError, ValueError, KeyError):
    return True
  except OSError:  # a process of another user
    return False
