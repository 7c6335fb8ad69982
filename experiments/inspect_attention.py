"""Draws what a trained run attends to: one picture with a heatmap for each of some rows of a split, or given lines.

  python -m experiments.inspect_attention --workdir=runs/dates --rows=0,1,2,3
  python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999'
  python -m experiments.inspect_attention --workdir=runs/transformer --rows=0 --layers

Rows of a split of sentences show its gold links as outlined squares, where it has them, and the weights of the right
target; --text, and rows of pictures, show those of the best hypothesis.
"""

from pathlib import Path

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen, as far as the task has them')
flags.DEFINE_list('rows', ['0', '1', '2', '3'], 'rows of the split, counted from 0')
flags.DEFINE_multi_string('text', [], 'a source line to draw instead of rows of the split; may be given repeatedly')
flags.DEFINE_bool('layers', False, 'of a Transformer or convolutions: every layer and head by itself')
flags.DEFINE_string('output', None, 'a new file; by default one in the workdir, drawn anew')


def main() -> None:
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsLayerPlots

  folder = require_flag('workdir')
  output = check_output_path(FLAGS.output, 'output') if FLAGS.output else None
  run = runs.open_run(folder, FLAGS.checkpoint, dtype=FLAGS.dtype)
  path = Path(output or run.folder / run.system.plot_filename)
  if path.suffix.lower() != (kind := Path(run.system.plot_filename).suffix):
    raise UserError(f'--output={path}: this run is drawn as {kind}; possible: a path that ends with it')
  beside = [path.with_suffix(suffix) for suffix in run.system.extra_plot_suffixes]
  if output:
    for other in beside:
      check_output_path(str(other), 'output')
  if FLAGS.layers and not isinstance(run.system, SupportsLayerPlots):
    raise UserError(f'--layers: a run of system {run.config["system"]!r} has one layer of attention')
  plot = run.system.plot_layers if FLAGS.layers else run.system.plot
  plot(run.params, path, split=FLAGS.split, rows=FLAGS.rows, inputs=FLAGS.text)
  print(f'written to {", ".join(map(str, [path, *beside]))}')


if __name__ == '__main__':
  launch(main)
