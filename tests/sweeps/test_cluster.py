"""Processes of a sweep as jobs of submitit: run by its local executor, or rejected by Slurm."""

import os
import sys
import time

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.cluster import ClusterJob, TrainingJob, make_executor, slurm
from attention_jax.sweeps.workers import Request


def wait(job, seconds=60.0):
  stop = time.monotonic() + seconds
  while job.poll() is None:
    assert time.monotonic() < stop, 'the job does not end'
    time.sleep(0.05)
  return job.poll()


def test_jobs_run_append_their_output_and_return_their_status(tmp_path):
  executor = make_executor(tmp_path, 'local(jobs=2, timeout_min=5)')
  assert executor.slots == 2
  code = 'import os, sys; print(os.getcwd()); sys.exit(int(sys.argv[1]))'
  logs = [tmp_path / f'log{status}' for status in (0, 3)]
  for log in logs:
    log.write_text('before\n')
  jobs = executor.start([Request([sys.executable, '-c', code, log.name[-1]], log) for log in logs])
  assert [wait(job) for job in jobs] == [0, 3]
  assert all(log.read_text() == f'before\n{os.getcwd()}\n' for log in logs)
  assert not jobs[0].ends_with_sweep
  found = executor.find(dict(jobs[0].record))
  assert isinstance(found, ClusterJob) and found.poll() == 0


@pytest.mark.long
def test_a_job_that_is_killed_names_its_state(tmp_path):
  executor = make_executor(tmp_path, 'local(timeout_min=5)')
  code = 'import os, signal, sys; os.kill(os.getppid(), signal.SIGKILL)'  # the process of submitit
  (job,) = executor.start([Request([sys.executable, '-c', code], tmp_path / 'log')])
  assert job.failure == '' and wait(job) == 1
  number = job.record['job']
  assert job.failure.startswith(f'job {number} ended in the state ') and job.failure.endswith('.err')


def test_a_preempted_job_is_queued_again_and_jobs_that_cannot_be_found_are_none(tmp_path):
  job = TrainingJob(('true',), str(tmp_path / 'log'), str(tmp_path))
  assert job.checkpoint().function is job and job() == 0
  executor = make_executor(tmp_path, 'local')
  assert executor.find({'pid': 3}) is None and executor.find({'job': '123456'}) is None


def test_options_of_slurm_become_parameters_of_submitit():
  cluster, jobs, parameters = slurm(jobs=7, timeout_min=9, gpus_per_node=2, partition='gpu', setup=('module load x',))
  assert (cluster, jobs) == ('slurm', 7)
  assert parameters == {
    'timeout_min': 9,
    'cpus_per_task': 4,
    'mem_gb': 16,
    'gpus_per_node': 2,
    'slurm_partition': 'gpu',
    'slurm_setup': ['module load x'],
  }


def test_unknown_clusters_and_options_and_a_missing_srun_raise(tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', '')
  for spec, message in [
    ('slrm', r"unknown cluster 'slrm' \(did you mean 'slurm'\?\)"),
    ('slurm(time=3)', "unknown option of cluster 'slurm': 'time'"),
    ('slurm', '--cluster=slurm: '),  # there is no srun on PATH
  ]:
    with pytest.raises(UserError, match=message):
      make_executor(tmp_path, spec)


def test_jobs_that_the_cluster_rejects_are_reported(tmp_path, monkeypatch):
  for program in ('srun', 'sbatch'):
    (tmp_path / program).write_text('#!/bin/sh\necho "sbatch: error: invalid partition specified: gpux" >&2\nexit 1\n')
    (tmp_path / program).chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  executor = make_executor(tmp_path, 'slurm(partition="gpux")')
  with pytest.raises(UserError, match=r'^--cluster=slurm: sbatch: error: invalid partition specified: gpux$'):
    executor.start([Request(['true'], tmp_path / 'log')] * 2)
