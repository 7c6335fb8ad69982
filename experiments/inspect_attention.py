"""Draws the attention weights of a trained run: one picture with a heatmap per row of a split, or per given line.

  python -m experiments.inspect_attention --workdir=runs/dates --rows=0,1,2,3
  python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999'
  python -m experiments.inspect_attention --workdir=runs/transformer --rows=0 --layers

For rows of a split of sentences, weights are those of the reference target, and gold links are outlined squares if the
split has them. For --text and for rows of pictures, weights are those of the best hypothesis.
"""

from experiments.large_pages import restart_with_large_pages

if __name__ == '__main__':
  restart_with_large_pages()  # before jax is imported

from pathlib import Path

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen; a task may lack some of them')
flags.DEFINE_list('rows', ['0', '1', '2', '3'], 'rows of the split, counted from 0')
flags.DEFINE_multi_string('text', [], 'a source line to draw instead of rows of the split; may be repeated')
flags.DEFINE_bool('layers', False, 'for a Transformer or convolutions: draw every layer and head separately')
flags.DEFINE_string('output', None, 'a new file; by default a file in the workdir, which is overwritten')


def main() -> None:
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsLayerPlots

  folder = require_flag('workdir')
  output = check_output_path(FLAGS.output, 'output') if FLAGS.output else None
  run = runs.open_run(folder, FLAGS.checkpoint, dtype=FLAGS.dtype)
  path = Path(output or run.folder / run.system.plot_filename)
  suffix = Path(run.system.plot_filename).suffix
  if path.suffix.lower() != suffix:
    raise UserError(f'--output={path} must end with {suffix}, the format of this run')
  extra_paths = [path.with_suffix(extra) for extra in run.system.extra_plot_suffixes]
  if output:
    for extra_path in extra_paths:
      check_output_path(str(extra_path), 'output')
  if FLAGS.layers and not isinstance(run.system, SupportsLayerPlots):
    raise UserError(f'--layers: a run of system {run.config["system"]!r} has one layer of attention')
  plot = run.system.plot_layers if FLAGS.layers else run.system.plot
  plot(run.params, path, split=FLAGS.split, rows=FLAGS.rows, inputs=FLAGS.text)
  print(f'written to {", ".join(map(str, [path, *extra_paths]))}')


if __name__ == '__main__':
  launch(main)
