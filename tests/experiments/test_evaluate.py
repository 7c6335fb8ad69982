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
  folder, _ = trained
  picture = tmp_path / 'bins.png'
  lines = tmp_path / 'lines.txt'
  lines.write_text('eins\n' * 5)
  arguments = [f'--workdir={folder}', '--by=source_length', '--bins=2']
  table = run('evaluate', *arguments, '--plot=~/bins.png', f'--hypotheses={lines}')
  assert table.code == 0 and picture.read_bytes().startswith(b'\x89PNG'), table.err
  assert 'source_length' in table.out and '1 to ' in table.out and 'phoneme_error_rate (%)' in table.out
  record = json.loads(run('evaluate', *arguments, '--json').out)
  assert record['bins']['by'] == 'source_length' and sum(bin['rows'] for bin in record['bins']['bins']) == 5
  whole = json.loads(run('evaluate', f'--workdir={folder}', '--by=source_length', '--bins=1', '--json').out)
  for metric in ('phoneme_error_rate', 'loss', 'alignment_error_rate'):
    (value,) = whole['bins']['metrics'][metric]['values']
    assert value['value'] == pytest.approx(whole['results'][metric]['value'], rel=1e-5), metric
  record = json.loads(run('evaluate', *arguments, '--json', f'--hypotheses={lines}').out)
  assert len(record['bins']['metrics']['phoneme_error_rate']['values']) == 2
  assert not {'loss', 'alignment_error_rate'} & set(record['bins']['metrics'])  # of a model, not of texts
  single_rows = run('evaluate', f'--workdir={folder}', '--by=source_length', '--bins=5', '--json').out
  record = json.loads(single_rows, parse_constant=pytest.fail)  # NaN is not JSON
  assert record['bins']['metrics']['phoneme_error_rate']['values'][0]['low'] is None


def test_mistakes_are_reported_in_one_line(trained, tmp_path):
  folder, _ = trained
  (tmp_path / 'a.png').write_bytes(b'')
  for arguments, message in [
    (['--by=length'], "unknown value of --by 'length'"),
    (['--by=source_length', '--bins=0'], '--bins must be at least 1, got 0'),
    (['--plot=x.png'], '--plot needs --by'),
    (['--by=source_length', '--plot=x.pdf'], 'x.pdf: expected a path that ends with .png'),
    (['--by=source_length', f'--plot={tmp_path / "a.png"}'], 'exists; choose another --plot'),
    (
      ['--by=source_length', f'--plot={tmp_path / "b.png"}', f'--output={tmp_path / "b.png"}'],
      '--output and --plot must be two files',
    ),
  ]:
    result = run('evaluate', f'--workdir={folder}', *arguments)
    assert result.code == 2 and message in result.err and result.err.count('\n') == 1, result.err


@pytest.mark.long
@pytest.mark.parametrize('kind', ['best', 'latest'])
def test_flipped_bits_of_a_checkpoint_are_an_error(trained, tmp_path, kind):
  folder = tmp_path / 'run'
  shutil.copytree(trained[0], folder)
  checkpoints = folder / {'best': 'best', 'latest': 'checkpoints'}[kind]
  for file in checkpoints.glob('*/state/**/d/*'):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
  for program in ('evaluate', 'inspect_attention'):
    result = run(program, f'--workdir={folder}', f'--checkpoint={kind}')
    assert result.code == 2 and result.out == '' and result.err.count('\n') == 1, result.err
    assert f'error: checkpoint {checkpoints}/' in result.err and 'cannot be read: ' in result.err


