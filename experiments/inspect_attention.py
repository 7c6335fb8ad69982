"""Draws or writes the attention weights of a trained run: one heatmap per row of a split, or per line of --text.

  python -m experiments.inspect_attention --workdir=runs/dates --rows=0,1,2,3
  python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999'
  python -m experiments.inspect_attention --workdir=runs/dates --rows=0 --analyses=leave_one_out
  python -m experiments.inspect_attention --workdir=runs/dates --rows=0 --analyses=entropy --output=page.html
  python -m experiments.inspect_attention --workdir=runs/transformer --rows=0 --layers
  python -m experiments.inspect_attention --workdir=runs/a --compare=runs/b --rows=0,1,2 --output=page.html
  python -m experiments.inspect_attention --workdir=runs/dates --text='5 mars 1999' --edit='uniform' --output=page.html
  python -m experiments.inspect_attention --workdir=runs/dates --serve

For rows of a split of translation, weights are those of the reference target, and gold links are marked if the split
has them. For a --text of translation, weights are those of the --hypotheses best hypotheses; for captions,
those of the best one. For a run of translation, the suffix of --output selects the format: .png for heatmaps, .html for
a page that shows weights token by token in a browser and needs no network, .json for all numbers. For captions,
glimpses and memories, .png is a picture, and .html a page with a slider over words or steps; for classification, .html
is a page of texts with shaded words. --serve shows the page of translation for sources that are typed into it, at an
address that only this machine can reach. --edit shows what changes with edited weights, of all layers and heads or of
one: 'fixed(at=2, position=1, layer=0, head=3)'.
"""

import functools
import os
from typing import TYPE_CHECKING

from absl import flags
from etils import epath

from attention_jax.errors import UserError
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

if TYPE_CHECKING:
  from attention_jax.analysis.reading import ReadingRequest

PAGE = '.html'

define_run_flags()
flags.DEFINE_string('split', 'test', 'train, validation, test or unseen; a task may lack some of them')
flags.DEFINE_list('rows', None, 'rows of the split, counted from 0; by default the first four')
flags.DEFINE_multi_string(
  'text', [], 'a source line, document or image file to draw instead of rows of the split; may be repeated'
)
flags.DEFINE_multi_string('compare', [], 'another run of the same task to show beside the first; may be repeated')
flags.DEFINE_integer('hypotheses', 1, 'for --text: number of hypotheses of each line, at most the beam size', 1)
flags.DEFINE_bool('layers', False, 'for a Transformer or convolutions: draw every layer and head separately')
flags.DEFINE_bool('words', False, 'merge the weights of subwords or characters to those of words')
flags.DEFINE_multi_string(
  'analyses', [], 'an analysis to compute, such as entropy or leave_one_out; may be repeated; an unknown name lists all'
)
flags.DEFINE_string(
  'edit', '', 'an edit of the weights, shown beside the run itself, such as uniform; an unknown name lists all'
)
flags.DEFINE_bool('relative', False, 'draw the largest weight of each heatmap darkest, for weights that are all small')
flags.DEFINE_bool('serve', False, 'serve a page on this machine, into which sources are typed, until interrupted')
flags.DEFINE_integer('port', 8765, 'the port of --serve; 0 for any that is free', 0, 65535)
flags.DEFINE_string('output', None, 'a new file; by default a file in the workdir, which is overwritten')


def main() -> None:
  """Writes or serves the attention weights of the run of --workdir.

  Raises:
    UserError: for flags that have no effect or do not fit the run, and for an invalid --text.
  """
  from attention_jax.analysis import reading_files, serving
  from attention_jax.analysis.reading import SupportsReadings
  from attention_jax.systems import runs
  from attention_jax.systems.ready_made import resolve_folder
  from attention_jax.systems.translation.readings import check_request

  folder = require_flag('workdir')
  _check_flags()
  output = check_output_path(FLAGS.output, 'output') if FLAGS.output else None
  check_request(_request(FLAGS.text, FLAGS.edit))  # before parameters and data are read, which takes long
  name, system = runs.system_of(folder)
  path = epath.Path(output or resolve_folder(folder) / system.plot_filename)
  has_readings = issubclass(system, SupportsReadings)
  if FLAGS.serve:
    _check_readings('--serve', name, has_readings)
  elif has_readings:
    reading_files.check_format(path)
  else:
    _check_plot(name, system, path, output)
  for other in FLAGS.compare:
    other_name, other_system = runs.system_of(other)
    _check_readings(f'--compare={other}', other_name, issubclass(other_system, SupportsReadings))
  _check_different([folder, *FLAGS.compare])
  for text in FLAGS.text:
    _check_text(text)
  run = runs.open_run(folder, FLAGS.checkpoint, dtype=FLAGS.dtype)
  if has_readings:
    opened = [run, *(runs.open_run(other, FLAGS.checkpoint, dtype=FLAGS.dtype) for other in FLAGS.compare)]
    if FLAGS.serve:
      serving.serve(functools.partial(_read, opened), FLAGS.port, edit=FLAGS.edit, relative=FLAGS.relative)
      return
    readings = _read(opened, FLAGS.text, FLAGS.edit)
    reading_files.write(readings, path, relative=FLAGS.relative)
    print(f'written to {path}')
    if specs := reading_files.unwritten_measurements(readings, path):
      print(f'not in a picture: {", ".join(specs)}; --output=FILE.html or FILE.json contains them')
  else:
    _plot(run, path)


