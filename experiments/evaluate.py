"""Measures a trained run on any split of its task and writes the hypotheses, one a line.

  python -m experiments.evaluate --workdir=runs/dates --split=unseen --output=unseen.txt
  python -m experiments.evaluate --workdir=runs/a,runs/b --checkpoint=average
  python -m experiments.evaluate --workdir=runs/m --split=validation --beams=10 --alpha=1.0 --beta=0.2
  python -m experiments.evaluate --workdir=runs/m --hypotheses=FILE     # of any search, or of somebody else
"""

from pathlib import Path

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_run, define_search, launch, new_file, required, searched
from experiments.tables import print_results

define_run(several=True)
define_search()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_string('hypotheses', None, 'a file with one text for each row of the split, to be measured by themselves')
flags.DEFINE_string('output', None, 'a file for the hypotheses; it must not exist')


def main() -> None:
  from attention_jax.data.files import read_lines
  from attention_jax.training import experiment

  if FLAGS.hypotheses and (FLAGS.output or searched()):
    own = ('output', *searched())[not FLAGS.output]
    raise UserError(f'--{own} is of a search; the texts of --hypotheses={FLAGS.hypotheses} are measured as they are')
  output = Path(new_file(FLAGS.output, 'output')) if FLAGS.output else None
  run = experiment.open_runs(required('workdir'), FLAGS.checkpoint, searched(), FLAGS.dtype)
  if FLAGS.hypotheses:
    found = experiment.evaluate_lines(run, FLAGS.split, read_lines(FLAGS.hypotheses))
    print_results({f'{FLAGS.split} ({FLAGS.hypotheses})': found})
    return
  found, predictions = experiment.evaluate_split(run, FLAGS.split)
  steps = f'step{"s" * (len(run.steps) > 1)} {", ".join(map(str, run.steps))}'
  print_results({f'{FLAGS.split} ({steps})': found})
  said = run.config['evaluation'] | {'dtype': run.config['model']['dtype']}
  print('evaluation: ' + ', '.join(f'{name}={value}' for name, value in said.items()))
  if output:
    experiment.write_lines(output, run.system.lines(predictions))
    print(f'written to {output}')


if __name__ == '__main__':
  launch(main)