@pytest.mark.long
def test_hypotheses_in_a_file_are_evaluated(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  hypotheses = trained[0] / 'hypotheses.test.txt'
  searched = run('evaluate', workdir)
  evaluated = run('evaluate', workdir, f'--hypotheses={hypotheses}')
  assert evaluated.code == 0 and 'loss' not in evaluated.out
  assert error_rate_row(evaluated) == error_rate_row(searched)
  references = open_run(trained[0]).system.corpus('test').target
  (tmp_path / 'references.txt').write_text(''.join(f'{line}\n' for line in references))
  assert error_rate_row(run('evaluate', workdir, f'--hypotheses={tmp_path}/references.txt'))[1] == '0.00'
  (tmp_path / 'few.txt').write_text('eins\n')
  few = run('evaluate', workdir, f'--hypotheses={tmp_path}/few.txt')
  assert few.code == 2 and few.err.startswith('error: 1 hypotheses for the ') and few.err.count('\n') == 1
  combined = run('evaluate', workdir, f'--hypotheses={hypotheses}', '--beams=2')
  assert combined.code == 2 and '--beams applies to a search' in combined.err


@pytest.mark.long
def test_hypotheses_of_several_files_are_combined(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  references = open_run(trained[0]).system.corpus('test').target
  files = []
  for number in range(3):  # each file has another wrong line
    lines = [target if row != number else 'X' for row, target in enumerate(references)]
    files.append(tmp_path / f'{number}.txt')
    files[-1].write_text(''.join(f'{line}\n' for line in lines))
  paths = ','.join(map(str, files))
  output = tmp_path / 'combined.txt'
  combined = run('evaluate', workdir, f'--hypotheses={paths}', '--mbr=exact_match', f'--output={output}')
  assert combined.code == 0 and error_rate_row(combined)[1] == '0.00', combined.err
  assert '3 files combined by exact_match' in combined.out and output.read_text().splitlines() == list(references)
  files[1].write_text('X\n')
  for flags, message in [
    ([f'--hypotheses={paths}'], '--hypotheses names 3 files; expected --mbr=METRIC'),
    ([f'--hypotheses={files[0]}', '--mbr=chrf'], '--mbr=chrf chooses between several hypotheses'),
    (['--mbr=chrf'], '--mbr=chrf chooses between several hypotheses'),
    ([f'--hypotheses={paths}', '--mbr=chrff'], "unknown metric 'chrff'"),
    ([f'--hypotheses={paths}', '--mbr=chrf', '--beams=2'], '--beams applies to a search'),
    ([f'--hypotheses={paths}', '--mbr=chrf'], f'{files[1]} has 1 lines and {files[0]} {len(references)}'),
    ([f'--hypotheses={files[0]},', '--mbr=chrf'], '--hypotheses must be one value or several separated by commas'),
  ]:
    result = run('evaluate', workdir, *flags)
    assert result.code == 2 and message in result.err and result.err.count('\n') == 1, result.err


@pytest.mark.long
def test_lists_of_hypotheses_are_combined_by_their_probabilities(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  corpus = open_run(trained[0]).system.corpus('test')
  (tmp_path / 'source.txt').write_text(''.join(f'{line}\n' for line in corpus.source))
  lists = run('translate', workdir, f'--input={tmp_path}/source.txt', '--beams=3', '--nbest=3', '--json')
  assert lists.code == 0, lists.err
  (tmp_path / 'a.jsonl').write_text(lists.out)
  searched = run('evaluate', workdir, '--beams=3', f'--output={tmp_path}/searched.txt')
  first = run('evaluate', workdir, f'--hypotheses={tmp_path}/a.jsonl')
  assert error_rate_row(first) == error_rate_row(searched), first.err

  pairs = [{'hypotheses': [hypothesis('X', 0.1), hypothesis(text, 0.9)]} for text in corpus.target]
  (tmp_path / 'b.json').write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  output = tmp_path / 'chosen.txt'
  chosen = run('evaluate', workdir, f'--hypotheses={tmp_path}/b.json', '--mbr=exact_match', f'--output={output}')
  assert chosen.code == 0 and output.read_text().splitlines() == list(corpus.target), chosen.err
  both = run('evaluate', workdir, f'--hypotheses={tmp_path}/b.json,{tmp_path}/a.jsonl', '--mbr=exact_match', '--json')
  assert json.loads(both.out)['mbr'] == 'exact_match', both.err

  (tmp_path / 'bad.json').write_text('{"hypotheses": []}\nX\n')
  result = run('evaluate', workdir, f'--hypotheses={tmp_path}/bad.json')
  assert_user_error(result, [f'{tmp_path}/bad.json:2: expected an object with "hypotheses"', "got 'X'"])


def hypothesis(text: str, probability: float) -> dict:
  """Returns a hypothesis as in the output of translate --json."""
  return {'text': text, 'log_prob': math.log(probability)}


def error_rate_row(result) -> list[str]:
  """Returns the cells of the row of phoneme_error_rate."""
  return next(line.split() for line in result.out.splitlines() if 'phoneme_error_rate' in line)
