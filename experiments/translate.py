"""Translates lines from a file or from stdin with a trained run.

  echo 'March 5th, 1999' | python -m experiments.translate --workdir=runs/dates
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --nbest=3 --alignments
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --json
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --samples=3 --temperature=0.8 --top_p=0.9
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --samples=20 --mbr=chrf
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --beams=6 --groups=3 --nbest=6
  python -m experiments.translate --workdir=runs/a,runs/b --input=lines.txt --prefixes=begun.txt
  python -m experiments.translate --workdir=runs/monotonic --stream

With --nbest or --alignments the fields of a line are separated by tabs: the line's number, score, hypothesis,
alignment (source-target pairs in Pharaoh format, counted from 0). --json gives one object per input line. --stream
prints each token as soon as enough of its line has arrived on stdin, for models that can: greedy search with
monotonic or mocha, rnn(direction="forward") and bridge=False.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence

from absl import flags

from attention_jax.analysis.alignment import format_pharaoh, links_from_weights
from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_run_flags, define_search_flags, launch, require_flag, search_overrides
from experiments.tables import round_weights

ANYHOW = ('max_length', 'replace_unknown')  # goes with search and with drawing
WINDOW = 4096  # lines searched before the first of them is printed: sorted by length among themselves
# What --stream can do.
STREAMED = {
  'input': '-',
  'beams': 1,
  'groups': 1,
  'samples': None,
  'nbest': 1,
  'alignments': False,
  'json': False,
  'mbr': None,
  'prefixes': None,
  'replace_unknown': False,
  'diversity': 0.5,
  'alpha': None,
  'beta': None,
  'gamma': None,
}

define_run_flags(allow_ensemble=True)
define_search_flags()
flags.DEFINE_string('input', '-', 'a file of lines, or - for stdin')
flags.DEFINE_integer('nbest', None, 'how many hypotheses to print for each line, at most --beams or --samples', 1)
flags.DEFINE_integer('groups', 1, 'groups of beams that take different words, of a diverse search', 1)
flags.DEFINE_float('diversity', 0.5, 'of --groups: what a word costs that an earlier group has just taken')
flags.DEFINE_string('prefixes', None, 'a file with a line for each of the input, with which its output begins')
flags.DEFINE_string('mbr', None, 'a metric: rank hypotheses by how much the others agree with each in it')
flags.DEFINE_bool('alignments', False, 'print the alignment of each hypothesis in Pharaoh format')
flags.DEFINE_integer('samples', None, 'draw so many hypotheses of each line instead of searching for the best', 1)
flags.DEFINE_integer('seed', 0, 'of --samples')
flags.DEFINE_float('temperature', 1.0, 'of --samples: below 1 likely tokens are preferred')
flags.DEFINE_integer('top_k', 0, 'of --samples: only the k likeliest tokens; 0 is all')
flags.DEFINE_float('top_p', 1.0, 'of --samples: only the likeliest tokens, whose probability reaches p')
flags.DEFINE_float('min_p', 0.0, 'of --samples: only tokens at least this times as likely as the likeliest')
flags.DEFINE_bool('stream', False, 'translate lines of stdin while they arrive, token by token')
flags.DEFINE_bool('json', False, 'print one JSON object per line: hypotheses, scores, tokens, alignments, weights')


def main() -> None:
  from attention_jax.systems import runs

  workdir = require_flag('workdir')
  sampling = _sampling()
  _check_search()
  if FLAGS.stream:
    _check_streamed(workdir, FLAGS.checkpoint)
  run = runs.open_run_or_ensemble(workdir, FLAGS.checkpoint, search_overrides(), FLAGS.dtype)
  _ = run.predictor  # says so where the run does not translate
  if FLAGS.stream:
    _stream(run)
  else:
    _translate(run, sampling)


def _translate(run, sampling) -> None:
  """Searches over whole lines, many at once."""
  from attention_jax.data.files import read_lines, split_lines

  beams = run.config['evaluation']['beams']
  shown = FLAGS.nbest or (1 if FLAGS.mbr else FLAGS.samples) or 1
  if shown > (FLAGS.samples or beams):
    what = f'--samples={FLAGS.samples}' if FLAGS.samples else f'--beams={beams}'
    raise UserError(f'--nbest={FLAGS.nbest} is more than {what}')
  if FLAGS.mbr and (FLAGS.samples or beams) < 2:
    raise UserError(f'--mbr={FLAGS.mbr} asks hypotheses about each other; possible: --samples or --beams of 2 and more')
  lines = split_lines(sys.stdin.buffer.read(), 'stdin') if FLAGS.input == '-' else read_lines(FLAGS.input)
  prefixes = read_lines(FLAGS.prefixes) if FLAGS.prefixes else [''] * len(lines)
  if len(prefixes) != len(lines):
    raise UserError(f'{FLAGS.prefixes} has {len(prefixes)} lines, the input {len(lines)}; possible: one for each')
  options = {'beams': beams, 'groups': FLAGS.groups, 'diversity': FLAGS.diversity, 'sampling': sampling}
  write = _as_json if FLAGS.json else _as_columns if FLAGS.nbest or FLAGS.alignments or shown > 1 else _as_text
  empty, cut, unread = [], [], []
  for start in range(0, len(lines), WINDOW):
    window = lines[start : start + WINDOW]
    real = [i for i, line in enumerate(window) if line.strip()]
    begun = {'prefixes': [prefixes[start + i] for i in real]} if FLAGS.prefixes else {}
    predictions = iter(run.predictor([window[i] for i in real], first_line=start, **begun, **options))
    for number, line in enumerate(window, start + 1):
      hypotheses = _ranked(next(predictions).hypotheses)[:shown] if line.strip() else []
      write(number, line, hypotheses)
      empty += [] if line.strip() else [number]
      unread += [number] if line.strip() and not hypotheses else []
      cut += [number] if any(len(h.weights) >= run.predictor.max_length for h in hypotheses) else []
  _report(empty, cut, run.predictor.max_length, unread)


def _ranked(hypotheses: list) -> list:
  """In their order, of a search each once; or with --mbr in that of how much the others agree, which is then their
  score, each text once."""
  from attention_jax.inference.minimum_bayes_risk import expected_utility

  if not FLAGS.mbr:
    return hypotheses if FLAGS.samples else _each_once(hypotheses, lambda h: tuple(h.tokens))
  log_probs = None if FLAGS.samples else [h.log_prob for h in hypotheses]
  utilities = expected_utility([h.text for h in hypotheses], FLAGS.mbr, log_probs)
  scored = [h._replace(score=utility) for h, utility in zip(hypotheses, utilities, strict=True)]
  return _each_once(sorted(scored, key=lambda h: -h.score), lambda h: h.text)


def _each_once(hypotheses: Iterable, what: Callable) -> list:
  """The first of those that are alike."""
  best = {}
  for h in hypotheses:
    best.setdefault(what(h), h)
  return list(best.values())


def _sampling():
  """What --samples and its options mean; None without them."""
  from attention_jax.decoding.sampling import Sampling

  options = {name: FLAGS[name].value for name in ('seed', 'temperature', 'top_k', 'top_p', 'min_p')}
  if FLAGS.samples is None:
    for name, value in options.items():
      if value != FLAGS[name].default:
        raise UserError(f'--{name}={value} is an option of --samples, which is not given')
    return None
  if search := [f'--{name}={value}' for name, value in search_overrides().items() if name not in ANYHOW]:
    raise UserError(f'--samples={FLAGS.samples} draws, {search[0]} searches; possible: one of them')
  return Sampling(FLAGS.samples, **options)


def _check_search() -> None:
  from attention_jax.inference.metrics import higher_is_better

  if FLAGS.samples and FLAGS.groups > 1:
    raise UserError(f'--samples={FLAGS.samples} draws, --groups={FLAGS.groups} searches; possible: one of them')
  if FLAGS.groups == 1 and FLAGS.diversity != FLAGS['diversity'].default:
    raise UserError(f'--diversity={FLAGS.diversity} is an option of --groups, of which there is one')
  if FLAGS.mbr is not None:
    higher_is_better(FLAGS.mbr)  # refuses what is no metric


def _check_streamed(workdir: str, checkpoint: str) -> None:
  for name, possible in STREAMED.items():
    if FLAGS[name].value not in (None, possible):
      given = f'--{name}={FLAGS[name].value}'
      raise UserError(f'{given} cannot be given with --stream, which prints one greedy hypothesis of stdin as it comes')
  for name, given in (('workdir', workdir), ('checkpoint', checkpoint)):
    if ',' in given:
      raise UserError(f'--{name}={given}: several cannot stream; possible: one')


def _stream(run) -> None:
  """Prints each token of a line as soon as enough of the line has arrived."""
  from attention_jax.data import incremental
  from attention_jax.inference.streaming import StreamingTranslator

  if run.config['evaluation']['replace_unknown']:
    raise UserError('--stream replaces no unknown words, as the run does; possible: --noreplace_unknown')
  of = run.predictor
  interpret = StreamingTranslator(run.model, run.params, of.source_vocab, of.target_vocab, max_length=of.max_length)
  empty, cut = [], []
  for number, line in enumerate(incremental.iter_lines(sys.stdin.buffer.read1, 'stdin'), 1):
    length = 0
    for text, _ in interpret(line):
      print(text, end='', flush=True)
      length += 1
    print(flush=True)
    empty += [] if length else [number]
    cut += [number] if length >= of.max_length else []
  _report(empty, cut, of.max_length)


def _report(empty: list[int], cut: list[int], max_length: int, unread: Sequence[int] = ()) -> None:
  from attention_jax.data.text import format_count, format_line_numbers

  if empty:
    print(f'{format_count(len(empty), "empty line")} gave empty output ({format_line_numbers(empty)})', file=sys.stderr)
  if unread:
    which = f'{format_count(len(unread), "line")} longer than the model can read gave empty output'
    print(f'{which} ({format_line_numbers(unread)})', file=sys.stderr)
  if cut:
    longest = f'evaluation.max_length or the longest bucket of the run allows {max_length} tokens'
    print(
      f'{format_count(len(cut), "output")} may have been cut ({format_line_numbers(cut)}): {longest}', file=sys.stderr
    )


def _as_text(number, line, hypotheses) -> None:
  print(hypotheses[0].text if hypotheses else '')


def _as_columns(number, line, hypotheses) -> None:
  for h in hypotheses:
    print(number, f'{h.score:.4f}', h.text, *([format_pharaoh(_links(h))] if FLAGS.alignments else []), sep='\t')


def _as_json(number, line, hypotheses) -> None:
  found = [
    {
      'text': h.text,
      'score': h.score,
      'log_prob': h.log_prob,
      'tokens': h.tokens,
      'alignment': _links(h),
      'weights': round_weights(h.weights),
    }
    for h in hypotheses
  ]
  print(json.dumps({'line': number, 'source': line, 'hypotheses': found}, ensure_ascii=False))


def _links(hypothesis) -> tuple[tuple[int, int], ...]:
  return links_from_weights(hypothesis.weights, hypothesis.weights.shape[1] - 1, len(hypothesis.tokens))


if __name__ == '__main__':
  launch(main)
