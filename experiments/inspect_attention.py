"""Draws or writes the attention weights of a trained run: one heatmap per row of a split, or per given line.

  python -m experiments.inspect_attention --workdir=runs/dates --rows=0,1,2,3
  python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999'
  python -m experiments.inspect_attention --workdir=runs/dates --rows=0 --analyses=entropy --analyses=leave_one_out
  python -m experiments.inspect_attention --workdir=runs/transformer --rows=0 --layers
  python -m experiments.inspect_attention --workdir=runs/a --compare=runs/b --rows=0,1,2 --output=page.html

For rows of a split of sentences, weights are those of the reference target, and gold links are outlined squares if the
split has them. For --text and for rows of pictures, weights are those of the best hypothesis. For a run of translation,
the suffix of --output selects the format: .png for heatmaps, .html for a page that shows weights token by token in a
browser and needs no network, .json for all numbers.
"""

from experiments.process_settings import prepare_process

if __name__ == '__main__':
  prepare_process()  # before jax is imported

from pathlib import Path

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen; a task may lack some of them')
flags.DEFINE_list('rows', ['0', '1', '2', '3'], 'rows of the split, counted from 0')
flags.DEFINE_multi_string('text', [], 'a source line to draw instead of rows of the split; may be repeated')
flags.DEFINE_multi_string('compare', [], 'another run of the same task to show beside it; may be repeated')
flags.DEFINE_integer('hypotheses', 1, 'for --text: number of hypotheses of each line, at most the beam size', 1)
flags.DEFINE_bool('layers', False, 'for a Transformer or convolutions: draw every layer and head separately')
flags.DEFINE_bool('words', False, 'merge the weights of subwords or characters to those of words')
flags.DEFINE_multi_string(
  'analyses', [], 'an analysis of docs/analyses.md to compute, such as entropy or leave_one_out; may be repeated'
)
flags.DEFINE_bool('relative', False, 'draw the largest weight of each heatmap darkest, for weights that are all small')
flags.DEFINE_string('output', None, 'a new file; by default a file in the workdir, which is overwritten')


def main() -> None:
  from attention_jax.analysis import reading_files
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsReadings
  from attention_jax.systems.ready_made import opened_folder

  folder = require_flag('workdir')
  output = check_output_path(FLAGS.output, 'output') if FLAGS.output else None
  # Flags are checked before parameters and data are read, which takes long.
  name, system = runs.system_of(folder)
  path = Path(output or opened_folder(folder) / system.plot_filename)
  has_readings = issubclass(system, SupportsReadings)
  if has_readings:
    reading_files.check_format(path)
  else:
    _check_plot(name, system, path, output)
  if any(not text.strip() for text in FLAGS.text):
    raise UserError('--text: an empty line has no attention weights')
  run = runs.open_run(folder, FLAGS.checkpoint, dtype=FLAGS.dtype)
  if has_readings:
    others = [runs.open_run(other, FLAGS.checkpoint, dtype=FLAGS.dtype) for other in FLAGS.compare]
    _write_readings([run, *others], path)
  else:
    _plot(run, path)


def _write_readings(runs, path: Path) -> None:
  from attention_jax.analysis import reading_files
  from attention_jax.analysis.reading import ReadingRequest
  from attention_jax.systems.base import SupportsReadings

  request = ReadingRequest(
    FLAGS.split, FLAGS.rows, FLAGS.text, FLAGS.layers, FLAGS.analyses, FLAGS.hypotheses, FLAGS.words
  )
  readings = [
    reading._replace(run=str(run.folder))
    for run in runs
    for reading in run.system_with(SupportsReadings).read(run.params, request)
  ]
  reading_files.write(readings, path, relative=FLAGS.relative)
  print(f'written to {path}')


def _check_plot(name: str, system: type, path: Path, output: str | None) -> None:
  """Raises UserError for flags that do not fit a system without readings."""
  suffix = Path(system.plot_filename).suffix
  if path.suffix.lower() != suffix:
    raise UserError(f'--output={path} must end with {suffix}, the format of this run')
  for flag in ('compare', 'layers', 'words', 'analyses', 'relative'):
    if FLAGS[flag].value:
      raise UserError(f"--{flag}: expected a run of system 'translation', got one of {name!r}")
  if output:
    for extra_path in _extra_paths(system, path):
      check_output_path(str(extra_path), 'output')


def _plot(run, path: Path) -> None:
  """Plots the weights of a system without readings."""
  run.system.plot(run.params, path, split=FLAGS.split, rows=FLAGS.rows, inputs=FLAGS.text)
  print(f'written to {", ".join(map(str, [path, *_extra_paths(run.system, path)]))}')


def _extra_paths(system, path: Path) -> list[Path]:
  return [path.with_suffix(extra) for extra in system.extra_plot_suffixes]


if __name__ == '__main__':
  launch(main)
