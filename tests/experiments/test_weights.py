"""experiments.weights: a file of weights replaces the checkpoint of a run."""

from tests.experiments.helpers import ROOT, run


def test_weights_leave_and_enter_a_run(trained, tmp_path):
  folder, _ = trained
  path = tmp_path / 'weights.safetensors'
  assert run('weights', f'--workdir={folder}', f'--output={path}').out == f'written to {path}\n'
  lines = tmp_path / 'lines.txt'
  lines.write_text('a b\nc\n')
  arguments = ['translate', f'--workdir={folder}', f'--input={lines}', '--json']
  assert run(*arguments, f'--checkpoint={path}').out == run(*arguments).out
  names = run('weights', f'--workdir={folder}').out
  assert 'decoder.cell.attention.key_kernel.kernel [1, ' in names


def test_weights_of_torch_are_converted(tmp_path):
  source = ROOT / 'tests/modules/torch_fixtures/bahdanau.safetensors'
  arguments = ['weights', '--layout=bahdanau', f'--input={source}', f'--output={tmp_path}/ours.safetensors']
  result = run(*arguments)
  assert (result.code, result.err) == (
    2,
    'error: bahdanau: 7 arrays are not of this layout: io.logits, io.mask, io.memory\n',
  )
  result = run('weights', '--layout=joeynmt', f'--input={source}')
  assert result.code == 2 and result.err.startswith("error: unknown layout 'joeynmt'")


def test_mistakes_are_reported_in_one_line(trained, tmp_path):
  folder, _ = trained
  result = run('weights', f'--workdir={folder}', f'--output={tmp_path}/weights.npz')
  assert (result.code, result.err) == (2, f'error: {tmp_path}/weights.npz must end with .safetensors\n')
  result = run('translate', f'--workdir={folder}', '--checkpoint=none.safetensors', f'--input={__file__}')
  assert (result.code, result.err) == (2, 'error: none.safetensors: cannot be read (No such file or directory)\n')
