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
def test_ensembles_are_evaluated_and_averaged(trained):
  twice = f'--workdir={trained[0]}, {trained[0]}'
  assert run('evaluate', twice, '--split=train').code == 0
  average = run('translate', f'--workdir={trained[0]}', '--checkpoint=average', stdin=INPUT)
  assert average.code == 0 and run('translate', twice, '--checkpoint=average', stdin=INPUT).out == average.out


@pytest.mark.long
def test_checkpoints_of_one_run_are_an_ensemble(trained):
  workdir = f'--workdir={trained[0]}'
  last = open_run(trained[0], 'latest').step
  alone = run('translate', workdir, '--checkpoint=latest', stdin=INPUT).out
  assert run('translate', workdir, f'--checkpoint={last},latest', stdin=INPUT).out == alone
  result = run('evaluate', workdir, f'--checkpoint={last},best', '--split=train')
  assert result.code == 0 and f'train (steps {last}, ' in result.out
  assert_user_error(
    run('translate', workdir, '--checkpoint=77'), ['unknown checkpoint of', "'77'", 'expected one of: 2, 4']
  )
  assert_user_error(run('translate', workdir, '--checkpoint=bst'), ["'bst' (did you mean 'best'?)", 'average'])
  assert_user_error(
    run('translate', workdir, '--checkpoint=best,latest', '--stream'), ['--stream needs a single checkpoint']
  )
  result = run('translate', workdir, '--checkpoint=best,')
  assert_user_error(result, ['checkpoint must be', "got 'best,'"])
  assert_user_error(run('translate', workdir, '--mbr=', stdin=INPUT), ['--mbr= is empty'])


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
  assert_user_error(
    run('translate', f'--workdir={trained[0]}', '--dtype=float8'), ["unknown dtype 'float8'", 'bfloat16']
  )


@pytest.mark.long
@pytest.mark.parametrize('search', ['--beams=1', '--beams=3', '--samples=1'])
def test_outputs_satisfy_constraints(trained, search):
  workdir = f'--workdir={trained[0]}'
  result = run(
    'translate', workdir, search, '--no_repeat_ngram_size=1', '--min_length=3', '--json', '--max_length=6', stdin=INPUT
  )
  assert result.code == 0, result.err
  records = [json.loads(line) for line in result.out.splitlines()]
  for hypothesis in records[0]['hypotheses'] + records[2]['hypotheses']:
    tokens = hypothesis['tokens']
    assert 3 <= len(tokens) == len({*tokens}) and len(hypothesis['weights']) == len(tokens) + 1


@pytest.mark.long
def test_a_minimum_length_beyond_the_maximum_is_an_error(trained):
  expected = ['search: min_length must be less than max_length=4, which includes EOS, got 4']
  flags = ('--min_length=4', '--max_length=4')
  assert_user_error(run('translate', f'--workdir={trained[0]}', *flags, stdin=INPUT), expected)
  assert_user_error(run('translate', f'--workdir={trained[0]}', '--min_length=-1'), ['--min_length=-1', 'non-negative'])


@pytest.mark.long
def test_outputs_begin_with_their_prefixes(trained, tmp_path):
  plain = run('translate', f'--workdir={trained[0]}', stdin=INPUT).out.splitlines()
  prefixes = tmp_path / 'prefixes'
  prefixes.write_text('drei\n\n\n')
  lines = run('translate', f'--workdir={trained[0]}', f'--prefixes={prefixes}', stdin=INPUT).out.splitlines()
  assert lines[0].split()[0] == 'drei' != plain[0].split()[0] and lines[1:] == plain[1:]


def test_minimum_bayes_risk_reranking_selects_one_of_the_samples(trained):
  reranked = run('translate', f'--workdir={trained[0]}', '--samples=4', '--temperature=3', '--mbr=chrf', stdin=INPUT)
  samples = read_columns(run('translate', f'--workdir={trained[0]}', '--samples=4', '--temperature=3', stdin=INPUT))
  assert reranked.out.count('\n') == 3
  assert reranked.out.splitlines()[0] in {text for number, _, text in samples if number == '1'}
  ranked = read_columns(
    run('translate', f'--workdir={trained[0]}', '--beams=4', '--nbest=4', '--mbr=chrf', stdin=INPUT)
  )
  assert len({(number, text) for number, _, text in ranked}) == len(ranked)


@pytest.mark.long
def test_flags_override_the_search_of_the_config(trained, tmp_path):
  plain = read_columns(run('translate', f'--workdir={trained[0]}', '--nbest=1', stdin=INPUT))
  sums = read_columns(run('translate', f'--workdir={trained[0]}', '--nbest=1', '--alpha=0', '--beta=0', stdin=INPUT))
  assert all(
    float(without_penalty[1]) < float(with_penalty[1])
    for without_penalty, with_penalty in zip(sums, plain, strict=True)
  )  # no length penalty
  short = run('translate', f'--workdir={trained[0]}', '--max_length=1', stdin=INPUT)
  assert all(len(line.split()) <= 1 for line in short.out.splitlines()) and '2 outputs may be truncated' in short.err
  result = run('evaluate', f'--workdir={trained[0]}', '--split=train', '--beams=2', '--gamma=0.5')
  assert result.code == 0 and 'beams=2, alpha=0.6, beta=0.0, gamma=0.5' in result.out, result


