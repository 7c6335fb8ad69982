"""Trains a model and measures it, or goes on where the same command was interrupted.

  python -m experiments.train --config=configs/dates.py:bahdanau2015 --workdir=runs/dates
  python -m experiments.train --config=configs/dates.py:bahdanau2015 --workdir=runs/cosine \\
    --config.model.attention.score='cosine'

Exits with 75 where a signal stopped it before its end: the same command goes on.
"""

import sys

import jax
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from attention_jax.errors import UserError
from experiments.launch import FLAGS, launch, require_flag
from experiments.tables import print_results

config_flags.DEFINE_config_file('config', None, 'a file of configs/ and a preset: configs/dates.py:bahdanau2015')
flags.DEFINE_string('workdir', None, 'the folder of the run; an interrupted run goes on there')
flags.DEFINE_bool('distributed', False, 'several processes: calls jax.distributed.initialize() first')

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: to be tried again


def main() -> None:
  if FLAGS.config is None:
    raise UserError('--config is missing; for example --config=configs/dates.py:bahdanau2015')
  folder = require_flag('workdir')
  if FLAGS.distributed:
    try:
      jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
      raise UserError(f'--distributed: {error} It needs a cluster that jax recognises, such as SLURM or TPU') from error
  from attention_jax.systems import experiment

  console = Console(highlight=False)
  log = lambda line: console.print(line, markup=False, soft_wrap=True)
  results = experiment.train(FLAGS.config.to_dict(), folder, log)
  if results is None:
    sys.exit(STOPPED)
  if results and jax.process_index() == 0:
    print_results(results)


if __name__ == '__main__':
  launch(main)
