"""Aligns the words of given translations with one trained run, or with two of opposite directions.

  python -m experiments.align --workdir=runs/en_de --source=a.en --target=a.de
  python -m experiments.align --workdir=runs/en_de --reverse=runs/de_en --source=a.en --target=a.de --gold=a.links
  python -m experiments.align --links=en_de.links,de_en.links --source=a.en --target=a.de --symmetrisation=union
  python -m experiments.align --workdir=runs/en_de --layers --source=a.en --target=a.de --gold=a.links --plot=heads.png
  python -m experiments.align --workdir=runs/dates --layers --split=test

Prints one line per pair in Pharaoh format: links source-target, counted from 0. With --reverse, or two files of
--links, the links of both directions are joined by --symmetrisation. --gold is a file with a line of sure links `1-0`
and possible links `1?0` for each pair: the alignment error rate, precision and recall (Och & Ney 2003) of each
direction and of the joined links are printed on stderr. --links reads alignments of other programs instead of runs: one
file, or one for each direction, both with links source-target. A pair with a blank side has a blank line of output, and
is reported on stderr.

With --layers, prints the alignment error rate of the links of every layer and head instead, and --plot draws it. The
links that they are compared with are those of --gold, which may also be the output of another program, or of --split of
the task. As in `evaluate`, config.evaluation.unlinked_targets decides whether links of target words without a gold link
are errors in the split of the task; with --gold they are.
"""

import sys
from collections.abc import Sequence

from absl import flags

from attention_jax.analysis.alignment import format_pharaoh
from attention_jax.analysis.symmetrisation import SYMMETRISATIONS, symmetrise
from attention_jax.errors import UserError, choose
from attention_jax.modules.parameter_files import SUFFIX as WEIGHTS_SUFFIX
from experiments.launch import FLAGS, check_output_path, define_run_flags, launch, require_flag

define_run_flags(allow_ensemble=True)
flags.DEFINE_string('reverse', None, 'the folder of a run that is trained from target to source')
flags.DEFINE_string(
  'links', None, 'one or two files of alignments in Pharaoh format, separated by a comma, instead of runs'
)
flags.DEFINE_string('source', None, 'a file of source lines')
flags.DEFINE_string('target', None, 'a file with a translation of each source line')
flags.DEFINE_string('gold', None, 'a file with the gold links of each pair, in Pharaoh format')
flags.DEFINE_string('level', 'word', 'the unit that links connect, word or char')
flags.DEFINE_string(
  'symmetrisation', 'grow_diag_final_and', f'how both directions are joined, one of: {", ".join(SYMMETRISATIONS)}'
)
flags.DEFINE_bool('layers', False, 'print the alignment error rate of every layer and head instead of alignments')
flags.DEFINE_string('split', None, 'for --layers: a split of the task instead of --source and --target')
flags.DEFINE_string('plot', None, 'for --layers: a new PNG file for the alignment error rates')


def main() -> None:
  """Prints the alignments of --source and --target, or the alignment error rates of layers and heads.

  Raises:
    UserError: for a missing flag, flags without effect, one file of weights for two directions, more than two files of
      --links, possible links in them, files that do not match, and a run without attention.
  """
  from attention_jax.data.files import read_lines
  from attention_jax.data.text import read_parallel
  from attention_jax.decoding.word_alignment import compare_with_gold, swap_links, swap_sides
  from attention_jax.systems.runs import split_commas

  if FLAGS.layers:
    _print_error_rates()
    return
  method = choose(FLAGS.symmetrisation, SYMMETRISATIONS, 'symmetrisation')
  link_files = split_commas(FLAGS.links, '--links') if FLAGS.links else []
  _check_flags(link_files)
  paths = (require_flag('source'), require_flag('target'))
  corpus = read_parallel(*paths, FLAGS.gold, FLAGS.level)
  directions = [_read_links(path, *paths) for path in link_files]
  for line in corpus.report:
    print(line, file=sys.stderr)
  if not directions:
    directions = [_align(FLAGS.workdir, corpus)]
    if FLAGS.reverse:
      directions.append(swap_links(_align(FLAGS.reverse, swap_sides(corpus))))
  alignments = dict(zip(('forward', 'reverse'), directions, strict=False))
  joined = directions[0]
  if len(directions) == 2:
    joined = alignments[method] = [symmetrise(*pair, method) for pair in zip(*directions, strict=True)]
  links_by_line = {corpus.line(row): links for row, links in enumerate(joined)}
  for line, _ in enumerate(read_lines(paths[0]), 1):  # pairs with a blank side are no rows of the corpus
    print(format_pharaoh(links_by_line.get(line, ())))
  if FLAGS.gold:
    for name, rows in alignments.items():
      print(f'{name}: {compare_with_gold(corpus, rows)}', file=sys.stderr)