def _check_flags() -> None:
  """Raises UserError for a flag that has no effect with, or without, another one."""
  for other, without_effect in (('serve', ('output', 'text', 'rows', 'split')), ('text', ('rows', 'split'))):
    for flag in without_effect:
      if _is_set(flag) and _is_set(other):
        raise UserError(f'--{flag} has no effect with --{other}; leave one of them out')
  if _is_set('port') and not FLAGS.serve:
    raise UserError('--port has no effect without --serve')


def _check_different(folders: list[str]) -> None:
  """Raises UserError for a run that is compared with itself."""
  from attention_jax.systems.ready_made import resolve_folder

  seen: dict[str, str] = {}
  for folder in folders:
    path = os.path.realpath(resolve_folder(folder))
    if path in seen:
      raise UserError(f'--compare={folder}: is the same run as {seen[path]}')
    seen[path] = folder


def _is_set(flag: str) -> bool:
  return FLAGS[flag].value != FLAGS[flag].default


def _check_text(text: str) -> None:
  """Raises UserError for an empty --text, and for bytes that are not UTF-8, which Python reads as surrogates."""
  if not text.strip():
    raise UserError('--text: an empty line has no attention weights')
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:
    raise UserError(f'--text: not UTF-8: {text!a}') from None


def _read(runs, texts: list[str], edit: str) -> list:
  """Returns readings by every run, and with `edit` also by every run with edited weights; see `read_runs`.

  Args:
    runs: the runs.
    texts: the sources; without any, the rows of the split are read.
    edit: an edit of weights, or ''.
  """
  from attention_jax.analysis.reading import read_runs

  return read_runs(runs, _request(texts, edit))


def _request(texts: list[str], edit: str) -> 'ReadingRequest':
  """The readings that the flags select."""
  from attention_jax.analysis.reading import ReadingRequest

  options = (FLAGS.layers, FLAGS.analyses, FLAGS.hypotheses, FLAGS.words, edit)
  return ReadingRequest(FLAGS.split, _rows(), texts, *options)


def _rows() -> list[str]:
  """Returns the numbers of --rows as text; none without the flag."""
  if FLAGS.rows is None:
    return []
  return FLAGS.rows or ['']  # '' is not a number, so that an empty --rows= is reported as an error


def _check_readings(flag: str, name: str, has_readings: bool) -> None:
  """Raises UserError, which begins with a flag, for a run of a system without readings."""
  if not has_readings:
    raise UserError(f"{flag}: expected a run of system 'translation', got one of {name!r}")


def _check_plot(name: str, system: type, path: epath.Path, output: str | None) -> None:
  """Raises UserError for flags that do not fit a system without readings, and for a file that exists already."""
  suffixes = dict.fromkeys([epath.Path(system.plot_filename).suffix, PAGE])
  if path.suffix.lower() not in suffixes:
    raise UserError(f'--output={path} must end with {" or ".join(suffixes)}, the formats of this run')
  for flag in ('compare', 'layers', 'words', 'analyses', 'edit', 'relative', 'hypotheses'):
    if _is_set(flag):
      raise UserError(f"--{flag}: expected a run of system 'translation', got one of {name!r}")
  if output:
    for extra_path in _extra_paths(system, path):
      check_output_path(str(extra_path), 'output')


def _plot(run, path: epath.Path) -> None:
  """Plots the weights of a system without readings."""
  run.system.plot(run.params, path, split=FLAGS.split, rows=_rows(), inputs=FLAGS.text)
  print(f'written to {", ".join(map(str, [path, *_extra_paths(run.system, path)]))}')


def _extra_paths(system, path: epath.Path) -> list[epath.Path]:
  """Files that a plot writes beside its path; a page is one file."""
  return [] if path.suffix.lower() == PAGE else [path.with_suffix(extra) for extra in system.extra_plot_suffixes]


if __name__ == '__main__':
  launch(main)
