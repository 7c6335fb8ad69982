"""Translates lines from a file or from stdin with a trained run.

  echo 'March 5th, 1999' | python -m experiments.translate --workdir=runs/dates
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --nbest=3 --alignments
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --json
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --samples=3 --temperature=0.8 --top_p=0.9
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --samples=20 --mbr=chrf
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --beams=6 --groups=3 --nbest=6
  python -m experiments.translate --workdir=runs/a,runs/b --input=lines.txt --prefixes=prefixes.txt
  python -m experiments.translate --workdir=runs/dates --input=lines.txt --no_repeat_ngram_size=3 --min_length=5
  python -m experiments.translate --workdir=runs/monotonic --stream

Lines of a pipe on stdin are translated together with those that have arrived, and printed at once; --buffer=N waits for
N lines. With --prefixes, all lines are read first.

With --nbest, with --alignments, and with --samples=2 or more without --mbr, a line of output has fields separated by
tabs: line number, score, hypothesis and, with --alignments, source-target pairs in Pharaoh format, counted from 0.
Lines without a hypothesis then have no line of output: blank ones, and those too long for the model. --json prints one
object per input line. --stream prints each token as soon as enough of its line has arrived on stdin. It searches
greedily, whatever the config has, and needs the alignment monotonic or mocha, a score of the query and one position
alone, one head, rnn(direction="forward"), bridge=False, and an output layer that does not copy.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import flags

from attention_jax.analysis.alignment import format_pharaoh
from attention_jax.atomic import to_json
from attention_jax.errors import UserError
from attention_jax.specs import MAX_REPEATS
from experiments.launch import (
  FLAGS,
  define_run_flags,
  define_search_flags,
  launch,
  require_flag,
  search_overrides,
)
from experiments.tables import round_weights

SAMPLING_OPTIONS = ('seed', 'temperature', 'top_k', 'top_p', 'min_p')
# Search flags that sampling uses too.
SHARED_FLAGS = ('no_repeat_ngram_size', 'min_length', 'max_length', 'replace_unknown')
WINDOW = 4096  # lines that are decoded, sorted by length, before the first of them is printed; at most, for a pipe
# The only values that these flags may have with --stream, unless they are not set (None).
STREAM_VALUES = {
  'input': '-',
  'buffer': None,
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
  'length_penalty': None,
}

define_run_flags(allow_ensemble=True)
define_search_flags()
flags.DEFINE_string('input', '-', 'a file of lines, or - for stdin')
flags.DEFINE_integer(
  'buffer',
  None,
  f'number of lines that are read before they are translated; by default all that have arrived, at most {WINDOW}',
  1,
)
flags.DEFINE_integer(
  'nbest',
  None,
  'hypotheses to print for each line, at most --beams or --samples; by default 1; with --samples and no --mbr, all',
  1,
)
flags.DEFINE_integer('groups', 1, 'for diverse beam search: groups of beams that prefer different tokens', 1)
flags.DEFINE_float('diversity', 0.5, 'for --groups: penalty of a token that an earlier group has chosen at this step')
flags.DEFINE_string('prefixes', None, 'a file with the prefix of the output of each input line')
flags.DEFINE_string('mbr', None, 'a metric whose expected value reranks the hypotheses (minimum Bayes risk)')
flags.DEFINE_bool('alignments', False, 'print the alignment of each hypothesis in Pharaoh format')
flags.DEFINE_integer(
  'samples', None, 'sample this number of hypotheses of each line instead of searching', 1, MAX_REPEATS
)
flags.DEFINE_integer('seed', 0, 'for --samples: seed of the random numbers')
flags.DEFINE_float('temperature', 1.0, 'for --samples: a value below 1 makes likely tokens likelier')
flags.DEFINE_integer('top_k', 0, 'for --samples: sample from the k likeliest tokens; 0 for all')
flags.DEFINE_float('top_p', 1.0, 'for --samples: sample from the likeliest tokens whose total probability reaches p')
flags.DEFINE_float('min_p', 0.0, 'for --samples: sample from tokens at least min_p times as likely as the likeliest')
flags.DEFINE_bool('stream', False, 'translate lines of stdin token by token while they arrive')
flags.DEFINE_bool('json', False, 'print one JSON object per line: hypotheses, scores, tokens, alignments, weights')


def main() -> None:
  """Translates the lines of --input with the run of --workdir."""
  from attention_jax.systems import runs

  workdir = require_flag('workdir')
  sampling = _sampling_options()
  _check_search_flags()
  if FLAGS.stream:
    _check_stream_flags(workdir, FLAGS.checkpoint)
  run = runs.open_run_or_ensemble(workdir, FLAGS.checkpoint, search_overrides(), FLAGS.dtype)
  _ = run.predictor  # raises UserError if the run does not translate
  if FLAGS.stream:
    _translate_stream(run)
  else:
    _translate_lines(run, sampling)


def _translate_lines(run, sampling) -> None:
  """Translates whole lines, one window of lines after the other."""
  from attention_jax.data.files import read_lines
  from attention_jax.data.vocab import unknown_characters
  from attention_jax.decoding.minimum_bayes_risk import rank_hypotheses

  beams = run.config.evaluation.beams
  hypothesis_count = FLAGS.samples or beams
  nbest = FLAGS.nbest or (1 if FLAGS.mbr else FLAGS.samples) or 1
  _check_hypothesis_count(nbest, hypothesis_count)
  prefixes = read_lines(FLAGS.prefixes) if FLAGS.prefixes else None
  options = {'beams': beams, 'groups': FLAGS.groups, 'diversity': FLAGS.diversity, 'sampling': sampling}
  print_hypotheses = _output_function(nbest)
  empty = []
  truncated = []
  without_hypothesis = []
  unknown = set()
  start = 0
  for window in _input_blocks(prefixes):
    filled_rows = [row for row, line in enumerate(window, start) if line.strip()]
    if prefixes is not None:
      options['prefixes'] = [prefixes[row] for row in filled_rows]
    filled_lines = [line for line in window if line.strip()]
    unknown.update(unknown_characters(run.predictor.source_vocab, filled_lines))
    predictions = iter(run.predictor(filled_lines, line_numbers=filled_rows, **options))
    for number, line in enumerate(window, start + 1):
      tokens = []
      hypotheses = []
      if line.strip():
        prediction = next(predictions)
        tokens = prediction.tokens
        hypotheses = rank_hypotheses(prediction.hypotheses, FLAGS.mbr or '', sampling is not None)[:nbest]
      print_hypotheses(number, line, tokens, hypotheses)
      if not line.strip():
        empty.append(number)
      elif not hypotheses:
        without_hypothesis.append(number)
      if any(len(hypothesis.weights) >= run.predictor.max_length for hypothesis in hypotheses):
        truncated.append(number)
    sys.stdout.flush()
    start += len(window)
  _report_problems(empty, truncated, run.predictor.max_length, unknown, without_hypothesis)


def _input_blocks(prefixes: Sequence[str] | None) -> Iterable[list[str]]:
  """Returns the lines of --input in blocks that are translated together.

  Args:
    prefixes: the lines of --prefixes, or None.

  Raises:
    UserError: for input that cannot be read, and if there is not one prefix per line.
  """
  from attention_jax.data.files import read_lines, split_lines
  from attention_jax.data.incremental import iter_line_blocks

  size = FLAGS.buffer or WINDOW
  if FLAGS.input == '-' and prefixes is None:
    return iter_line_blocks(sys.stdin.fileno(), 'stdin', size, waits=FLAGS.buffer is not None)
  lines = split_lines(sys.stdin.buffer.read(), 'stdin') if FLAGS.input == '-' else read_lines(FLAGS.input)
  if prefixes is not None and len(prefixes) != len(lines):
    raise UserError(
      f'{FLAGS.prefixes} must have one line per input line, got {len(prefixes)} lines for an input of {len(lines)}'
    )
  return [lines[start : start + size] for start in range(0, len(lines), size)]


def _check_hypothesis_count(nbest: int, hypothesis_count: int) -> None:
  """Raises UserError if a line has fewer hypotheses than --nbest, or fewer than two with --mbr."""
  if nbest > hypothesis_count:
    limit = f'--samples={FLAGS.samples}' if FLAGS.samples else f'--beams={hypothesis_count}'
    raise UserError(f'--nbest must be at most {limit}, got {FLAGS.nbest}')
  if FLAGS.mbr and hypothesis_count < 2:
    raise UserError(f'--mbr={FLAGS.mbr} compares hypotheses; --samples or --beams must be at least 2')


def _output_function(nbest: int) -> Callable[[int, str, Sequence[str], Sequence[Any]], None]:
  """Returns the function that prints the hypotheses of a line: (number, line, source tokens, hypotheses) -> None."""
  if FLAGS.json:
    return _print_json
  if FLAGS.nbest or FLAGS.alignments or nbest > 1:
    return _print_columns
  return _print_text


def _sampling_options():
  """Returns the Sampling that the flags set; None without --samples.

  Raises:
    UserError: for options of sampling without --samples, and for options of search with it.
  """
  from attention_jax.decoding.sampling import Sampling

  options = {name: FLAGS[name].value for name in SAMPLING_OPTIONS}
  if FLAGS.samples is None:
    for name, value in options.items():
      if value != FLAGS[name].default:
        raise UserError(f'--{name}={value} is an option of --samples, which is missing')
    return None
  search_flags = [f'--{name}={value}' for name, value in search_overrides().items() if name not in SHARED_FLAGS]
  if search_flags:
    raise UserError(f'--samples={FLAGS.samples} cannot be combined with {search_flags[0]}, an option of search')
  return Sampling(FLAGS.samples, **options)


def _check_search_flags() -> None:
  """Raises UserError for flags of diverse beam search and reranking that are wrong or have no effect."""
  from attention_jax.decoding.metrics import compute_metric

  if FLAGS.samples and FLAGS.groups > 1:
    raise UserError(f'--samples={FLAGS.samples} cannot be combined with --groups={FLAGS.groups}, an option of search')
  if FLAGS.groups == 1 and FLAGS.diversity != FLAGS['diversity'].default:
    raise UserError(f'--diversity={FLAGS.diversity} is an option of --groups, which must be at least 2')
  if FLAGS.mbr is not None:
    compute_metric(FLAGS.mbr, ['a'], [['a']])  # reports a mistake in the spec before the search


def _check_stream_flags(workdir: str, checkpoint: str) -> None:
  """Raises UserError for flags that cannot be combined with --stream, and for ensembles."""
  from attention_jax.systems.runs import split_commas

  for name, allowed in STREAM_VALUES.items():
    value = FLAGS[name].value
    if value is not None and value != allowed:
      raise UserError(
        f'--{name}={value} cannot be combined with --stream, which translates each line of stdin greedily as it arrives'
      )
  for name, value in (('workdir', workdir), ('checkpoint', checkpoint)):
    if len(split_commas(value, name)) > 1:
      raise UserError(f'--{name}={value}: --stream needs a single {name}, not an ensemble')


def _translate_stream(run) -> None:
  """Prints each token of a line as soon as enough of the line has arrived."""
  from attention_jax.data import incremental
  from attention_jax.data.vocab import unknown_characters
  from attention_jax.decoding.streaming import StreamingTranslator

  if run.config.evaluation.replace_unknown:
    raise UserError('--stream cannot replace unknown words, but the config of the run does; use --noreplace_unknown')
  predictor = run.predictor
  max_length = predictor.max_length
  translate = StreamingTranslator(
    run.model,
    run.params,
    predictor.source_vocab,
    predictor.target_vocab,
    max_length=max_length,
    constraints=predictor.constraints,
  )
  empty = []
  truncated = []
  characters = set()

  def collect_characters(line: Iterable[str]) -> Iterator[str]:
    for character in line:
      characters.add(character)
      yield character

  for number, line in enumerate(incremental.iter_lines(sys.stdin.buffer.read1, 'stdin'), 1):
    length = 0
    for text, _ in translate(collect_characters(line)):
      print(text, end='', flush=True)
      length += 1
    print(flush=True)
    if length == 0:
      empty.append(number)
    if length >= max_length:
      truncated.append(number)
  _report_problems(empty, truncated, max_length, unknown_characters(predictor.source_vocab, characters))


def _report_problems(
  empty: list[int],
  truncated: list[int],
  max_length: int,
  unknown: Iterable[str],
  without_hypothesis: Sequence[int] = (),
) -> None:
  """Reports on stderr the lines whose output is empty or may be truncated, and unknown characters of the sources.

  Args:
    empty: numbers of lines that are empty.
    truncated: numbers of lines whose output has the maximum length.
    max_length: the maximum length of an output.
    unknown: characters of the sources that the vocabulary lacks.
    without_hypothesis: numbers of lines that are too long for the model, or whose hypotheses all have probability 0.
  """
  from attention_jax.data.text import format_count, format_line_numbers
  from attention_jax.data.vocab import format_characters

  if empty:
    print(f'{format_count(len(empty), "empty line")} gave empty output ({format_line_numbers(empty)})', file=sys.stderr)
  if without_hypothesis:
    count = format_count(len(without_hypothesis), 'line')
    reason = 'longer than the model can read, or without a hypothesis of finite log-probability'
    print(f'{count} gave empty output ({format_line_numbers(without_hypothesis)}): {reason}', file=sys.stderr)
  if truncated:
    count = format_count(len(truncated), 'output')
    limit = f'evaluation.max_length or the longest bucket of the run allows {max_length} tokens'
    print(f'{count} may be truncated ({format_line_numbers(truncated)}): {limit}', file=sys.stderr)
  if unknown:
    print(f'sources have {format_characters(sorted(unknown))}', file=sys.stderr)


def _print_text(number, line, tokens, hypotheses) -> None:
  print(hypotheses[0].text if hypotheses else '')


def _print_columns(number, line, tokens, hypotheses) -> None:
  for hypothesis in hypotheses:
    columns = [number, f'{hypothesis.score:.4f}', hypothesis.text]
    if FLAGS.alignments:
      columns.append(format_pharaoh(hypothesis.alignment))
    print(*columns, sep='\t')


def _print_json(number, line, tokens, hypotheses) -> None:
  records = [
    {
      'text': hypothesis.text,
      'score': hypothesis.score,
      'log_prob': hypothesis.log_prob,
      'tokens': hypothesis.tokens,
      'alignment': hypothesis.alignment,
      'weights': round_weights(hypothesis.weights),
    }
    for hypothesis in hypotheses
  ]
  sampled = FLAGS.samples is not None
  record = {'line': number, 'source': line, 'source_tokens': tokens, 'sampled': sampled, 'hypotheses': records}
  print(to_json(record, ensure_ascii=False))


if __name__ == '__main__':
  launch(main)
