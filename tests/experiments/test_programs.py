"""train, evaluate, translate and inspect_attention on a task of a few words: what they print and write."""

import json
import shutil
from pathlib import Path

import matplotlib.image
import pytest

from attention_jax.analysis.alignment import parse_pharaoh
from attention_jax.systems import runs
from attention_jax.training.digests import FILE_DIGESTS
from attention_jax.training.folder import read_config
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import read_tree, run, tiny_arguments, write_task
from tests.experiments.test_bad_input import assert_user_error

METRICS = (
  'loss accuracy phoneme_error_rate sequence_error_rate alignment_error_rate precision recall entropy monotonicity'
)


def test_training_prints_progress_and_writes_the_run_folder(trained):
  folder, printed = trained
  for line in (
    'source vocabulary word: 11 entries',
    'train: 24 pairs',
    'step 4/4  left 0',
    'all 4 steps are done',
    f'written to {folder}: best/',
    '  phoneme_error_rate: token_error_rate|case:mixed|tok:space|refs:nearest\n',  # not wrapped
  ):
    assert line in printed
  results = json.loads((folder / 'results.json').read_text())
  assert results['evaluation']['beams'] == 2 and results['step'] in (2, 4)
  assert list(results['results']) == ['test'] and ' '.join(results['results']['test']) == METRICS
  assert all(set(metric) == {'value', 'unit', 'signature'} for metric in results['results']['test'].values())
  rows = (Path(read_config(folder)['data']['folder']) / 'test.tsv').read_text('utf-8').splitlines()
  hypotheses = (folder / 'hypotheses.test.txt').read_text('utf-8')
  assert hypotheses.count('\n') == len({row.split('\t')[0] for row in rows})
  metrics = read_metrics(folder)
  assert [record['step'] for record in metrics] == [1, 2, 3, 4] and all('train/loss' in record for record in metrics)
  assert ['validation/loss' in record for record in metrics] == [False, True, False, True]
  assert list((folder / 'tensorboard').iterdir())


@pytest.mark.long
def test_resuming_with_different_data_is_an_error(tmp_path):
  command = tiny_arguments(write_task(tmp_path / 'task'), tmp_path / 'run')
  assert run('train', *command).code == 0
  before = read_tree(tmp_path / 'run')
  path = tmp_path / 'task' / 'train.tsv'
  path.write_text(path.read_text('utf-8').replace('eins', 'zwei', 1), 'utf-8')
  part = 'was trained on other data: train (or the vocabulary) changed since'
  assert_user_error(run('train', *command), [part])
  assert read_tree(tmp_path / 'run') == before
  for name in ('data.json', FILE_DIGESTS):
    (tmp_path / 'run' / name).unlink()
  assert 'all 4 steps are done (' in run('train', *command).out


@pytest.mark.long
def test_evaluate_reproduces_the_results_of_training(trained, tmp_path):
  folder, _ = trained
  before = read_tree(folder)
  result = run('evaluate', f'--workdir={folder}', f'--output={tmp_path}/h.txt')
  assert result.code == 0 and 'test (step' in result.out and all(name in result.out for name in METRICS.split())
  assert (tmp_path / 'h.txt').read_bytes() == before['hypotheses.test.txt']
  stored = json.loads(before['results.json'])['results']['test']
  for name, digits in (('phoneme_error_rate', 2), ('entropy', 4)):
    assert f'{stored[name]["value"]:.{digits}f}' in result.out
  latest = run('evaluate', f'--workdir={folder}', '--split=train', '--checkpoint=latest', '--beams=1')
  assert latest.code == 0 and 'train (step 4)' in latest.out
  assert read_tree(folder) == before


@pytest.mark.long
def test_evaluate_with_other_metrics_as_json(trained):
  workdir = f'--workdir={trained[0]}'
  record = json.loads(run('evaluate', workdir, '--metrics=chrf', '--metrics=bleu(lowercase=True)', '--json').out)
  assert record['split'] == 'test' and record['evaluation']['metrics'] == ['chrf', 'bleu(lowercase=True)']
  assert '|case:lc|' in record['results']['bleu']['signature'] and 'phoneme_error_rate' not in record['results']
  stored = json.loads((trained[0] / 'results.json').read_text())
  assert record['steps'] == [stored['step']] and record['results']['loss'] == stored['results']['test']['loss']
  assert_user_error(run('evaluate', workdir, '--metrics=chrff'), ["unknown metric 'chrff'"])
  assert_user_error(run('evaluate', workdir, '--metrics=ter', '--metrics=ter'), ["'ter' more than once"])


