"""Measures a trained run on any split of its task and writes the hypotheses, one a line.

  python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
  python -m experiments.evaluate --workdir=runs/a,runs/b --checkpoint=average
"""

from pathlib import Path

from absl import flags

from experiments.launch import FLAGS, SEVERAL, define_run, launch, new_file, required
from experiments.tables import print_results

define_run(SEVERAL)
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_integer('beams', None, 'hypotheses kept by the search; 1 is greedy; by default as in the config', 1)
flags.DEFINE_string('output', None, 'a file for the hypotheses; it must not exist')


def main() -> None:
  from attention_jax.training import experiment

  output = Path(new_file(FLAGS.output, 'output')) if FLAGS.output else None
  run = experiment.open_runs(required('workdir'), FLAGS.checkpoint)
  found, predictions = experiment.evaluate_split(run, FLAGS.split, beams=FLAGS.beams)
  print_results({f'{FLAGS.split} (step {run.step})': found})
  if output:
    experiment.write_lines(output, run.system.lines(predictions))
    print(f'written to {output}')


if __name__ == '__main__':
  launch(main)
