"""Options of translate, evaluate, score and align, on a tiny run."""

import json

import pytest

from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error

INPUT = b'eins zwei\n\ndrei'


def read_columns(result):
  """Returns the fields of every line of output."""
  assert result.code == 0, result
  return [line.split('\t') for line in result.out.splitlines()]


@pytest.mark.long
def test_diverse_beams_do_not_repeat_hypotheses(trained):
  rows = read_columns(run('translate', f'--workdir={trained[0]}', '--beams=4', '--groups=2', '--nbest=4', stdin=INPUT))
  assert {number for number, *_ in rows} == {'1', '3'} and len(rows) > 4
  assert len({(number, text) for number, _, text, *_ in rows}) == len(rows)  # no repetition


@pytest.mark.long
def test_unknown_characters_of_a_line_are_reported(trained):
  result = run('translate', f'--workdir={trained[0]}', stdin='eins Я😀'.encode())
  assert result.err.splitlines()[-1] == "sources have 2 characters that the source vocabulary lacks: 'Я', '😀'"


def test_samples_of_a_line_do_not_depend_on_the_other_lines(trained):
  def samples_of_line_3(lines_before):
    arguments = (f'--workdir={trained[0]}', '--samples=4', '--temperature=3')
    rows = read_columns(run('translate', *arguments, stdin=lines_before + b'drei'))
    return [text for number, _, text in rows if number == '3']

  samples = samples_of_line_3(b'eins zwei\n\n')
  assert len(samples) == 4 and samples == samples_of_line_3(b'eins zwei\nvier\n')


@pytest.mark.long
def test_runs_and_checkpoints_of_one_run_are_ensembles(trained):
  folder = trained[0]
  last = open_run(folder, 'latest').step
  for member, ensemble in [
    ([f'--workdir={folder}', '--checkpoint=average'], [f'--workdir={folder}, {folder}', '--checkpoint=average']),
    ([f'--workdir={folder}', '--checkpoint=latest'], [f'--workdir={folder}', f'--checkpoint={last},latest']),
  ]:
    alone = run('translate', *member, stdin=INPUT)
    assert alone.code == 0 and run('translate', *ensemble, stdin=INPUT).out == alone.out
  result = run('evaluate', f'--workdir={folder}', f'--checkpoint={last},best', '--split=train')
  assert result.code == 0 and f'train (steps {last}, ' in result.out


def test_a_tilde_is_the_home_folder(trained, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(trained[0].parent))
  (tmp_path / 'lines').write_bytes(INPUT)
  home = f'--workdir=~/{trained[0].name}'
  assert run('translate', home, f'--input={tmp_path}/lines').out == run('translate', home, stdin=INPUT).out != ''