@pytest.mark.long
def test_translations_in_a_file_are_scored(trained, tmp_path):
  paths = [tmp_path / name for name in ('source', 'target')]
  paths[0].write_text('eins zwei\n\ndrei\n')
  paths[1].write_text('one two\n\nthree three\n')
  result = run('score', f'--workdir={trained[0]}', f'--source={paths[0]}', f'--target={paths[1]}')
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


def test_alignments_of_both_directions_are_joined_and_scored(tmp_path):
  flags = write_pairs(tmp_path)
  for name, links in (('forward', '0-0 1-2\n\n0-0\n'), ('reverse', '0-0 1-1\n\n0-0\n')):
    (tmp_path / name).write_text(links)
  flags.append(f'--links={tmp_path / "forward"},{tmp_path / "reverse"}')
  result = run('align', *flags)
  assert (result.code, result.out) == (0, '0-0 1-1 1-2\n\n0-0\n'), result
  assert result.err.splitlines()[1:] == [
    # A has 3 links, S 3: 1 - (2 + 2) / 6
    'forward: alignment error rate 33.33 %, precision 66.67 %, recall 66.67 %, 3 links, 2 sentences',
    'reverse: alignment error rate 0.00 %, precision 100.00 %, recall 100.00 %, 3 links, 2 sentences',
    'grow_diag_final_and: alignment error rate 14.29 %, precision 75.00 %, recall 100.00 %, 4 links, 2 sentences',
  ]
  assert run('align', *flags, '--symmetrisation=intersection').out == '0-0\n\n0-0\n'
  assert run('align', *flags, '--symmetrisation=forward').out == '0-0 1-2\n\n0-0\n'
  assert run('align', *flags, '--symmetrisation=reverse').out == '0-0 1-1\n\n0-0\n'
  assert_user_error(run('align', *flags, '--symmetrisation=gro'), ["unknown symmetrisation 'gro'"])
  for flag in ('--reverse=runs/b', '--checkpoint=latest', '--dtype=bfloat16'):
    assert_user_error(run('align', *flags, flag), [f'{flag.split("=")[0]} has no effect with --links'])
  for one_direction in (['--workdir=runs/b'], [f'--links={tmp_path / "forward"}']):
    result = run('align', *flags[:3], *one_direction, '--symmetrisation=union')
    assert_user_error(result, ['--symmetrisation has no effect on one direction; add --reverse'])
  runs = ['--workdir=runs/a', '--reverse=runs/b', '--checkpoint=a.safetensors']
  assert_user_error(run('align', *flags[:3], *runs), ['a file of weights belongs to one direction'])
  (tmp_path / 'forward').write_text('0-0 1?2\n\n0-0\n')
  assert_user_error(run('align', *flags), ["forward has possible links such as '1?0', which only --gold may have"])


def test_a_run_aligns_translations_in_a_file(trained, tmp_path):
  flags = write_pairs(tmp_path)
  result = run('align', f'--workdir={trained[0]}', f'--reverse={trained[0]}', *flags, '--symmetrisation=union')
  assert result.code == 0, result
  forward = run('align', f'--workdir={trained[0]}', *flags[:2])
  for line, line_of_forward in zip(result.out.splitlines(), forward.out.splitlines(), strict=True):
    assert set(line_of_forward.split()) <= set(line.split())
  assert '--workdir is missing' in run('align', *flags).err


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
    (['--beams=1', '--groups=2'], 'groups must be at least 1 and divide beams=1, got groups=2'),
    (['--samples=2', '--groups=2'], '--samples=2 cannot be combined with --groups=2, an option of search'),
    (['--samples=2', '--alpha=1'], '--samples=2 cannot be combined with --alpha=1.0, an option of search'),
    (['--stream', '--beta=1'], '--beta=1.0 cannot be combined with --stream'),
    (['--diversity=2'], '--diversity=2.0 is an option of --groups, which must be at least 2'),
    (['--mbr=blue'], "unknown metric 'blue'"),
    (['--mbr=chrf', '--beams=1'], '--mbr=chrf compares hypotheses; --samples or --beams must be at least 2'),
    (['--mbr=chrf', '--samples=1'], '--mbr=chrf compares hypotheses; --samples or --beams must be at least 2'),
    (['--prefixes=/dev/null'], '/dev/null: is a pipe or a device, expected a file'),
    (['--stream', '--groups=2'], '--groups=2 cannot be combined with --stream'),
  ],
)
def test_mistakes_are_reported_in_one_line(trained, flags, message):
  result = run('translate', f'--workdir={trained[0]}', *flags, stdin=INPUT)
  assert (
    result.code == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1 and message in result.err
  ), result.err


def test_a_mistake_in_mbr_is_reported_before_the_run_is_opened():
  result = run('translate', '--workdir=none', "--mbr=bleu(tokenize='spm')", stdin=INPUT)
  assert result.code == 2 and result.err.startswith("error: unknown tokenizer of bleu 'spm'"), result.err