@pytest.mark.long
def test_translate_reads_lines_of_stdin_or_a_file_and_keeps_empty_ones(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  lines = 'eins zwei\r\n\nneun fünf drei'.encode()
  result = run('translate', workdir, stdin=lines)
  assert result.code == 0 and result.out.count('\n') == 3 and result.out.split('\n')[1] == ''
  assert result.err.splitlines()[0] == '1 empty line gave empty output (line 2)'
  (tmp_path / 'lines.txt').write_bytes(lines)
  assert run('translate', workdir, f'--input={tmp_path}/lines.txt') == result
  (tmp_path / 'long').write_text(' '.join(['eins'] * 40))  # longer than every bucket
  assert run('translate', workdir, f'--input={tmp_path}/long').code == 0


def test_translate_prints_alternatives_and_alignments_as_columns_and_json(trained):
  workdir = f'--workdir={trained[0]}'
  lines = b'eins zwei\n\ndrei'
  plain = run('translate', workdir, stdin=lines).out.splitlines()
  result = run('translate', workdir, '--nbest=2', '--alignments', stdin=lines)
  fields = [line.split('\t') for line in result.out.splitlines()]
  assert [int(number) for number, *_ in fields] == [1, 1, 3, 3]
  assert [fields[0][2], '', fields[2][2]] == plain
  for (_, first, *_), (_, second, *_) in ((fields[0], fields[1]), (fields[2], fields[3])):
    assert float(first) >= float(second)
  source_lengths = {'1': 2, '3': 1}
  for number, _, text, alignment in fields:
    links = parse_pharaoh(alignment)
    assert all(source < source_lengths[number] and target < len(text.split()) for source, target in links)
  records = [
    json.loads(line) for line in run('translate', workdir, '--json', '--nbest=2', stdin=lines).out.splitlines()
  ]
  counts = [(record['line'], record['source'], len(record['hypotheses'])) for record in records]
  assert counts == [(1, 'eins zwei', 2), (2, '', 0), (3, 'drei', 2)]
  assert [record['source_tokens'] for record in records] == [['eins', 'zwei'], [], ['drei']]
  hypotheses = [hypothesis for record in records for hypothesis in record['hypotheses']]
  for hypothesis, columns in zip(hypotheses, fields, strict=True):
    assert hypothesis['text'] == columns[2] and f'{hypothesis["score"]:.4f}' == columns[1]
    assert len(hypothesis['weights']) in (len(hypothesis['tokens']), len(hypothesis['tokens']) + 1)
    assert all(abs(sum(row) - 1) < 1e-4 for row in hypothesis['weights'])
    assert {tuple(link) for link in hypothesis['alignment']} == set(parse_pharaoh(columns[3]))


@pytest.mark.long
def test_samples_are_reproducible_and_depend_on_line_number_and_seed(trained):
  def translate(*flags):
    return run('translate', f'--workdir={trained[0]}', *flags, stdin=b'eins zwei\n\ndrei\neins zwei')

  sampling = ['--samples=3', '--temperature=5']
  sampled = translate(*sampling)
  fields = [line.split('\t') for line in sampled.out.splitlines()]
  assert [int(number) for number, *_ in fields] == [1, 1, 1, 3, 3, 3, 4, 4, 4]
  assert [f[2] for f in fields[:3]] != [f[2] for f in fields[6:]]  # a repeated line gets new samples
  assert translate(*sampling) == sampled and translate(*sampling, '--seed=1').out != sampled.out
  assert translate('--samples=1', '--top_k=1').out == translate('--beams=1').out


@pytest.mark.long
def test_scores_of_hypotheses_depend_on_the_ranking_of_the_config(trained, tmp_path):
  # Long enough that no short output covers it, so that the coverage penalty is not zero.
  line = b'eins zwei drei eins zwei drei eins'
  scores = set()
  for name in ('', 'alpha', 'beta', 'gamma'):
    folder = shutil.copytree(trained[0], tmp_path / f'changed_{name}')
    config = read_config(folder)
    config['evaluation'] |= {name: 3.0} if name else {}
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / FILE_DIGESTS).unlink()  # otherwise the changed config is an error
    result = run('translate', f'--workdir={folder}', '--beams=1', '--nbest=1', stdin=line)
    scores.add(float(result.out.split('\t')[1]))
  assert len(scores) == 4


@pytest.mark.long
def test_several_seeds_have_run_folders_and_a_summary(trained, task, tmp_path):
  folder = tmp_path / 'both'
  command = ['train', *tiny_arguments(task, folder, '--config.seeds=2')]
  result = run(*command)
  assert result.code == 0, result.err
  assert 'seed 1  validation/loss' in result.out and ' ± ' in result.out and 'the means over 2 seeds' in result.out
  losses = [read_test_loss(path)['value'] for path in (trained[0], folder / 'seed_0')]
  assert losses[1] == pytest.approx(losses[0], rel=1e-4)
  assert json.loads((folder / 'results.json').read_text())['seeds'] == [0, 1]
  summary = read_test_loss(folder)
  assert summary['value'] == pytest.approx(sum(summary['values']) / 2)
  assert summary['values'][0] == losses[1] and summary['deviation'] > 0
  assert read_config(folder / 'seed_1')['training']['seed'] == 1 and read_config(folder / 'seed_1')['seeds'] == 1
  assert run('translate', f'--workdir={folder}/seed_1', stdin=b'eins zwei').code == 0
  (folder / 'results.json').write_text((folder / 'results.json').read_text().replace('0.', '1.', 1))
  assert_user_error(run(*command), ['results.json has changed'])


