"""Aligns the words of given translations with one trained run, or with two of opposite directions.

  python -m experiments.align --workdir=runs/en_de --source=a.en --target=a.de
  python -m experiments.align --workdir=runs/en_de --reverse=runs/de_en --source=a.en --target=a.de --gold=a.links
  python -m experiments.align --links=en_de.links,de_en.links --source=a.en --target=a.de --symmetrisation=union

Prints one line per pair in Pharaoh format: links source-target, counted from 0. With --reverse, or two files of
--links, the links of both directions are joined by --symmetrisation. --gold is a file with a line of sure links `1-0`
and possible links `1?0` for each pair: the alignment error rate, precision and recall (Och & Ney 2003) of each
direction and of the joined links are printed on stderr. --links reads alignments of other programs instead of runs: one
file, or one for each direction, both with links source-target. A pair with a blank side has a blank line of output, and
is reported on stderr.
"""

import sys
from collections.abc import Sequence

from absl import flags

from attention_jax.analysis.alignment import format_pharaoh
from attention_jax.analysis.symmetrisation import SYMMETRISATIONS, symmetrise
from attention_jax.errors import UserError, choose
from attention_jax.modules.parameter_files import SUFFIX as WEIGHTS_SUFFIX
from experiments.launch import FLAGS, define_run_flags, launch, require_flag

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


def main() -> None:
  """Prints the alignments of --source and --target.

  Raises:
    UserError: for a missing flag, flags without effect, one file of weights for two directions, more than two files of
      --links, possible links in them, files that do not match, and a run without attention.
  """
  from attention_jax.data.files import read_lines
  from attention_jax.data.text import read_parallel
  from attention_jax.decoding.word_alignment import compare_with_gold, swap_links, swap_sides
  from attention_jax.systems.runs import split_commas

  method = choose(FLAGS.symmetrisation, SYMMETRISATIONS, 'symmetrisation')
  link_files = split_commas(FLAGS.links, '--links') if FLAGS.links else []
  _check_flags(link_files)
  paths = (require_flag('source'), require_flag('target'))
  corpus = read_parallel(*paths, FLAGS.gold, FLAGS.level)
  directions = [_read_links(path, *paths) for path in link_files]
  for line in corpus.report:
    print(line, file=sys.stderr)
  if not directions:
    directions = [_align(require_flag('workdir'), corpus)]
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
  """Raises UserError for more than two files of --links, and for flags without effect."""
  if link_files:
    if len(link_files) > 2:
      raise UserError(f'--links must name one or two files, got {len(link_files)}')
    for name in ('workdir', 'reverse', 'checkpoint', 'dtype'):
      if FLAGS[name].present and FLAGS[name].value:
        raise UserError(f'--{name} has no effect with --links; leave one of them out')
  if FLAGS.reverse and FLAGS.checkpoint.endswith(WEIGHTS_SUFFIX):
    raise UserError('--checkpoint: a file of weights belongs to one direction; with --reverse, expected a checkpoint')
  if FLAGS['symmetrisation'].present and not FLAGS.reverse and len(link_files) < 2:
    raise UserError('--symmetrisation has no effect on one direction; add --reverse, or a second file of --links')


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
