"""Joins the processes that run a program together; when one of them is lost, the others end."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax
from absl import flags
from jax._src import distributed  # `jax.distributed` has no request to another process

from attention_jax.errors import UserError

FLAGS = flags.FLAGS
LOST_CONNECTION_ERRORS = ('Gloo', 'NCCL', 'Connection closed by peer', 'Connection reset by peer', 'Socket closed')


def define_distributed_flags() -> None:
  """Defines the flags of programs that several processes may run together."""
  flags.DEFINE_bool('distributed', False, 'train with several processes of a cluster that jax detects')
  flags.DEFINE_string('coordinator', None, 'train with several processes: HOST:PORT of process 0, a free port')
  flags.DEFINE_integer('processes', None, 'number of processes, for --coordinator', lower_bound=1)
  flags.DEFINE_integer('process', None, 'index of this process from 0, for --coordinator', lower_bound=0)
  flags.DEFINE_integer(
    'peer_timeout', 100, 'seconds after which a process ends if another one has not arrived or is lost', lower_bound=5
  )


@contextlib.contextmanager
def several_processes() -> Iterator[None]:
  """Runs its block in processes that work together, if the flags of `define_distributed_flags` request that.

  When a process is killed or stops responding, jax aborts the others after --peer_timeout seconds with a message that
  names it, or at once if process 0 is killed. If process 0 stops responding, a line of `_watch_first` names it.

  Raises:
    UserError: for flags that are missing or contradict each other, for a cluster that jax does not detect, and for a
      coordinator that cannot be started.
  """
  if not (_uses_coordinator() or FLAGS.distributed):
    yield
    return
  _initialize(FLAGS.peer_timeout)
  if jax.process_index() > 0:
    threading.Thread(target=_watch_first, args=[FLAGS.peer_timeout], daemon=True).start()
  try:
    yield
  except Exception as error:
    if jax.process_count() > 1 and any(text in str(error) for text in LOST_CONNECTION_ERRORS):
      _await_abort(error)
    raise


def _uses_coordinator() -> bool:
  """Returns whether --coordinator, --processes and --process are set.

  Raises:
    UserError: if only some of them are set, and for a value that is not valid.
  """
  values = {name: FLAGS[name].value for name in ('coordinator', 'processes', 'process')}
  missing = [name for name, value in values.items() if value is None]
  if len(missing) == len(values):
    return False
  if missing:
    raise UserError(f'--{missing[0]} is missing; --coordinator, --processes and --process are set together')
  if FLAGS.process >= FLAGS.processes:
    raise UserError(f'--process must be less than --processes={FLAGS.processes}, got {FLAGS.process}')
  host, _, port = FLAGS.coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise UserError(f'--coordinator must be HOST:PORT with a port from 1 to 65535, got {FLAGS.coordinator!r}')
  if FLAGS.process == 0:
    _check_port(int(port))
  return True


def _check_port(port: int) -> None:
  """Raises UserError if this machine cannot listen at a port, for which jax would end with a segmentation fault."""
  with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a process that has ended is free
    try:
      server.bind(('', port))
    except OSError as error:
      raise UserError(
        f'--coordinator={FLAGS.coordinator}: process 0 cannot listen at port {port} ({error.strerror}); '
        'expected a free port'
      ) from None


def _initialize(timeout: int) -> None:
  timer = threading.Timer(timeout, _exit_alone, [timeout])
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      FLAGS.coordinator,
      FLAGS.processes,
      FLAGS.process,
      initialization_timeout=timeout + 30,  # the timer is first; jax would abort with a stack trace
      heartbeat_timeout_seconds=timeout,
      shutdown_timeout_seconds=timeout,
    )
  except (ValueError, RuntimeError) as error:
    reason = ' '.join(str(error).split())[:200]
    if FLAGS.coordinator:
      raise UserError(
        f'--coordinator={FLAGS.coordinator}: {reason}; expected HOST:PORT of process 0, a free port'
      ) from error
    remedy = 'it needs a cluster that jax detects, such as Slurm or a TPU, or --coordinator, --processes and --process'
    raise UserError(f'--distributed: {reason}; {remedy}') from error
  finally:
    timer.cancel()


def _watch_first(timeout: int) -> None:
  """Reports that process 0 does not answer, before jax aborts this process with a message that does not name it.

  Args:
    timeout: seconds after which jax aborts at the latest; in half of them at the earliest.
  """
  while (client := distributed.global_state.client) is not None:  # until jax is shut down
    timer = threading.Timer(timeout / 4, _report_silence, [timeout])
    timer.daemon = True
    timer.start()
    try:
      client.key_value_dir_get('attention_jax')  # process 0 stores these values, of which there are none
    except jax.errors.JaxRuntimeError:  # jax has been shut down, or reports the lost process itself
      return
    finally:
      timer.cancel()
    time.sleep(timeout / 10)


def _report_silence(timeout: int) -> None:
  print(
    f'error: process {jax.process_index()} of {jax.process_count()} has had no answer from process 0 for '
    f'{timeout / 4:g} s; it ends after {timeout} s without one (--peer_timeout)',
    file=sys.stderr,
    flush=True,
  )


def _exit_alone(timeout: int) -> None:
  """Ends this process because not all of the others have arrived."""
  name = 'this process' if FLAGS.process is None else f'process {FLAGS.process} of {FLAGS.processes}'
  address = FLAGS.coordinator or os.environ.get('JAX_COORDINATOR_ADDRESS', 'the coordinator')
  start = (
    'one process for each index with the same --coordinator' if FLAGS.coordinator else 'all processes of the cluster'
  )
  print(
    f'error: {name} has waited {timeout} s at {address} for {_absent_processes()}; '
    f'start {start}, or raise --peer_timeout',
    file=sys.stderr,
    flush=True,
  )
  os._exit(2)


def _absent_processes() -> str:
  if FLAGS.process is None or FLAGS.processes != 2:
    return 'the other processes, at least one of which did not arrive'
  return f'process {1 - FLAGS.process}, which did not arrive'


def _await_abort(error: Exception) -> None:
  """Reports a lost connection, and waits until jax aborts this process with a message that names the lost one."""
  print(
    f'error: process {jax.process_index()} of {jax.process_count()} has lost the connection to another one, which jax '
    f'names within {FLAGS.peer_timeout} s: {" ".join(str(error).split())[:200]}',
    file=sys.stderr,
    flush=True,
  )
  time.sleep(FLAGS.peer_timeout + 5)