def read_test_loss(folder):
  """Returns the record of the loss on the test split."""
  return json.loads((folder / 'results.json').read_text())['results']['test']['loss']


@pytest.mark.long
def test_analyses_are_written_as_json_and_maps_are_drawn(trained, tmp_path):
  command = ['inspect_attention', f'--workdir={trained[0]}']
  path = tmp_path / 'rows.json'
  analyses = ['entropy', 'coverage', 'leave_one_out', 'what_if(edit="fixed(at=0, position=1)")']
  flags = [f'--analyses={spec}' for spec in analyses]
  result = run(*command, '--rows=0,3', *flags, f'--output={path}')
  assert result.code == 0 and result.out == f'written to {path}\n', result.err
  for record in json.loads(path.read_text()):
    tokens = {'T': record['target_tokens'], 'S': record['source_tokens']}
    axes = [measured['axes'] for measured in record['measurements'].values()]
    assert axes == [[tokens['T']], [tokens['S']], [tokens['T'], tokens['S']], [tokens['T']]]
    assert record['matrices'].keys() == {'weights'} and record['gold'] is not None
    assert record['measurements'][analyses[-1]]['values'][0] != 0
  picture = tmp_path / 'lines.png'
  result = run(*command, '--text=zwei', '--relative', *flags[1:3], f'--output={picture}')
  assert result.code == 0 and 'not in a picture: coverage; --output=FILE.html' in result.out, result.err
  height, width = matplotlib.image.imread(picture).shape[:2]
  assert width > height  # weights and the map side by side
  assert run(*command, '--text=eins fünf', '--text=zwei', f'--output={tmp_path}/two.png').code == 0
  assert run(*command, '--rows=0').out == f'written to {trained[0]}/attention.png\n'
  (trained[0] / 'attention.png').unlink()


@pytest.mark.long
def test_a_page_compares_runs_and_hypotheses(trained, tmp_path):
  command = ['inspect_attention', f'--workdir={trained[0]}']
  other = shutil.copytree(trained[0], tmp_path / 'other')
  page = tmp_path / 'page.html'
  flags = ['--text=eins <b>', '--hypotheses=2', f'--compare={other}', '--edit=fixed(at=1, layer=0)']
  result = run(*command, *flags, f'--output={page}')
  assert result.code == 0 and result.out == f'written to {page}\n', result.err
  text = page.read_text('utf-8')
  assert 'eins \\u003cb\\u003e' in text and '<b>' not in text and f'{trained[0]}, fixed(at=1, layer=0)' in text
  assert_user_error(run(*command, f'--compare={tmp_path}/no'), [f'{tmp_path}/no holds no config.json'])


@pytest.mark.long
@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--analyses=what_if(edit="unifrom")', "unknown edit 'unifrom' (did you mean 'uniform'?)"),
    ('--analyses=rollout', "this encoder has no self-attention; expected the encoder 'transformer'"),
    ('--edit=uniform(head=1)', 'head must be less than 1, the number of attention heads, got 1'),
    ('--edit=fixed(at=99)', "edit 'fixed(at=99)': at must be less than "),
    ('--analyses=what_if(edit="fixed(position=99)")', "edit 'fixed(position=99)': position must be less than "),
    ('--text=zwei', '--rows has no effect with --text; leave one of them out'),
    ('--serve', '--rows has no effect with --serve; leave one of them out'),
    ('--port=8766', '--port has no effect without --serve'),
    ('--output=', '--output= is empty; expected a value, or no --output'),
  ],
)
def test_mistakes_of_inspect_attention_are_reported_in_one_line(trained, flag, message):
  assert_user_error(run('inspect_attention', f'--workdir={trained[0]}', '--rows=0', flag), [message])


def test_mistakes_of_inspect_attention_are_found_before_the_run_is_opened(trained, tmp_path, monkeypatch):
  monkeypatch.setattr(runs, 'open_run', lambda *args, **kwargs: pytest.fail('the run was opened'))
  (tmp_path / 'config.json').write_text('{"system": "recall"}')
  for flags, message in [
    (['--analyses=entropi'], "unknown analysis 'entropi' (did you mean 'entropy'?)"),
    (['--edit=unifrom'], "unknown edit 'unifrom' (did you mean 'uniform'?)"),
    (['--split=tset'], "unknown split 'tset'"),
    (['--rows=x'], "row 'x' is not in split"),
    (['--output=a.jpg'], "unknown format of a.jpg: '.jpg'"),
    (['--split=validation', '--text=zwei'], '--split has no effect with --text; leave one of them out\n'),
    (['--split=validation', '--serve'], '--split has no effect with --serve; leave one of them out\n'),
    ([f'--compare={trained[0]}/'], f'error: --compare={trained[0]}/: is the same run as {trained[0]}\n'),
    ([f'--compare={tmp_path}'], f"{tmp_path}: expected a run of system 'translation', got one of 'recall'\n"),
  ]:
    assert_user_error(run('inspect_attention', f'--workdir={trained[0]}', *flags), [message])
