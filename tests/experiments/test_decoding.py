"""What translate can do besides, and score: on a run of a few words."""

import json

import pytest

from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error

GIVEN = b'eins zwei\n\ndrei'


def columns(ran):
  assert ran.code == 0, ran
  return [line.split('\t') for line in ran.out.splitlines()]


def test_diverse_beams(trained):
  found = columns(run('translate', f'--workdir={trained[0]}', '--beams=4', '--groups=2', '--nbest=4', stdin=GIVEN))
  assert {number for number, *_ in found} == {'1', '3'} and len(found) > 4
  assert len({(number, text) for number, _, text, *_ in found}) == len(found)  # none twice


def test_an_ensemble_of_one_run_twice_is_that_run(trained):
  twice = f'--workdir={trained[0]}, {trained[0]}'
  assert run('translate', twice, stdin=GIVEN).out == run('translate', f'--workdir={trained[0]}', stdin=GIVEN).out
  assert run('evaluate', twice, '--split=train').code == 0
  assert run('translate', twice, '--checkpoint=average', stdin=GIVEN).code == 0


def test_checkpoints_of_one_run_are_an_ensemble(trained):
  workdir, last = f'--workdir={trained[0]}', open_run(trained[0], 'latest').step
  alone = run('translate', workdir, '--checkpoint=latest', stdin=GIVEN).out
  assert run('translate', workdir, f'--checkpoint={last},latest', stdin=GIVEN).out == alone
  ran = run('evaluate', workdir, f'--checkpoint={last},best', '--split=train')
  assert ran.code == 0 and f'train (steps {last}, ' in ran.out
  assert_user_error(run('translate', workdir, '--checkpoint=77'), ['unknown checkpoint of', "'77'", 'possible: 2, 4'])
  assert_user_error(run('translate', workdir, '--checkpoint=bst'), ["'bst' (did you mean 'best'?)", 'average'])
  assert_user_error(run('translate', workdir, '--checkpoint=best,latest', '--stream'), ['several cannot stream'])
  refused = run('translate', workdir, '--checkpoint=best,')
  assert_user_error(refused, ["checkpoint 'best,': nothing before or behind a comma"])
  assert_user_error(run('translate', workdir, '--mbr=', stdin=GIVEN), ["cannot read ''"])


def test_home_is_understood_where_the_shell_leaves_it(trained, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(trained[0].parent))
  (tmp_path / 'lines').write_bytes(GIVEN)
  home = f'--workdir=~/{trained[0].name}'
  assert run('translate', home, f'--input={tmp_path}/lines').out == run('translate', home, stdin=GIVEN).out != ''


def test_a_run_computes_in_another_dtype(trained):
  scores = {}
  for dtype in ('float32', 'bfloat16'):
    found = columns(run('translate', f'--workdir={trained[0]}', f'--dtype={dtype}', '--nbest=1', stdin=GIVEN))
    scores[dtype] = [float(score) for _, score, *_ in found]
  assert scores['bfloat16'] != scores['float32'] == pytest.approx(scores['bfloat16'], rel=0.05)
  assert_user_error(
    run('translate', f'--workdir={trained[0]}', '--dtype=float8'), ["unknown dtype 'float8'", 'bfloat16']
  )


def test_outputs_begin_as_told(trained, tmp_path):
  plain = run('translate', f'--workdir={trained[0]}', stdin=GIVEN).out.splitlines()
  begun = tmp_path / 'begun'
  begun.write_text(f'{plain[2].split()[0]}\n\n\n')
  found = run('translate', f'--workdir={trained[0]}', f'--prefixes={begun}', stdin=GIVEN).out.splitlines()
  assert found[0].split()[0] == plain[2].split()[0] and found[1:] == plain[1:]


def test_the_hypothesis_that_the_others_agree_with(trained):
  drawn = run('translate', f'--workdir={trained[0]}', '--samples=4', '--temperature=3', '--mbr=chrf', stdin=GIVEN)
  every = columns(run('translate', f'--workdir={trained[0]}', '--samples=4', '--temperature=3', stdin=GIVEN))
  assert drawn.out.count('\n') == 3
  assert drawn.out.splitlines()[0] in {text for number, _, text in every if number == '1'}
  ranked = columns(run('translate', f'--workdir={trained[0]}', '--beams=4', '--nbest=4', '--mbr=chrf', stdin=GIVEN))
  assert len({(number, text) for number, _, text in ranked}) == len(ranked)


def test_a_search_is_set_when_it_is_made(trained, tmp_path):
  plain = columns(run('translate', f'--workdir={trained[0]}', '--nbest=1', stdin=GIVEN))
  sums = columns(run('translate', f'--workdir={trained[0]}', '--nbest=1', '--alpha=0', '--beta=0', stdin=GIVEN))
  assert all(float(one[1]) < float(other[1]) for one, other in zip(sums, plain, strict=True))  # no length divides them
  short = run('translate', f'--workdir={trained[0]}', '--max_length=1', stdin=GIVEN)
  assert all(len(line.split()) <= 1 for line in short.out.splitlines()) and '2 outputs may have been cut' in short.err
  ran = run('evaluate', f'--workdir={trained[0]}', '--split=train', '--beams=2', '--gamma=0.5')
  assert ran.code == 0 and 'beams=2, beta=0.0, gamma=0.5' in ran.out, ran


def test_given_translations_are_scored(trained, tmp_path):
  paths = [tmp_path / name for name in ('source', 'target')]
  paths[0].write_text('eins zwei\n\ndrei\n')
  paths[1].write_text('one two\n\nthree three\n')
  ran = run('score', f'--workdir={trained[0]}', f'--source={paths[0]}', f'--target={paths[1]}')
  assert ran.code == 0 and '1 blank line skipped (line 2)' in ran.err
  found = [json.loads(line) for line in ran.out.splitlines()]
  assert [(one['line'], one['tokens']) for one in found] == [(1, ['one', 'two']), (3, ['three', 'three'])]
  for one in found:
    assert len(one['log_probs']) == len(one['tokens']) + 1 == len(one['weights'])
    assert one['log_prob'] == pytest.approx(sum(one['log_probs'])) and one['log_prob'] < 0


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--beams=3', '--groups=2'], 'groups=2, diversity=0.5; possible: groups that divide beams=3'),
    (['--beams=1', '--groups=2'], 'groups that divide beams=1'),
    (['--samples=2', '--groups=2'], '--samples=2 draws, --groups=2 searches; possible: one of them'),
    (['--samples=2', '--alpha=1'], '--samples=2 draws, --alpha=1.0 searches; possible: one of them'),
    (['--stream', '--beta=1'], '--beta=1.0 cannot be given with --stream'),
    (['--diversity=2'], '--diversity=2.0 is an option of --groups, of which there is one'),
    (['--mbr=blue'], "unknown metric 'blue'"),
    (['--mbr=chrf', '--beams=1'], '--mbr=chrf asks hypotheses about each other; possible: --samples or --beams of 2'),
    (['--mbr=chrf', '--samples=1'], '--mbr=chrf asks hypotheses about each other; possible: --samples or --beams'),
    (['--prefixes=/dev/null'], '/dev/null'),
    (['--stream', '--groups=2'], '--groups=2 cannot be given with --stream'),
  ],
)
def test_mistakes_are_one_line(trained, flags, message):
  ran = run('translate', f'--workdir={trained[0]}', *flags, stdin=GIVEN)
  assert ran.code == 2 and ran.err.startswith('error: ') and ran.err.count('\n') == 1 and message in ran.err, ran.err
