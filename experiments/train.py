"""Trains and evaluates a model, or resumes an interrupted run.

  python -m experiments.train --config=configs/dates.py:bahdanau2015_deep_tanh --workdir=runs/dates
  python -m experiments.train --config=configs/dates.py:bahdanau2015_deep_tanh --workdir=runs/cosine \\
    --config.model.attention.score='cosine'
  python -m experiments.train --config=configs/dates.py:bahdanau2015_deep_tanh --help_config

Exits with status 75 when interrupted by a signal; rerun the same command to resume.
"""

import sys

import jax
from absl import flags
from rich.console import Console

from attention_jax.errors import UserError
from attention_jax.training.writers import DEFAULT_TRACKERS
from experiments.distributed import define_distributed_flags, several_processes
from experiments.launch import FLAGS, define_config, launch, require_flag
from experiments.tables import print_results

define_config('a file of configs/ and a preset: configs/dates.py:bahdanau2015_deep_tanh')
flags.DEFINE_string('workdir', None, 'the folder of the run; an interrupted run resumes there')
flags.DEFINE_list(
  'trackers',
  [*DEFAULT_TRACKERS],
  'what shows the metrics beside the files in metrics/: tensorboard, wandb, mlflow, csv',
)
flags.DEFINE_string('group', '', 'the name of a group of runs in wandb, or of an experiment of mlflow')
define_distributed_flags()
flags.DEFINE_bool('help_config', False, 'print every field of the config with its type, value and meaning, then exit')

INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, to be tried again


def main() -> None:
  """Trains --config in the folder --workdir, or resumes it; --help_config prints the fields of the config instead.

  Raises:
    UserError: if --config is missing, or --workdir without --help_config.
  """
  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/dates.py:bahdanau2015_deep_tanh')
  if FLAGS.help_config:
    from attention_jax.systems.config import parse_config
    from experiments.config_help import format_config_help

    print(format_config_help(parse_config(FLAGS.config)))
    return
  folder = require_flag('workdir')
  with several_processes():
    _train(folder)


def _train(folder: str) -> None:
  from attention_jax.systems import experiment

  console = Console(highlight=False)

  def log(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)

  results = experiment.train(FLAGS.config, folder, log, FLAGS.trackers, FLAGS.group)
  if results is None:
    sys.exit(INTERRUPTED)
  if results and jax.process_index() == 0:
    print_results(results)


if __name__ == '__main__':
  launch(main)
