"""Train, evaluate, translate, inspect, on a task of a few words: what is printed and what is written."""

import json
import shutil

import matplotlib.image
import pytest

from attention_jax.analysis.alignment import parse_pharaoh
from attention_jax.systems.runs import open_run
from attention_jax.training.folder import lock_folder, read_config
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import read_tree, run, tiny_arguments, write_task

MEASURED = [
  'loss',
  'accuracy',
  'phoneme_error_rate',
  'sequence_error_rate',
  'alignment_error_rate',
  'precision',
  'recall',
  'entropy',
  'monotonicity',
]


def test_training_prints_and_writes(trained):
  folder, printed = trained
  for line in (
    'source vocabulary word: 11 entries',
    'train: 24 pairs',
    'starting at step 0 of 4',
    'step 4/4  left 0',
    'all 4 steps are done',
    'measured: test; parameters: step',
    f'written to {folder}: best/',
  ):
    assert line in printed
  assert '  phoneme_error_rate: token_error_rate|case:mixed|tok:space|refs:nearest\n' in printed  # whole
  results = json.loads((folder / 'results.json').read_text())
  assert results['evaluation']['beams'] == 2 and results['implementation'] == 'xla' and results['step'] in (2, 4)
  assert list(results['results']) == ['test'] and list(results['results']['test']) == MEASURED
  assert all(set(found) == {'value', 'unit', 'signature'} for found in results['results']['test'].values())
  hypotheses = (folder / 'hypotheses.test.txt').read_text('utf-8')
  assert hypotheses.count('\n') == len({row.split('\t')[0] for row in (rows(folder, 'test'))})
  metrics = read_metrics(folder)
  assert [record['step'] for record in metrics] == [1, 2, 3, 4]
  assert all('train/loss' in record for record in metrics)
  assert ['validation/loss' in record for record in metrics] == [False, True, False, True]
  assert list((folder / 'tensorboard').iterdir())


def rows(folder, split):
  data = read_config(folder)['data']['folder']
  with open(f'{data}/{split}.tsv', encoding='utf-8') as file:
    return file.read().splitlines()


def test_a_finished_run_is_left_as_it_is(trained, task):
  folder, _ = trained
  before = read_tree(folder)
  ran = run('train', *tiny_arguments(task, folder))
  assert ran.code == 0 and 'all 4 steps are done (' in ran.out and 'starting' not in ran.out
  assert read_tree(folder) == before


def test_a_run_does_not_go_on_with_other_data(tmp_path):
  command = tiny_arguments(write_task(tmp_path / 'task'), tmp_path / 'run')
  assert run('train', *command).code == 0
  before, path = read_tree(tmp_path / 'run'), tmp_path / 'task' / 'train.tsv'
  path.write_text(path.read_text('utf-8').replace('eins', 'zwei', 1), 'utf-8')
  ran = run('train', *command)
  assert ran.code == 2 and ran.err.count('\n') == 1
  assert 'was begun with other data: train (or the vocabulary) changed since' in ran.err
  assert read_tree(tmp_path / 'run') == before
  (tmp_path / 'run' / 'data.json').unlink()
  assert 'all 4 steps are done (' in run('train', *command).out


def test_two_do_not_train_in_one_folder(trained, task):
  before = read_tree(trained[0])
  with lock_folder(trained[0], print):
    ran = run('train', *tiny_arguments(task, trained[0], '--config.training.keep=9'))  # which may differ
  assert ran.code == 2 and ran.err.endswith('is being trained in by another process; possible: another folder\n')
  assert read_tree(trained[0]) == before


def test_evaluate(trained, tmp_path):
  folder, _ = trained
  before = read_tree(folder)
  ran = run('evaluate', f'--workdir={folder}', f'--output={tmp_path}/h.txt')
  assert ran.code == 0 and 'test (step' in ran.out and all(name in ran.out for name in MEASURED)
  assert (tmp_path / 'h.txt').read_bytes() == before['hypotheses.test.txt']
  again = json.loads(before['results.json'])['results']['test']
  assert f'{again["phoneme_error_rate"]["value"]:.2f}' in ran.out and f'{again["entropy"]["value"]:.4f}' in ran.out
  latest = run('evaluate', f'--workdir={folder}', '--split=train', '--checkpoint=latest', '--beams=1')
  assert latest.code == 0 and 'train (step 4)' in latest.out
  assert read_tree(folder) == before


