"""evaluate.py: --by prints metrics by bins, --hypotheses evaluates texts of files; damaged checkpoints are errors."""

import json
import math
import shutil

import pytest

from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error


@pytest.mark.long
def test_metrics_by_a_property_are_a_table_json_and_a_picture(trained, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  lines = tmp_path / 'lines.txt'
  lines.write_text('eins\n' * 5)
  command = ['evaluate', f'--workdir={trained[0]}', '--by=source_length']

  def evaluate(*flags):
    return json.loads(run(*command, '--json', *flags).out, parse_constant=pytest.fail)  # NaN is not JSON

  table = run(*command, '--bins=2', '--plot=~/bins.png', f'--hypotheses={lines}')
  assert table.code == 0 and (tmp_path / 'bins.png').read_bytes().startswith(b'\x89PNG'), table.err
  assert 'source_length' in table.out and '1 to ' in table.out and 'phoneme_error_rate (%)' in table.out
  record = evaluate('--bins=2')
  assert record['bins']['by'] == 'source_length' and sum(bin['rows'] for bin in record['bins']['bins']) == 5
  whole = evaluate('--bins=1')
  for metric in ('phoneme_error_rate', 'loss', 'alignment_error_rate'):
    (value,) = whole['bins']['metrics'][metric]['values']
    assert value['value'] == pytest.approx(whole['results'][metric]['value'], rel=1e-5), metric
  metrics = evaluate('--bins=2', f'--hypotheses={lines}')['bins']['metrics']
  assert len(metrics['phoneme_error_rate']['values']) == 2
  assert not {'loss', 'alignment_error_rate'} & set(metrics)  # of a model, not of texts
  assert evaluate('--bins=5')['bins']['metrics']['phoneme_error_rate']['values'][0]['low'] is None


def test_mistakes_are_reported_in_one_line(trained, tmp_path):
  (tmp_path / 'a.png').write_bytes(b'')
  by = '--by=source_length'
  for flags, message in [
    (['--by=length'], "unknown value of --by 'length'"),
    ([by, '--bins=0'], '--bins must be at least 1, got 0'),
    (['--plot=x.png'], '--plot needs --by'),
    ([by, '--plot=x.pdf'], 'x.pdf: expected a path that ends with .png'),
    ([by, f'--plot={tmp_path}/a.png'], 'exists; choose another --plot'),
    ([by, f'--plot={tmp_path}/b.png', f'--output={tmp_path}/b.png'], '--output and --plot must be two files'),
  ]:
    assert_user_error(run('evaluate', f'--workdir={trained[0]}', *flags), [message])


@pytest.mark.long
@pytest.mark.parametrize('kind', ['best', 'latest'])
def test_flipped_bits_of_a_checkpoint_are_an_error(trained, tmp_path, kind):
  folder = shutil.copytree(trained[0], tmp_path / 'run')
  checkpoints = folder / {'best': 'best', 'latest': 'checkpoints'}[kind]
  for file in checkpoints.glob('*/state/**/d/*'):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
  for program in ('evaluate', 'inspect_attention'):
    result = run(program, f'--workdir={folder}', f'--checkpoint={kind}')
    assert_user_error(result, [f'error: checkpoint {checkpoints}/', 'cannot be read: '])
    assert result.out == ''


@pytest.mark.long
def test_hypotheses_in_a_file_are_evaluated(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  hypotheses = trained[0] / 'hypotheses.test.txt'
  evaluated = run('evaluate', workdir, f'--hypotheses={hypotheses}')
  assert evaluated.code == 0 and 'loss' not in evaluated.out
  assert error_rate_row(evaluated) == error_rate_row(run('evaluate', workdir))
  write_lines(tmp_path / 'references.txt', open_run(trained[0]).system.corpus('test').target)
  assert error_rate_row(run('evaluate', workdir, f'--hypotheses={tmp_path}/references.txt'))[1] == '0.00'
  write_lines(tmp_path / 'few.txt', ['eins'])
  few = run('evaluate', workdir, f'--hypotheses={tmp_path}/few.txt')
  assert_user_error(few, ['error: 1 hypotheses for the '])


@pytest.mark.long
def test_hypotheses_of_several_files_are_combined(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  references = open_run(trained[0]).system.corpus('test').target
  files = [tmp_path / f'{number}.txt' for number in range(3)]
  for number, file in enumerate(files):  # each file has another wrong line
    write_lines(file, [target if row != number else 'X' for row, target in enumerate(references)])
  paths = f'--hypotheses={",".join(map(str, files))}'
  output = tmp_path / 'combined.txt'
  combined = run('evaluate', workdir, paths, '--mbr=exact_match', f'--output={output}')
  assert combined.code == 0 and error_rate_row(combined)[1] == '0.00', combined.err
  assert '3 files combined by exact_match' in combined.out and output.read_text().splitlines() == list(references)
  write_lines(files[1], ['X'])
  for flags, message in [
    ([paths], '--hypotheses names 3 files; expected --mbr=METRIC'),
    ([f'--hypotheses={files[0]}', '--mbr=chrf'], '--mbr=chrf chooses between several hypotheses'),
    (['--mbr=chrf'], '--mbr=chrf chooses between several hypotheses'),
    ([paths, '--mbr=chrff'], "unknown metric 'chrff'"),
    ([paths, '--mbr=chrf', '--beams=2'], '--beams applies to a search'),
    ([paths, '--mbr=chrf'], f'{files[1]} has 1 lines and {files[0]} {len(references)}'),
    ([f'--hypotheses={files[0]},', '--mbr=chrf'], '--hypotheses must be one value or several separated by commas'),
  ]:
    assert_user_error(run('evaluate', workdir, *flags), [message])


@pytest.mark.long
def test_lists_of_hypotheses_are_combined_by_their_probabilities(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  corpus = open_run(trained[0]).system.corpus('test')
  write_lines(tmp_path / 'source.txt', corpus.source)
  lists = run('translate', workdir, f'--input={tmp_path}/source.txt', '--beams=3', '--nbest=3', '--json')
  assert lists.code == 0, lists.err
  (tmp_path / 'a.jsonl').write_text(lists.out)
  searched = run('evaluate', workdir, '--beams=3', f'--output={tmp_path}/searched.txt')
  first = run('evaluate', workdir, f'--hypotheses={tmp_path}/a.jsonl')
  assert error_rate_row(first) == error_rate_row(searched), first.err

  def hypothesis(text, probability):
    return {'text': text, 'log_prob': math.log(probability)}

  pairs = [{'hypotheses': [hypothesis('X', 0.1), hypothesis(text, 0.9)]} for text in corpus.target]
  write_lines(tmp_path / 'b.json', map(json.dumps, pairs))
  output = tmp_path / 'chosen.txt'
  chosen = run('evaluate', workdir, f'--hypotheses={tmp_path}/b.json', '--mbr=exact_match', f'--output={output}')
  assert chosen.code == 0 and output.read_text().splitlines() == list(corpus.target), chosen.err
  both = run('evaluate', workdir, f'--hypotheses={tmp_path}/b.json,{tmp_path}/a.jsonl', '--mbr=exact_match', '--json')
  assert json.loads(both.out)['mbr'] == 'exact_match', both.err


def write_lines(path, lines):
  path.write_text(''.join(f'{line}\n' for line in lines))


def error_rate_row(result) -> list[str]:
  """Returns the cells of the row of phoneme_error_rate."""
  return next(line.split() for line in result.out.splitlines() if 'phoneme_error_rate' in line)
