"""Processes of a sweep: the interface of executors and jobs, and the executor for this machine."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import filelock

from attention_jax.errors import UserError, choose
from attention_jax.training.folder import LOCK
from attention_jax.training.threads import usable_cores

CHILD = Path(__file__).with_name('child.py')
KILL_AFTER = 300.0  # seconds that an interrupted process has to save its checkpoint
DETECT_DEVICES = 'import jax; print(jax.default_backend(), jax.local_device_count())'


class Job(Protocol):
  """A running process of a sweep.

  Attributes:
    record: what the ledger stores of it, to find it again.
    ends_with_sweep: whether it must be stopped with the process of the sweep; otherwise it continues on its own.
    failure: the reason of a failure that its log does not show, such as a time limit of the cluster; otherwise ''.
  """

  record: Mapping[str, Any]
  ends_with_sweep: bool
  failure: str

  def poll(self) -> int | None:
    """Returns the exit status, negative for a signal; None while it runs."""

  def stop(self) -> None:
    """Requests that the job saves its state and ends."""


class Request(NamedTuple):
  """A command to start.

  Attributes:
    command: program and arguments.
    log: the file to which its output is appended.
  """

  command: Sequence[str]
  log: Path


class Executor(Protocol):
  """Starts the processes of a sweep, on this machine or on a cluster.

  Attributes:
    slots: number of processes at a time.
  """

  slots: int

  def start(self, requests: Sequence[Request]) -> Sequence[Job]:
    """Starts commands; the caller passes at most as many as there are slots without a running job."""

  def find(self, record: Mapping[str, Any]) -> Job | None:
    """Returns the job of a record that an earlier process wrote, or None if it cannot be found."""


class Resources(NamedTuple):
  """The cores or devices that one process is pinned to.

  Attributes:
    cores: cores of the machine; () for all.
    variables: environment variables.
  """

  cores: tuple[int, ...] = ()
  variables: Mapping[str, str] = {}


def _cores(ids: Sequence[int]) -> Resources:
  return Resources(cores=tuple(ids))


def _gpus(ids: Sequence[int]) -> Resources:
  visible = os.environ.get('CUDA_VISIBLE_DEVICES')  # jax numbers the visible devices from 0
  names = visible.split(',') if visible else {i: str(i) for i in ids}
  return Resources(variables={'CUDA_VISIBLE_DEVICES': ','.join(names[i] for i in ids)})


def _tpu_chips(ids: Sequence[int]) -> Resources:
  bounds = f'1,{len(ids)},1'
  return Resources(
    variables={
      'TPU_VISIBLE_CHIPS': ','.join(map(str, ids)),
      'TPU_CHIPS_PER_PROCESS_BOUNDS': bounds,
      'TPU_PROCESS_BOUNDS': '1,1,1',
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    }
  )


# backend of jax -> ids of cores or devices -> resources. The row 'tpu' follows the variables of libtpu; it is untested.
PINNING: Mapping[str, Callable[[Sequence[int]], Resources]] = {'cpu': _cores, 'gpu': _gpus, 'tpu': _tpu_chips}


def divide_resources(workers: int, backend: str, ids: Sequence[int]) -> list[Resources]:
  """Divides cores or devices among workers, in order; one worker gets all of them without being pinned.

  Args:
    workers: number of processes at a time.
    backend: a key of PINNING.
    ids: the cores or devices.

  Raises:
    UserError: for fewer than one worker; for several, if the backend is unknown or has fewer cores or devices.
  """
  if workers < 1:
    raise UserError(f'--workers must be at least 1, got {workers}')
  if workers == 1:
    return [Resources()]
  pin = PINNING[choose(backend, PINNING, 'backend')]
  if workers > len(ids):
    unit = 'cores' if backend == 'cpu' else 'devices'
    raise UserError(f'--workers={workers}: this machine has {len(ids)} {unit}; expected at most one worker for each')
  bounds = [round(worker * len(ids) / workers) for worker in range(workers + 1)]
  return [pin(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]


def detect_devices() -> tuple[str, list[int]]:
  """Returns the backend of jax, and the ids of the cores or devices that processes can be pinned to.

  Runs jax in a subprocess, because it would keep the memory of an accelerator in the calling process.

  Raises:
    UserError: if the subprocess fails, for example because jax finds no device.
  """
  result = subprocess.run([sys.executable, '-c', DETECT_DEVICES], capture_output=True, text=True)
  if result.returncode:
    lines = result.stderr.strip().splitlines()
    reason = lines[-1] if lines else f'its process ended with exit status {result.returncode}'
    raise UserError(f'jax cannot list its devices (JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")!r}): {reason}')
  backend, count = result.stdout.split()
  if backend == 'cpu':
    return backend, usable_cores()
  return backend, [*range(int(count))]


class LocalJob:
  """A process on this machine.

  Args:
    process: the process.
    release: called once when it has ended.
  """

  ends_with_sweep = True
  failure = ''

  def __init__(self, process: subprocess.Popen, release: Callable[[], None]):
    self.record = {'pid': process.pid}
    self._process = process
    self._release = release
    self._is_released = False
    self._kill_at = float('inf')

  def poll(self) -> int | None:
    code = self._process.poll()
    if code is None and time.monotonic() > self._kill_at:
      self._process.kill()
    if code is not None and not self._is_released:
      self._is_released = True
      self._release()
    return code

  def stop(self) -> None:
    if self._process.poll() is None:
      self._process.terminate()
      self._kill_at = time.monotonic() + KILL_AFTER


class LocalExecutor:
  """Runs processes on this machine; on Linux they end with this process.

  Args:
    resources: what each slot is pinned to.
  """

  def __init__(self, resources: Sequence[Resources]):
    self.slots = len(resources)
    self._free = list(resources)

  def start(self, requests: Sequence[Request]) -> list[LocalJob]:
    return [self._start(request) for request in requests]

  def _start(self, request: Request) -> LocalJob:
    resources = self._free.pop(0)
    cores = ','.join(map(str, resources.cores))
    command = [sys.executable, str(CHILD), str(os.getpid()), cores, *request.command]
    with open(request.log, 'ab') as output:
      process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | {'PYTHONUNBUFFERED': '1'} | dict(resources.variables),
        start_new_session=True,  # a Ctrl-C reaches this process alone, which passes it on
      )
    return LocalJob(process, lambda: self._free.append(resources))

  def find(self, record: Mapping[str, Any]) -> Job | None:
    return None  # on Linux, processes end with the one that started them; elsewhere they are not searched for


def is_training(folder: Path) -> bool:
  """Returns whether another process holds the lock of a run folder, for example to save its last checkpoint.

  On a file system without locks, where `lock_folder` has logged that it takes none, the answer is False.
  """
  if not (folder / LOCK).exists():
    return False
  lock = filelock.FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
  try:
    lock.acquire()
  except filelock.Timeout:
    return True
  except (NotImplementedError, OSError):
    return False
  lock.release()
  return False