def test_other_metrics_and_json(trained):
  workdir = f'--workdir={trained[0]}'
  told = json.loads(run('evaluate', workdir, '--metrics=chrf', '--metrics=bleu(lowercase=True)', '--json').out)
  assert told['split'] == 'test' and told['evaluation']['metrics'] == ['chrf', 'bleu(lowercase=True)']
  assert '|case:lc|' in told['results']['bleu']['signature'] and 'phoneme_error_rate' not in told['results']
  known = json.loads((trained[0] / 'results.json').read_text())
  assert told['steps'] == [known['step']] and told['results']['loss'] == known['results']['test']['loss']
  for wrong in (['--metrics=chrff'], ['--metrics=ter', '--metrics=ter']):
    ran = run('evaluate', workdir, *wrong)
    assert ran.code == 2 and ran.out == '' and ran.err.count('\n') == 1


def test_texts_of_somebody_else_are_measured(trained, tmp_path):
  workdir, own = f'--workdir={trained[0]}', trained[0] / 'hypotheses.test.txt'
  ran, found = run('evaluate', workdir), run('evaluate', workdir, f'--hypotheses={own}')
  row = lambda ran: next(line.split() for line in ran.out.splitlines() if 'phoneme_error_rate' in line)
  assert found.code == 0 and row(found) == row(ran) and 'loss' not in found.out
  (tmp_path / 'right.txt').write_text(
    ''.join(f'{line}\n' for line in open_run(trained[0]).system.corpus('test').target)
  )
  assert row(run('evaluate', workdir, f'--hypotheses={tmp_path}/right.txt'))[1] == '0.00'
  (tmp_path / 'few.txt').write_text('eins\n')
  few = run('evaluate', workdir, f'--hypotheses={tmp_path}/few.txt')
  assert few.code == 2 and few.err.startswith('error: 1 hypotheses for the ') and few.err.count('\n') == 1
  refused = run('evaluate', workdir, f'--hypotheses={own}', '--beams=2')
  assert refused.code == 2 and '--beams is of a search' in refused.err


