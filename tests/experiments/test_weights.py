"""experiments.weights: files of the weights of a run, and of weights converted from torch."""

import numpy as np
import pytest

from attention_jax.modules.parameter_files import read_arrays, save_weights
from tests.experiments.helpers import ROOT, run
from tests.experiments.test_bad_input import assert_user_error

TORCH_WEIGHTS = ROOT / 'tests/modules/torch_fixtures/bahdanau.safetensors'


@pytest.mark.long
def test_a_file_of_weights_replaces_the_checkpoint_of_a_run(trained, tmp_path):
  folder, _ = trained
  path = tmp_path / 'weights.safetensors'
  assert run('weights', f'--workdir={folder}', f'--output={path}').out == f'written to {path}\n'
  lines = tmp_path / 'lines.txt'
  lines.write_text('a b\nc\n')
  arguments = ['translate', f'--workdir={folder}', f'--input={lines}', '--json']
  expected = run(*arguments)
  assert expected.code == 0 and run(*arguments, f'--checkpoint={path}').out == expected.out
  save_weights({name: -array for name, array in read_arrays(path).items()}, tmp_path / 'negated.safetensors')
  assert run(*arguments, f'--checkpoint={tmp_path}/negated.safetensors').out != expected.out
  names = run('weights', f'--workdir={folder}').out
  assert 'decoder.cell.attention.key_kernel.kernel [1, ' in names


def test_weights_of_torch_are_converted(tmp_path):
  arrays = read_arrays(TORCH_WEIGHTS)
  source = tmp_path / 'torch.safetensors'
  output = tmp_path / 'ours.safetensors'
  save_weights({name: array for name, array in arrays.items() if not name.startswith('io.')}, source)
  arguments = ['weights', '--layout=bahdanau', f'--input={source}']
  assert run(*arguments, f'--output={output}').out == f'written to {output}\n'
  np.testing.assert_array_equal(read_arrays(output)['attention.query'], arrays['attention.Wa.weight'].T)
  assert 'attention.query [8, 8]' in run(*arguments).out


def test_mistakes_are_reported_in_one_line(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  source = f'--input={tmp_path}/torch.safetensors'
  for arguments, part in [
    ([workdir, f'--output={tmp_path}/weights.npz'], f'error: {tmp_path}/weights.npz must end with .safetensors\n'),
    ([workdir, source], 'error: --input is only for --layout'),
    ([workdir, '--layout=bahdanau', source], 'expected one of them\n'),
    ([workdir, '--heads=2'], 'error: --heads has no effect without --layout; leave it out\n'),
    (['--layout=bahdanau', source, '--dtype=bfloat16'], '--dtype has no effect with --layout; leave it out\n'),
    (['--layout=joeynmt', f'--input={TORCH_WEIGHTS}'], "error: unknown layout 'joeynmt'"),
  ]:
    assert_user_error(run('weights', *arguments), [part])
  result = run('translate', workdir, '--checkpoint=none.safetensors', f'--input={__file__}')
  assert_user_error(result, ['error: none.safetensors: cannot be read (No such file or directory)\n'])
