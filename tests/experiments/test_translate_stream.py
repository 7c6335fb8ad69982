"""translate --stream: lines through a real pipe, answered while they arrive, as greedy search answers whole lines."""

import itertools

import pytest

from attention_jax.inference.streaming import StreamingTranslator
from attention_jax.systems.runs import open_run
from tests.experiments.helpers import WORDS, run, start_translate, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error

# As it was drawn, with scores around 0: about half of all positions are selected, and outputs differ.
FOLLOWS = (
  '--config.model.attention.alignment=monotonic',
  '--config.model.attention.score=offset_additive(offset=0.0)',
  '--config.model.encoder=rnn(rnn="gru", features=16)',
  '--config.model.decoder=luong(features=16, bridge=False)',
  '--config.model.attention.features=16',
  '--config.model.embedding=16',
  '--config.training.schedule=constant(rate=1e-6)',
  '--config.training.steps=1',
  '--config.training.seed=2',
  "--config.data.task=tsv(train='train.tsv')",
  '--config.evaluation.beams=1',
)
LINES = [' '.join(words) for size in (1, 3, 4) for words in itertools.islice(itertools.permutations(WORDS, size), 5)]


@pytest.fixture(scope='module')
def follows(task, tmp_path_factory):
  """The folder of a run that can follow its source."""
  folder = tmp_path_factory.mktemp('follows') / 'run'
  ran = run('train', *tiny_arguments(task, folder, *FOLLOWS))
  assert ran.code == 0, ran.err
  return folder


def begins(folder) -> tuple[str, str]:
  """A line that is translated from less than all of it: what must be read of it, and what is told of it by then."""
  opened = open_run(folder)
  of = opened.predictor
  interpret = StreamingTranslator(
    opened.model, opened.params, of.source_vocab, of.target_vocab, max_length=of.max_length
  )
  for line in LINES:
    taken, told = [], []
    for added, _ in interpret(taken.append(character) or character for character in line):
      told.append((''.join(taken), added))
    read = told[0][0]
    if read != line and (text := ''.join(added for known, added in told if known == read)):
      return read, text
  raise AssertionError('no line is translated before its end')


def test_streamed_lines_are_those_of_greedy_search(follows):
  given = '\n'.join([*LINES, '', 'eins  neun\r', ' ']).encode()
  whole = run('translate', f'--workdir={follows}', '--beams=1', stdin=given)
  streamed = run('translate', f'--workdir={follows}', '--stream', stdin=given)
  assert whole.code == 0 and streamed == whole
  assert len(set(whole.out.splitlines())) > 3  # they differ


def test_tokens_come_through_a_pipe_before_the_line_has_ended(follows):
  read, text = begins(follows)
  translate = start_translate(f'--workdir={follows}', '--stream')
  try:
    translate.stdin.write(read)
    translate.stdin.flush()
    assert translate.stdout.read(len(text)) == text  # the line has not ended, nor has the file
    translate.stdin.write('\n\neins zwei\n')
    translate.stdin.flush()
    rest = ''.join(translate.stdout.readline() for _ in range(3))
    out, err = translate.communicate(timeout=60)
  finally:
    translate.kill()
  expected = run('translate', f'--workdir={follows}', '--beams=1', stdin=f'{read}\n\neins zwei\n'.encode())
  assert (translate.returncode, text + rest + out, err) == expected


@pytest.mark.parametrize('flag', ['--nbest=2', '--alignments', '--json', '--beams=2', '--input=lines.txt'])
def test_what_cannot_be_streamed(flag, tmp_path):
  assert_user_error(run('translate', f'--workdir={tmp_path}', '--stream', flag), [flag.split('=')[0], 'with --stream'])


def test_runs_and_input_that_cannot_be_streamed(trained, follows):
  ran = run('translate', f'--workdir={trained[0]}', '--stream', stdin=b'eins')
  assert_user_error(ran, ["model.decoder is 'bahdanau'; possible: bahdanau(bridge=False), gnmt(bridge=False), "])
  workdir = f'--workdir={follows}'
  assert_user_error(run('translate', workdir, '--stream', stdin=b''), ['stdin: the file is empty'])
  assert_user_error(run('translate', workdir, '--stream', stdin=b'\xff'), ['stdin:1: not UTF-8', '0xff'])