def _check_flags(link_files: Sequence[str]) -> None:
  """Raises UserError for a missing --workdir, more than two files of --links, and flags without effect."""
  for name in ('split', 'plot'):
    if FLAGS[name].present:
      raise UserError(f'--{name} needs --layers')
  if link_files:
    if len(link_files) > 2:
      raise UserError(f'--links must name one or two files, got {len(link_files)}')
    _check_no_effect('links', ('workdir', 'reverse', 'checkpoint', 'dtype'))
  else:
    require_flag('workdir')
  if FLAGS.reverse and FLAGS.checkpoint.endswith(WEIGHTS_SUFFIX):
    raise UserError('--checkpoint: a file of weights belongs to one direction; with --reverse, expected a checkpoint')
  if FLAGS['symmetrisation'].present and not FLAGS.reverse and len(link_files) < 2:
    raise UserError('--symmetrisation has no effect on one direction; add --reverse, or a second file of --links')


def _check_no_effect(flag: str, others: Sequence[str]) -> None:
  """Raises UserError for a flag that has no effect with another one."""
  for name in others:
    if FLAGS[name].present and FLAGS[name].value:
      raise UserError(f'--{name} has no effect with --{flag}; leave one of them out')


def _print_error_rates() -> None:
  """Prints the alignment error rate of every layer and head, and draws it with --plot."""
  from attention_jax.analysis.picture_files import check_png_path
  from attention_jax.analysis.plots import heatmap
  from attention_jax.systems import runs
  from experiments.tables import print_heads

  _check_no_effect('layers', ('reverse', 'links', 'symmetrisation'))
  if FLAGS.split:
    _check_no_effect('split', ('source', 'target') if FLAGS.gold else ('source', 'target', 'level'))
  if FLAGS.plot:
    check_png_path(FLAGS.plot)
    check_output_path(FLAGS.plot, 'plot')
  corpus = None if FLAGS.split else _read_gold(require_flag('source'), require_flag('target'))
  run = runs.open_run_or_ensemble(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  corpus = corpus or _split_with_gold(run)
  unlinked_targets = bool(FLAGS.gold) or run.config.evaluation.unlinked_targets
  rates = run.head_error_rates(corpus, unlinked_targets=unlinked_targets)
  targets = '' if unlinked_targets else f', without links of {corpus.level}s that have no gold link'
  print(f'alignment error rate of layers (L) and heads (H), %, {len(corpus.source)} sentences{targets}')
  print_heads(rates)
  if FLAGS.plot:
    heads = [f'H{head}' for head in range(rates.shape[1])]
    layers = [f'L{layer}' for layer in range(len(rates))]
    heatmap(rates, heads, layers, FLAGS.plot, title='alignment error rate, %', in_percent=True)
    print(f'written to {FLAGS.plot}')


def _read_gold(source: str, target: str):
  """The pairs of two files with the links of --gold."""
  from attention_jax.data.text import read_parallel

  corpus = read_parallel(source, target, require_flag('gold'), FLAGS.level)
  for line in corpus.report:
    print(line, file=sys.stderr)
  return corpus


def _split_with_gold(run):
  """The pairs of --split with its own links, or with those of --gold, which has a line for each row."""
  from attention_jax.data.files import read_lines
  from attention_jax.data.text import from_pairs, unequal_lengths_error
  from attention_jax.systems.base import SupportsCorpus

  system = run.system_with(SupportsCorpus)
  corpus = system.corpus(choose(FLAGS.split, system.splits, 'split'))
  if not FLAGS.gold:
    return corpus
  lines = read_lines(FLAGS.gold)
  if len(lines) != len(corpus.source):
    raise unequal_lengths_error(f'--split={FLAGS.split}', FLAGS.gold, len(corpus.source), len(lines))
  sides = (list(corpus.source), list(corpus.target))
  return from_pairs(*sides, lines, level=FLAGS.level, name=corpus.name, links_name=FLAGS.gold)


def _read_links(path: str, source: str, target: str) -> list:
  """The alignments of another program. Raises UserError for possible links, which only gold alignments have."""
  from attention_jax.data.text import read_parallel

  corpus = read_parallel(source, target, path, FLAGS.level)
  if corpus.possible:
    raise UserError(
      f"{path} has possible links such as '1?0', which only --gold may have; expected links such as '1-0'"
    )
  return corpus.links


def _align(workdir: str, corpus) -> list:
  """The alignments of a run, as links from its source to its target."""
  from attention_jax.systems import runs

  run = runs.open_run_or_ensemble(workdir, FLAGS.checkpoint, dtype=FLAGS.dtype)
  return [pair.links for pair in run.align(corpus)]


if __name__ == '__main__':
  launch(main)
