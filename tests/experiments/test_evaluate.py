"""evaluate.py --by: metrics by bins as a table, as JSON and as a picture. Damaged checkpoints are errors."""

import json
import shutil

import pytest

from tests.experiments.helpers import run


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
