"""Builds the arguments of a sweep from the flags of ablate.py, or from get_sweep() of its config file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_jax.errors import UserError, choose
from attention_jax.sweeps import space
from attention_jax.sweeps.report import ReportOptions
from attention_jax.sweeps.resolve import Base
from attention_jax.sweeps.search import search
from attention_jax.sweeps.statistics import TESTS
from attention_jax.sweeps.sweep import SweepRequest
from attention_jax.training.paths import absolute, run_path
from experiments.config_files import load_config, load_sweep
from experiments.launch import FLAGS, config_path

DEFAULT_SEEDS = 3
SEARCH_OPTIONS = ('points', 'search_method', 'search_seed')  # flags that only --search reads
RUN_FLAGS = (
  'seeds',
  'grid',
  'pair',
  'setting',
  'search',
  *SEARCH_OPTIONS,
  'dry_run',
  'retry',
  'adopt',
  'workers',
  'together',
  'cluster',
  'submit',
  'runs',
  'trackers',
)  # flags that --report does not read


def sweep_request(folder: Path, overrides: Mapping[str, Any], train: Sequence[str]) -> SweepRequest:
  """Returns the sweep that the flags describe.

  Args:
    folder: the folder of the sweep.
    overrides: the fields of the config that flags set.
    train: the command of the training program, as in SweepRequest.

  Raises:
    UserError: for flags that cannot be parsed, for flags of settings if the config file defines get_sweep(), and for
      --workers with --cluster, and either with --submit.
  """
  if FLAGS.submit and (beside := next((name for name in ('workers', 'cluster') if FLAGS[name].present), '')):
    raise UserError(f'--{beside} has no effect with --submit, whose queue runs the units; leave one of them out')
  if FLAGS.cluster and FLAGS['workers'].present:
    raise UserError('--workers has no effect with --cluster, whose option jobs is the number of jobs at a time')
  path = config_path()
  sweep = load_sweep(path)
  settings = _settings_of_flags()
  if sweep and settings:
    raise UserError(f'{path} defines get_sweep(); expected no --grid, --pair, --setting or --search beside it')
  if sweep:
    settings = sweep.settings
  elif not settings:
    settings = [{}]
  default_seeds = sweep.seeds if sweep else DEFAULT_SEEDS
  return SweepRequest(
    folder=folder,
    base=Base(path, overrides, lambda path: load_config(path).to_dict()),
    settings=settings,
    seeds=default_seeds if FLAGS.seeds is None else FLAGS.seeds,
    train=['python', *train[1:]] if FLAGS.submit else train,  # another machine has another path of python
    plugins=','.join(FLAGS.plugins),
    workers=FLAGS.workers,
    cluster=FLAGS.cluster,
    submit=FLAGS.submit,
    runs=str(absolute(run_path(FLAGS.runs))) if FLAGS.runs else '',
    together=FLAGS.together,
    retry=FLAGS.retry,
    adopted=FLAGS.adopt,
  )


def check_report_flags() -> None:
  """Raises UserError for a flag that only runs read, which has no effect with --report."""
  for name in RUN_FLAGS:
    if FLAGS[name].present:
      raise UserError(f'--{name} has no effect with --report; leave one of them out')


def report_options() -> ReportOptions:
  """Returns the options of the report that flags set, by default those of get_sweep().

  Raises:
    UserError: for a baseline that cannot be parsed, and for an unknown test.
  """
  sweep = load_sweep(config_path()) if FLAGS.config is not None else None
  baseline = space.parse_setting(FLAGS.baseline, '--baseline') if FLAGS.baseline else None
  return ReportOptions(
    baseline=baseline or (sweep.baseline if sweep else None),
    metrics=tuple(FLAGS.metrics) or (sweep.metrics if sweep else ()),
    title=sweep.question if sweep else '',
    test=choose(FLAGS.test, TESTS, 'value of --test'),
  )


def _settings_of_flags() -> list[space.Setting]:
  """Returns the product of --grid, --pair and --search, followed by the single settings of --setting.

  Raises:
    UserError: for flags that cannot be parsed, and for an option of --search without it.
  """
  groups = [space.parse_grid(text) for text in FLAGS.grid] + [space.parse_pair(text) for text in FLAGS.pair]
  unused = [name for name in SEARCH_OPTIONS if FLAGS[name].present and not FLAGS.search]
  if unused:
    raise UserError(f'--{unused[0]} needs --search, which draws the settings')
  if FLAGS.search:
    ranges = space.parse_setting('; '.join(FLAGS.search), '--search')
    groups.append(search(ranges, FLAGS.points, FLAGS.search_method, FLAGS.search_seed))
  settings = space.product(*groups) if groups else []
  return settings + [space.parse_setting(text) for text in FLAGS.setting]
