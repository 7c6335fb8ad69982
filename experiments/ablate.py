"""Runs a sweep: every setting with several seeds, continued after any interruption, and reported with error bars.

  python -m experiments.ablate --config=configs/dates.py:luong2015_birnn --workdir=runs/grid --seeds=5 \\
    --grid='model.attention.score=dot,general,additive' --grid='model.attention.alignment=softmax,local_p(width=10)'
  python -m experiments.ablate ... --dry_run      # the runs, their parameters and an estimate of the time
  python -m experiments.ablate ... --retry        # runs the failed ones again
  python -m experiments.ablate --report --workdir=runs/grid

Exits with status 0 when all runs have finished, 75 when some are unfinished (as after a signal), and
otherwise 1 when some failed. Rerun the same command to continue.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags
from rich.console import Console

from attention_jax.errors import UserError
from attention_jax.training.paths import is_in_bucket, run_path
from experiments.launch import FLAGS, config_overrides, define_config, launch, program_command, require_flag

define_config('a file of configs/ and a preset; the file may define get_sweep()')
flags.DEFINE_string('workdir', None, 'the folder of the sweep')
flags.DEFINE_integer(
  'seeds',
  None,
  'number of seeds of each setting, counted from config.training.seed; by default 3, or as in get_sweep()',
)
flags.DEFINE_multi_string('grid', [], 'field=value,value,...; several form every combination')
flags.DEFINE_multi_string('pair', [], 'field=value,value; field=value,value: values that are paired by position')
flags.DEFINE_multi_string('setting', [], 'field=value; field=value: a setting beside those of --grid, --pair, --search')
flags.DEFINE_multi_string(
  'search', [], 'field=log(low=1e-4, high=1e-2): a range to draw from, by log, linear, integer or log_integer'
)
flags.DEFINE_integer('points', 16, 'number of settings that --search draws')
flags.DEFINE_string('search_method', 'halton', 'halton, sobol, latin_hypercube or random')
flags.DEFINE_integer('search_seed', 0, 'seed of --search')
flags.DEFINE_bool('dry_run', False, 'print what would be run, and run nothing')
flags.DEFINE_bool('retry', False, 'run the failed units again, and nothing else')
flags.DEFINE_multi_string('adopt', [], 'the folder of a finished run, of one seed or several, to add to the sweep')
flags.DEFINE_integer('workers', 1, 'number of parallel processes on this machine, each with its own cores or devices')
flags.DEFINE_string('together', 'auto', 'whether one process trains all seeds of a setting: auto, yes or no')
flags.DEFINE_string('cluster', '', 'slurm(partition="gpu", timeout_min=120): run as jobs of a cluster')
flags.DEFINE_string(
  'submit',
  '',
  'a command of the shell that puts each unit into a queue, such as: sky jobs launch --name={name} {command}',
)
flags.DEFINE_string('runs', '', 'the folder of the runs, gs://BUCKET/FOLDER too; by default that of the sweep')
flags.DEFINE_list('trackers', [], 'as of train, for every run, with the name of the folder as their group')
flags.DEFINE_bool('report', False, 'write the report of the sweep so far, and run nothing')
flags.DEFINE_string(
  'baseline',
  '',
  'field=value; field=value: the setting that the report compares with; by default as in get_sweep() of --config, or '
  'the first',
)
flags.DEFINE_string('test', 't', 'paired test of the report over seeds: t, wilcoxon or permutation')
flags.DEFINE_list(
  'metrics',
  [],
  'metrics of the report, the most important first; by default as in get_sweep() of --config, or as in '
  'the config of the first setting',
)

INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h, as train.py


def main() -> None:
  """Runs the sweep of --workdir, or writes its report.

  Raises:
    UserError: if --workdir is missing, if both --config and --report are, for a flag of runs with --report, and for
      mistakes in the sweep.
  """
  # In this process jax traces models and counts parameters; an accelerator is left to the processes that train.
  jax.config.update('jax_platforms', 'cpu')
  from attention_jax.sweeps import sweep
  from attention_jax.sweeps.ledger import LEDGER, read_state
  from attention_jax.sweeps.resolve import check_baseline, check_metrics
  from experiments.sweep_flags import check_report_flags, report_options, sweep_request

  console = Console(highlight=False)

  def log(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)

  folder = run_path(require_flag('workdir'))
  if is_in_bucket(folder):
    raise UserError(f'--workdir={folder}: a sweep needs a folder of a file system; --runs={folder} is for its runs')
  if FLAGS.report:
    check_report_flags()
    write_report(folder, log)
    return
  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/dates.py:luong2015_birnn')
  trackers = [f'--trackers={",".join(FLAGS.trackers)}', f'--group={folder.name}'] if FLAGS.trackers else []
  request = sweep_request(folder, config_overrides(), [*program_command('train'), *trackers])
  resolved = sweep.check_request(request)
  has_earlier_settings = (folder / LEDGER).exists()
  check_baseline(resolved, report_options().baseline, has_earlier_settings)
  check_metrics(resolved, report_options().metrics, has_earlier_settings)
  if FLAGS.dry_run:
    sweep.describe_plan(request, resolved, log)
    return
  outcome = sweep.run_sweep(request, resolved, log)
  if outcome.finished and read_state(folder).finished:
    write_report(folder, log)
  if outcome.unfinished:
    sys.exit(INTERRUPTED)
  sys.exit(1 if outcome.failed else 0)


def write_report(folder: Path, log: Callable[[str], None]) -> None:
  """Writes the report of a sweep into its folder, and logs its findings."""
  from attention_jax.sweeps.render import write_files
  from attention_jax.sweeps.report import sweep_report
  from experiments.sweep_flags import report_options

  report = sweep_report(folder, report_options(), log)
  for finding in report.findings:
    log(finding)
  log(f'written: {", ".join(map(str, write_files(report, folder)))}')


if __name__ == '__main__':
  launch(main)
