"""Lines through a pipe: --stream translates them while they arrive, and without it each is printed once it is read."""

import itertools

import pytest

from attention_jax.decoding.streaming import StreamingTranslator
from attention_jax.systems.runs import open_run
from tests.experiments.helpers import WORDS, run, start_translate, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error

# Initial parameters with scores around 0 select about half of all positions, so that outputs differ.
STREAMING_FIELDS = (
  'model.attention.alignment=monotonic',
  'model.attention.score=offset_additive(offset=0.0)',
  'model.attention.features=16',
  'model.encoder=rnn(rnn="gru", features=16)',
  'model.decoder=luong(features=16, bridge=False)',
  'model.embedding=16',
  'training.evaluate_every=0',
  'training.schedule=constant(rate=1e-6)',
  'training.steps=1',
  'training.seed=2',
  "data.task=tsv(train='train.tsv', test='test.tsv')",
  'evaluation.beams=1',
)
LINES = [' '.join(words) for size in (1, 3, 4) for words in itertools.islice(itertools.permutations(WORDS, size), 5)]


@pytest.fixture(scope='module')
def streaming_run(task, tmp_path_factory):
  """The folder of a run that can stream."""
  folder = tmp_path_factory.mktemp('streaming') / 'run'
  result = run('train', *tiny_arguments(task, folder, *(f'--config.{field}' for field in STREAMING_FIELDS)))
  assert result.code == 0, result.err
  return folder


def early_output(folder) -> tuple[str, str]:
  """Returns a proper prefix of a line, and the text that is emitted after reading it."""
  opened = open_run(folder)
  vocabularies = opened.predictor.source_vocab, opened.predictor.target_vocab
  translate = StreamingTranslator(opened.model, opened.params, *vocabularies, max_length=opened.predictor.max_length)
  for line in LINES:
    read = []
    emitted = {}  # number of characters read -> text emitted after them
    for text, _ in translate(character for character in line if read.append(character) is None):
      emitted[len(read)] = emitted.get(len(read), '') + text
    first = min(emitted)
    if first < len(line) and emitted[first]:
      return line[:first], emitted[first]
  raise AssertionError('no line is translated before its end')


@pytest.mark.long
@pytest.mark.parametrize(
  'constraints', [(), ('--no_repeat_ngram_size=1', '--min_length=2')], ids=['free', 'constrained']
)
def test_streamed_lines_are_those_of_greedy_search(streaming_run, constraints):
  lines = '\n'.join([*LINES, '', 'eins  neun\r', ' ']).encode()
  flags = (f'--workdir={streaming_run}', *constraints)
  searched = run('translate', *flags, '--beams=1', stdin=lines)
  streamed = run('translate', *flags, '--stream', stdin=lines)
  assert searched.code == streamed.code == 0 and streamed.out == searched.out
  # Unknown characters are those of what was read: a stream does not read a line after its last output token.
  reports = [[line for line in x.err.splitlines() if 'lacks' not in line] for x in (searched, streamed)]
  assert reports[0] == reports[1]
  assert constraints or len(set(searched.out.splitlines())) > 3  # outputs differ
  for words in map(str.split, streamed.out.splitlines() if constraints else ()):
    assert not words or (len(words) >= 2 and len({*words}) == len(words))


@pytest.mark.long
def test_tokens_are_printed_before_the_line_has_ended(streaming_run):
  prefix, text = early_output(streaming_run)
  translate = start_translate(f'--workdir={streaming_run}', '--stream')
  try:
    translate.stdin.write(prefix)
    translate.stdin.flush()
    assert translate.stdout.read(len(text)) == text  # neither the line nor the file has ended
    translate.stdin.write('\n\neins zwei\n')
    translate.stdin.flush()
    remaining_lines = ''.join(translate.stdout.readline() for _ in range(3))
    out, err = translate.communicate(timeout=60)
  finally:
    translate.kill()
  expected = run('translate', f'--workdir={streaming_run}', '--beams=1', stdin=f'{prefix}\n\neins zwei\n'.encode())
  assert (translate.returncode, text + remaining_lines + out, err) == expected


@pytest.mark.long
@pytest.mark.parametrize(('flags', 'read_first'), [((), 1), (('--buffer=2', '--nbest=1'), 2)])
def test_lines_of_an_open_pipe_are_printed_before_it_is_closed(trained, flags, read_first):
  lines = ['eins zwei\n', '\n', 'drei\n', 'vier eins\n']
  expected = run('translate', f'--workdir={trained[0]}', *flags, stdin=''.join(lines).encode())
  printed = expected.out.splitlines(keepends=True)
  translate = start_translate(f'--workdir={trained[0]}', *flags)
  try:
    translate.stdin.writelines(lines[:read_first])
    translate.stdin.flush()
    assert translate.stdout.readline() == printed[0]  # the pipe is open
    translate.stdin.writelines(lines[read_first:])
    out, err = translate.communicate(timeout=60)
  finally:
    translate.kill()
  assert (translate.returncode, printed[0] + out, err) == expected


@pytest.mark.parametrize(
  'flag', ['--buffer=1', '--nbest=2', '--alignments', '--json', '--beams=2', '--input=lines.txt']
)
def test_options_that_cannot_be_combined_with_stream_are_errors(flag, tmp_path):
  assert_user_error(run('translate', f'--workdir={tmp_path}', '--stream', flag), [flag.split('=')[0], 'with --stream'])


@pytest.mark.long
def test_runs_and_input_that_cannot_be_streamed_are_errors(trained, streaming_run):
  for folder, stdin, parts in [
    (trained[0], b'eins', ["'bahdanau'", 'bahdanau(bridge=False)', 'gnmt(bridge=False)']),
    (streaming_run, b'', ['stdin: the file is empty']),
    (streaming_run, b'\xff', ['stdin:1: not UTF-8', '0xff']),
    (streaming_run, b'eins\n' + b' ' * 100_001, ['stdin:2: the line is too long; expected at most 100,000 characters']),
  ]:
    assert_user_error(run('translate', f'--workdir={folder}', '--stream', stdin=stdin), parts)