@pytest.mark.long
def test_a_run_can_compute_in_another_dtype(trained):
  scores = {}
  for dtype in ('float32', 'bfloat16'):
    rows = read_columns(run('translate', f'--workdir={trained[0]}', f'--dtype={dtype}', '--nbest=1', stdin=INPUT))
    scores[dtype] = [float(score) for _, score, *_ in rows]
  assert scores['bfloat16'] != scores['float32'] == pytest.approx(scores['bfloat16'], rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize('search', ['--beams=3', '--samples=1'])
def test_outputs_satisfy_constraints(trained, search):
  flags = [f'--workdir={trained[0]}', search, '--no_repeat_ngram_size=1', '--min_length=3', '--max_length=6', '--json']
  result = run('translate', *flags, stdin=INPUT)
  assert result.code == 0, result.err
  records = [json.loads(line) for line in result.out.splitlines()]
  for hypothesis in records[0]['hypotheses'] + records[2]['hypotheses']:
    tokens = hypothesis['tokens']
    assert 3 <= len(tokens) == len({*tokens}) and len(hypothesis['weights']) == len(tokens) + 1


@pytest.mark.long
def test_outputs_begin_with_their_prefixes(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  (tmp_path / 'prefixes').write_text('drei\n\n\n')
  plain = run('translate', workdir, stdin=INPUT).out.splitlines()
  lines = run('translate', workdir, f'--prefixes={tmp_path}/prefixes', stdin=INPUT).out.splitlines()
  assert lines[0].split()[0] == 'drei' != plain[0].split()[0] and lines[1:] == plain[1:]


def test_minimum_bayes_risk_reranking_selects_one_of_the_samples(trained):
  sampling = [f'--workdir={trained[0]}', '--samples=4', '--temperature=3']
  reranked = run('translate', *sampling, '--mbr=chrf', stdin=INPUT).out.splitlines()
  samples = read_columns(run('translate', *sampling, stdin=INPUT))
  assert len(reranked) == 3 and reranked[0] in {text for number, _, text in samples if number == '1'}
  beams = [f'--workdir={trained[0]}', '--beams=4', '--nbest=4', '--mbr=chrf']
  ranked = read_columns(run('translate', *beams, stdin=INPUT))
  assert len({(number, text) for number, _, text in ranked}) == len(ranked)


@pytest.mark.long
def test_flags_override_the_search_of_the_config(trained):
  workdir = f'--workdir={trained[0]}'
  plain = read_columns(run('translate', workdir, '--nbest=1', stdin=INPUT))
  sums = read_columns(run('translate', workdir, '--nbest=1', '--alpha=0', '--beta=0', stdin=INPUT))
  assert all(float(row[1]) < float(with_penalty[1]) for row, with_penalty in zip(sums, plain, strict=True))
  short = run('translate', workdir, '--max_length=1', stdin=INPUT)
  assert all(len(line.split()) <= 1 for line in short.out.splitlines()) and '2 outputs may be truncated' in short.err
  result = run('evaluate', workdir, '--split=train', '--beams=2', '--gamma=0.5')
  assert result.code == 0 and 'beams=2, alpha=0.6, beta=0.0, gamma=0.5' in result.out, result


@pytest.mark.long
def test_translations_in_a_file_are_scored(trained, tmp_path):
  (tmp_path / 'source').write_text('eins zwei\n\ndrei\n')
  (tmp_path / 'target').write_text('one two\n\nthree three\n')
  files = [f'--{side}={tmp_path / side}' for side in ('source', 'target')]
  result = run('score', f'--workdir={trained[0]}', *files)
  assert result.code == 0 and '1 pair with a blank side skipped (line 2)' in result.err
  records = [json.loads(line) for line in result.out.splitlines()]
  assert [(record['line'], record['tokens']) for record in records] == [(1, ['one', 'two']), (3, ['three', 'three'])]
  for record in records:
    assert len(record['log_probs']) == len(record['tokens']) + 1 == len(record['weights'])
    assert record['log_prob'] == pytest.approx(sum(record['log_probs'])) and record['log_prob'] < 0


def write_pairs(folder):
  """Writes two pairs and their gold links, with a blank line between; returns the flags that name the files."""
  folder.mkdir(exist_ok=True)
  for name, text in (('source', 'a b c\n\nd\n'), ('target', 'A B C\n\nD\n'), ('gold', '0-0 1-1 2?2\n\n0-0\n')):
    (folder / name).write_text(text)
  return [f'--{name}={folder / name}' for name in ('source', 'target', 'gold')]


@pytest.fixture
def links_flags(tmp_path):
  """The flags of align for the pairs and the links of both directions in files."""
  for name, links in (('forward', '0-0 1-2\n\n0-0\n'), ('reverse', '0-0 1-1\n\n0-0\n')):
    (tmp_path / name).write_text(links)
  return [*write_pairs(tmp_path), f'--links={tmp_path / "forward"},{tmp_path / "reverse"}']


def test_alignments_of_both_directions_are_joined_and_scored(links_flags):
  result = run('align', *links_flags)
  assert (result.code, result.out) == (0, '0-0 1-1 1-2\n\n0-0\n'), result
  assert result.err.splitlines()[1:] == [
    # A has 3 links, S 3: 1 - (2 + 2) / 6
    'forward: alignment error rate 33.33 %, precision 66.67 %, recall 66.67 %, 3 links, 2 sentences',
    'reverse: alignment error rate 0.00 %, precision 100.00 %, recall 100.00 %, 3 links, 2 sentences',
    'grow_diag_final_and: alignment error rate 14.29 %, precision 75.00 %, recall 100.00 %, 4 links, 2 sentences',
  ]
  for name, links in {'intersection': '0-0', 'forward': '0-0 1-2', 'reverse': '0-0 1-1'}.items():
    assert run('align', *links_flags, f'--symmetrisation={name}').out == f'{links}\n\n0-0\n'


def test_mistakes_of_align_are_reported_in_one_line(links_flags, tmp_path):
  one_direction = '--symmetrisation has no effect on one direction; add --reverse'
  runs = ['--workdir=runs/a', '--reverse=runs/b', '--checkpoint=a.safetensors']
  for flags, message in [
    ([*links_flags, '--symmetrisation=gro'], "unknown symmetrisation 'gro'"),
    ([*links_flags, '--reverse=runs/b'], '--reverse has no effect with --links'),
    ([*links_flags, '--checkpoint=latest'], '--checkpoint has no effect with --links'),
    ([*links_flags, '--dtype=bfloat16'], '--dtype has no effect with --links'),
    ([*links_flags[:3], '--workdir=runs/b', '--symmetrisation=union'], one_direction),
    ([*links_flags[:3], f'--links={tmp_path / "forward"}', '--symmetrisation=union'], one_direction),
    ([*links_flags[:3], *runs], 'a file of weights belongs to one direction'),
    (links_flags[:3], '--workdir is missing'),
  ]:
    assert_user_error(run('align', *flags), [message])
  (tmp_path / 'forward').write_text('0-0 1?2\n\n0-0\n')
  assert_user_error(run('align', *links_flags), ["has possible links such as '1?0', which only --gold may have"])


def test_a_run_aligns_translations_in_a_file(trained, tmp_path):
  flags = [f'--workdir={trained[0]}', *write_pairs(tmp_path)]
  result = run('align', *flags, f'--reverse={trained[0]}', '--symmetrisation=union')
  assert result.code == 0, result
  for line, forward in zip(result.out.splitlines(), run('align', *flags[:3]).out.splitlines(), strict=True):
    assert set(forward.split()) <= set(line.split())


def test_layers_have_alignment_error_rates_of_a_split_or_against_another_program(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  plot = tmp_path / 'heads.png'
  result = run('align', workdir, '--layers', '--split=test', f'--plot={plot}')
  assert result.code == 0 and plot.exists(), result
  assert result.out.splitlines()[0].startswith('alignment error rate of layers (L) and heads (H), %, 5 sentences')
  (rate,) = [line.split()[1] for line in result.out.splitlines() if line.split()[:1] == ['L0']]
  evaluated = run('evaluate', workdir, '--split=test', '--beams=1')
  assert rate in next(line for line in evaluated.out.splitlines() if 'alignment_error_rate' in line).split()
  files = write_pairs(tmp_path / 'files')
  own = tmp_path / 'own.links'
  own.write_text(run('align', workdir, *files[:2]).out)  # in place of another program
  assert run('align', workdir, '--layers', *files[:2], f'--gold={own}').out.split()[-1] == '0.00'
  for flags, message in [
    (['--split=test', '--source=a'], '--source has no effect with --split'),
    (['--split=test', '--level=char'], '--level has no effect with --split'),
    (['--split=test', f'--reverse={trained[0]}'], '--reverse has no effect with --layers'),
    (['--split=tset'], "unknown split 'tset'"),
    (['--split=test', f'--gold={own}'], '--split=test has 5 lines but'),
    (files[:2], '--gold is missing'),
  ]:
    assert_user_error(run('align', workdir, '--layers', *flags), [message])
  assert_user_error(run('align', workdir, *files, '--split=test'), ['--split needs --layers'])


@pytest.mark.long
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--beams=3', '--groups=2'], 'groups must be at least 1 and divide beams=3, got groups=2'),
    (['--samples=2', '--groups=2'], '--samples=2 cannot be combined with --groups=2, an option of search'),
    (['--samples=2', '--alpha=1'], '--samples=2 cannot be combined with --alpha=1.0, an option of search'),
    (['--stream', '--beta=1'], '--beta=1.0 cannot be combined with --stream'),
    (['--stream', '--groups=2'], '--groups=2 cannot be combined with --stream'),
    (['--stream', '--checkpoint=best,latest'], '--stream needs a single checkpoint'),
    (['--diversity=2'], '--diversity=2.0 is an option of --groups, which must be at least 2'),
    (['--mbr=blue'], "unknown metric 'blue'"),
    (['--mbr='], '--mbr= is empty'),
    (['--mbr=chrf', '--beams=1'], '--mbr=chrf compares hypotheses; --samples or --beams must be at least 2'),
    (['--mbr=chrf', '--samples=1'], '--mbr=chrf compares hypotheses; --samples or --beams must be at least 2'),
    (['--prefixes=/dev/null'], '/dev/null: is a pipe or a device, expected a file'),
    (['--dtype=float8'], "unknown dtype 'float8'"),
    (['--min_length=4', '--max_length=4'], 'search: min_length must be less than max_length=4, which includes EOS'),
    (['--min_length=-1'], '--min_length=-1'),
  ],
)
def test_mistakes_are_reported_in_one_line(trained, flags, message):
  assert_user_error(run('translate', f'--workdir={trained[0]}', *flags, stdin=INPUT), [message])


def test_a_mistake_in_mbr_is_reported_before_the_run_is_opened():
  result = run('translate', '--workdir=none', "--mbr=bleu(tokenize='spm')", stdin=INPUT)
  assert_user_error(result, ["error: unknown tokenizer of bleu 'spm'"])
