"""Measures a trained run on any split of its task and writes the hypotheses, one a line.

  python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
"""

import os
from pathlib import Path

from absl import flags
from rich.console import Console

from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_run, launch, required
from experiments.tables import results_table

define_run()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_integer('beams', None, 'hypotheses kept by the search; 1 is greedy; by default as in the config', 1)
flags.DEFINE_string('output', None, 'a file for the hypotheses; it must not exist')


def main() -> None:
  from attention_jax.training import experiment

  run = experiment.open_run(required('workdir'), FLAGS.checkpoint)
  if FLAGS.output and os.path.exists(FLAGS.output):
    raise UserError(f'{FLAGS.output} exists and is not overwritten; possible: another --output')
  found, predictions = experiment.evaluate_split(run, FLAGS.split, beams=FLAGS.beams)
  Console(highlight=False).print(results_table({f'{FLAGS.split} (step {run.step})': found}))
  if FLAGS.output:
    experiment.write_hypotheses(Path(FLAGS.output), predictions)


if __name__ == '__main__':
  launch(main)