def test_translate_lines(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  given = 'eins zwei\r\n\nneun fünf drei'.encode()
  ran = run('translate', workdir, stdin=given)
  assert ran.code == 0 and ran.out.count('\n') == 3 and ran.out.split('\n')[1] == ''
  assert ran.err.splitlines()[0] == '1 empty line gave empty output (line 2)'
  (tmp_path / 'lines.txt').write_bytes(given)
  assert run('translate', workdir, f'--input={tmp_path}/lines.txt') == ran
  (tmp_path / 'unseen').write_text(' '.join(['eins'] * 40))  # longer than every bucket
  assert run('translate', workdir, f'--input={tmp_path}/unseen').code == 0


def test_translate_with_alternatives_and_alignments(trained):
  workdir, given = f'--workdir={trained[0]}', b'eins zwei\n\ndrei'
  plain = run('translate', workdir, stdin=given).out.splitlines()
  ran = run('translate', workdir, '--nbest=2', '--alignments', stdin=given)
  fields = [line.split('\t') for line in ran.out.splitlines()]
  assert [int(number) for number, *_ in fields] == [1, 1, 3, 3]
  assert [fields[0][2], '', fields[2][2]] == plain
  for (_, first, *_), (_, second, *_) in ((fields[0], fields[1]), (fields[2], fields[3])):
    assert float(first) >= float(second)
  for number, _, text, alignment in fields:
    links = parse_pharaoh(alignment)
    assert all(source < (2, 0, 1)[int(number) - 1] and target < len(text.split()) for source, target in links)
  parsed = [json.loads(line) for line in run('translate', workdir, '--json', '--nbest=2', stdin=given).out.splitlines()]
  shapes = [(p['line'], p['source'], len(p['hypotheses'])) for p in parsed]
  assert shapes == [(1, 'eins zwei', 2), (2, '', 0), (3, 'drei', 2)]
  for found, columns in zip((h for p in parsed for h in p['hypotheses']), fields, strict=True):
    assert found['text'] == columns[2] and f'{found["score"]:.4f}' == columns[1]
    assert len(found['weights']) in (len(found['tokens']), len(found['tokens']) + 1)
    assert all(abs(sum(row) - 1) < 1e-4 for row in found['weights'])
    assert {tuple(link) for link in found['alignment']} == set(parse_pharaoh(columns[3]))


def test_translate_by_drawing(trained):
  workdir, given = f'--workdir={trained[0]}', b'eins zwei\n\ndrei\neins zwei'
  drawn = run('translate', workdir, '--samples=3', '--temperature=5', stdin=given)
  fields = [line.split('\t') for line in drawn.out.splitlines()]
  assert [int(number) for number, *_ in fields] == [1, 1, 1, 3, 3, 3, 4, 4, 4]
  assert [f[2] for f in fields[:3]] != [f[2] for f in fields[6:]]  # the same line again is drawn anew
  assert run('translate', workdir, '--samples=3', '--temperature=5', stdin=given) == drawn
  assert run('translate', workdir, '--samples=3', '--temperature=5', '--seed=1', stdin=given).out != drawn.out
  greedy = run('translate', workdir, '--beams=1', stdin=given).out
  assert run('translate', workdir, '--samples=1', '--top_k=1', stdin=given).out == greedy


def with_evaluation(trained, folder, change):
  """A copy of the run whose stored config.evaluation went through `change`."""
  shutil.copytree(trained[0], folder)
  config = read_config(folder)
  change(config['evaluation'])
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


def test_hypotheses_are_ranked_as_the_config_says(trained, tmp_path):
  # Long enough that no short output covers it: only then has a coverage penalty something to say.
  given = b'eins zwei drei eins zwei drei eins'

  def score(workdir):
    _, found, *_ = run('translate', f'--workdir={workdir}', '--beams=1', '--nbest=1', stdin=given).out.split('\t')
    return float(found)

  scores = [score(trained[0])]
  for field in ('alpha', 'beta', 'gamma'):
    change = lambda values, field=field: values.update({field: 3.0})
    scores.append(score(with_evaluation(trained, tmp_path / field, change)))
  assert len(set(scores)) == 4


def test_several_seeds_at_once(trained, task, tmp_path):
  folder = tmp_path / 'both'
  ran = run('train', *tiny_arguments(task, folder, '--config.seeds=2'))
  assert ran.code == 0, ran.err
  assert 'seed 1  validation/loss' in ran.out and ' ± ' in ran.out and 'the means over 2 seeds' in ran.out
  alone, first = (json.loads((path / 'results.json').read_text()) for path in (trained[0], folder / 'seed_0'))
  assert first['results']['test']['loss']['value'] == pytest.approx(alone['results']['test']['loss']['value'], rel=1e-4)
  both = json.loads((folder / 'results.json').read_text())
  found = both['results']['test']['loss']
  assert both['seeds'] == [0, 1] and found['value'] == pytest.approx(sum(found['values']) / 2)
  assert found['values'][0] == first['results']['test']['loss']['value'] and found['deviation'] > 0
  assert read_config(folder / 'seed_1')['training']['seed'] == 1 and read_config(folder / 'seed_1')['seeds'] == 1
  assert run('translate', f'--workdir={folder}/seed_1', stdin=b'eins zwei').code == 0
  ran = run('translate', f'--workdir={folder}', stdin=b'eins zwei')
  assert ran.code == 2 and f'holds 2 runs, one for each seed; possible: {folder}/seed_0, {folder}/seed_1' in ran.err
  ran = run('train', *tiny_arguments(task, tmp_path / 'none', '--config.seeds=0'))
  assert ran.code == 2 and 'config.seeds is 0; possible: 1 or more' in ran.err


def test_inspect_attention(trained, tmp_path):
  folder, _ = trained
  ran = run('inspect_attention', f'--workdir={folder}', '--rows=0,3', f'--output={tmp_path}/rows.png')
  assert ran.code == 0 and ran.out == f'written to {tmp_path}/rows.png\n'
  assert matplotlib.image.imread(tmp_path / 'rows.png').std() > 0
  lines = ['--text=eins fünf', '--text=zwei']
  assert run('inspect_attention', f'--workdir={folder}', *lines, f'--output={tmp_path}/lines.png').code == 0
  assert run('inspect_attention', f'--workdir={folder}', '--rows=0').out == f'written to {folder}/attention.png\n'
  (folder / 'attention.png').unlink()


def test_what_is_left_out_is_counted(tmp_path):
  table = tmp_path / 'odd.tsv'
  table.write_bytes(b'eins zwei\tzwei eins\r\n\r\ndrei\teins\r\neins eins eins eins eins\teins\r\n')
  few = (f"--config.data.task=tsv(train='{table}')", '--config.training.steps=1')
  ran = run('train', *tiny_arguments(tmp_path, tmp_path / 'run', *few))
  assert ran.code == 0, ran.err
  assert f'{table}: 1 blank line skipped (line 2)' in ran.out
  assert 'train: 1 of 3 pairs fit no bucket and are left out of training, loss and alignments (line 4 of' in ran.out
  assert 'measured: nothing, as the task has only a training split; parameters: step 1, the last' in ran.out
  assert json.loads((tmp_path / 'run' / 'results.json').read_text())['results'] == {}


def test_an_ablation_is_one_flag(task, tmp_path):
  """Rows with needs of their own: all of them are trained by the tests of modules and models."""
  choice = ('--config.model.attention.score=location_sensitive', '--config.model.attention.alignment=entmax(alpha=1.3)')
  less = ('--config.training.steps=2', '--config.evaluation.beams=1', "--config.data.task=tsv(train='train.tsv')")
  ran = run('train', *tiny_arguments(task, tmp_path / 'run', *choice, *less))
  assert ran.code == 0 and 'all 2 steps are done' in ran.out, ran.err
