"""Processes of a sweep on a cluster, by submitit: Slurm jobs, or processes of this machine for a trial."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax.errors import UserError
from attention_jax.specs import Count, Size, bind
from attention_jax.sweeps.workers import Request

JOBS = 'jobs'  # submitit's folder below that of the sweep
LOST_STATES = ('NO PROCESS AND NO RESULT', 'UNKNOWN')  # submitit cannot report on such a job any more
DEFAULT_SLURM_JOBS = 64  # jobs in the queue of Slurm at a time


class TrainingJob(NamedTuple):
  """A job of the cluster: runs the command of a unit.

  Attributes:
    command: program and arguments.
    log: the file to which its output is appended.
    directory: the working directory.
  """

  command: tuple[str, ...]
  log: str
  directory: str

  def __call__(self) -> int:
    """Runs the command; returns its exit status."""
    with open(self.log, 'ab') as output:
      return subprocess.run(self.command, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory).returncode

  def checkpoint(self, *args: Any, **options: Any) -> Any:
    """Queues the same job again; submitit calls this before a preemption or at the end of the time limit."""
    from submitit.helpers import DelayedSubmission

    return DelayedSubmission(self)


class ClusterJob:
  """A job of submitit.

  Args:
    job: the job.
  """

  ends_with_sweep = False
  failure = ''

  def __init__(self, job: Any):
    self.record = {'job': job.job_id}
    self._job = job

  def poll(self) -> int | None:
    if not self._job.done():
      return None
    error = self._job.exception()
    if error is None:
      return self._job.result()
    # Such as TIMEOUT or OUT_OF_MEMORY of Slurm. The error itself contains the whole output of the job.
    self.failure = f'job {self._job.job_id} ended in the state {self._job.state}; see {self._job.paths.stderr}'
    return 1

  def stop(self) -> None:
    """Cancels the job."""
    self._job.cancel()


class ClusterExecutor:
  """Runs processes as jobs of submitit.

  Args:
    folder: the folder of the sweep.
    cluster: a name of submitit.AutoExecutor: 'slurm' or 'local'.
    jobs: maximum number of jobs in the queue at a time.
    parameters: submitit's parameters, such as timeout_min and slurm_partition.
  """

  def __init__(self, folder: Path, cluster: str, jobs: int, parameters: Mapping[str, Any]):
    import submitit

    self.slots = jobs
    self._cluster = cluster
    # Jobs are found again by the job class of the cluster, which an AutoExecutor does not expose.
    self._job_class = {'local': submitit.LocalJob, 'slurm': submitit.SlurmJob}[cluster]
    try:
      self._executor = submitit.AutoExecutor(folder=str(folder / JOBS), cluster=cluster)
      self._executor.update_parameters(name='ablate', **parameters)
    except (RuntimeError, NameError, TypeError, ValueError) as error:
      raise UserError(f'--cluster={cluster}: {" ".join(str(error).split())}') from error

  def start(self, requests: Sequence[Request]) -> list[ClusterJob]:
    """Submits the commands. Raises UserError if the cluster rejects them, such as for an unknown partition."""
    from submitit.core.utils import FailedJobError

    try:
      with self._executor.batch():  # one job array
        jobs = [
          self._executor.submit(TrainingJob(tuple(request.command), str(request.log), os.getcwd()))
          for request in requests
        ]
    except FailedJobError as error:
      raise UserError(f'--cluster={self._cluster}: {" ".join(str(error).split())}') from error
    return [ClusterJob(job) for job in jobs]

  def find(self, record: Mapping[str, Any]) -> ClusterJob | None:
    if 'job' not in record:
      return None
    job = self._job_class(folder=self._executor.folder, job_id=record['job'])
    return None if job.state in LOST_STATES else ClusterJob(job)


def slurm(
  *,
  jobs: Size = DEFAULT_SLURM_JOBS,
  timeout_min: Size = 240,
  cpus_per_task: Size = 4,
  mem_gb: Size = 16,
  gpus_per_node: Count = 0,
  partition: str = '',
  account: str = '',
  constraint: str = '',
  setup: tuple[str, ...] = (),
) -> tuple[str, int, dict[str, Any]]:
  """Jobs of Slurm; all options but `jobs` are parameters of submitit.

  Args:
    jobs: maximum number of jobs in the queue at a time.
    timeout_min: time limit of a job, minutes.
    cpus_per_task: CPU cores of a job.
    mem_gb: memory of a job, GB.
    gpus_per_node: GPUs of a job; 0 for none.
    partition, account, constraint: the options of sbatch with these names; '' leaves one out.
    setup: shell commands that the job runs before the command of a unit.

  Returns:
    'slurm', `jobs`, and the parameters of submitit.
  """
  parameters = {
    'timeout_min': timeout_min,
    'cpus_per_task': cpus_per_task,
    'mem_gb': mem_gb,
    'gpus_per_node': gpus_per_node,
    'slurm_partition': partition,
    'slurm_account': account,
    'slurm_constraint': constraint,
    'slurm_setup': list(setup),
  }
  return 'slurm', jobs, {name: value for name, value in parameters.items() if value}


def local(*, jobs: Size = 1, timeout_min: Size = 240) -> tuple[str, int, dict[str, Any]]:
  """Processes of this machine as jobs, for a trial. They continue when the sweep ends, but Ctrl-C interrupts them too.

  Args:
    jobs: maximum number of processes at a time.
    timeout_min: time limit of a process, minutes.

  Returns:
    'local', `jobs`, and the parameters of submitit.
  """
  return 'local', jobs, {'timeout_min': timeout_min}


CLUSTERS: Mapping[str, Callable[..., tuple[str, int, dict[str, Any]]]] = {'local': local, 'slurm': slurm}


def parse_cluster(spec: str) -> tuple[str, int, dict[str, Any]]:
  """Returns the name of the cluster that a spec selects, its maximum number of jobs, and the parameters of submitit.

  Raises:
    UserError: as `specs.bind`.
  """
  _, function, options = bind(spec, CLUSTERS, 'cluster')
  return function(**options)


def make_executor(folder: Path, spec: str) -> ClusterExecutor:
  """Returns the executor that a spec of CLUSTERS selects: 'slurm(timeout_min=120, partition="gpu")'.

  Raises:
    UserError: as `parse_cluster`, and if submitit rejects the cluster on this machine or a parameter.
  """
  return ClusterExecutor(folder, *parse_cluster(spec))
