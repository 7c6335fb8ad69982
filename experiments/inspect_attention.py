"""Draws what a trained run attends to: one picture with a heatmap for each of some rows of a split, or given lines.

  python -m experiments.inspect_attention --workdir=runs/dates --rows=0,1,2,3
  python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999'

Rows of a split show its gold links as outlined squares, where it has them, and the weights of the right target;
--text shows those of the best hypothesis.
"""

from absl import flags

from experiments.launch import FLAGS, define_run, launch, new_file, required

define_run()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_list('rows', ['0', '1', '2', '3'], 'rows of the split, counted from 0')
flags.DEFINE_multi_string('text', [], 'a source line to draw instead of rows of the split; may be given repeatedly')
flags.DEFINE_string('output', None, 'a new PNG; by default attention.png in the workdir, drawn anew')


def main() -> None:
  from attention_jax.training import experiment

  folder = required('workdir')
  output = new_file(FLAGS.output, 'output') if FLAGS.output else None
  run = experiment.open_run(folder, FLAGS.checkpoint)
  path = output or f'{folder}/{run.system.drawing}'
  run.system.draw(run.params, path, split=FLAGS.split, rows=FLAGS.rows, given=FLAGS.text)
  print(f'written to {path}')


if __name__ == '__main__':
  launch(main)
