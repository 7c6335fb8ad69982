"""The shared start of the programs: help, files that users write, missing devices, full disks."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import attention_jax as aj
from experiments import launch
from tests.compiled import record_compilations
from tests.experiments.helpers import ROOT, run, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error

# program -> its flags
# program -> all of its flags; None: not compared
PROGRAM_FLAGS = {
  **dict.fromkeys(('train', 'evaluate', 'ablate', 'translate', 'align', 'inspect_attention')),
  'replay': 'workdir step plugins',
  'compare': 'output metrics test plugins',
  'predict': 'workdir checkpoint dtype input json plugins',
  'score': 'workdir checkpoint dtype source target layers plugins',
}


@pytest.mark.parametrize('program', PROGRAM_FLAGS)
def test_help_prints_examples_and_the_flags_of_the_program(program):
  result = run(program, '--help')
  assert (result.code, result.err) == (0, '') and f'python -m experiments.{program} ' in result.out
  words = [line.split()[0] for line in result.out.splitlines() if line.startswith('  --')]
  flags = {word.removesuffix(':') for word in words if word.endswith(':')}
  assert {'--workdir' if program != 'compare' else '--output', '--plugins'} < flags
  if PROGRAM_FLAGS[program]:
    assert flags == {f'--{name}' for name in PROGRAM_FLAGS[program].split()}


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('def get_config(preset):\n  return preset +\n', [':2: invalid syntax']),
    ('x = 1\0\n', ['user_file.py: source code string cannot contain null bytes']),
    ('import nosuchmodule\n', [":1: ModuleNotFoundError: No module named 'nosuchmodule'"]),
    ('def get_config(preset):\n  x = 1\n  return x.y\n', [':3: AttributeError']),
    ('def other():\n  pass\n', ["KeyError: 'get_config'", 'a config file defines get_config(preset)']),
    ('def get_config():\n  pass\n', ['TypeError: get_config() takes 0 positional arguments but 1 was given']),
    ('def get_config(preset):\n  return 3\n', ['get_config must return', 'default_config(), got 3']),
  ],
)
def test_mistakes_in_a_config_file_are_located(text, parts, tmp_path):
  path = tmp_path / 'user_file.py'
  path.write_text(text)
  assert_user_error(run('train', f'--config={path}:preset', f'--workdir={tmp_path}/run'), [str(path), *parts])


def test_files_of_users_may_be_in_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'user_file.py').write_text('def get_config(preset):\n  return preset\n')
  (tmp_path / 'mine.py').write_text('1 / 0\n')
  result = run('train', '--config', '~/user_file.py')  # without the preset that it requires
  assert_user_error(result, [f'{tmp_path}/user_file.py', 'missing 1 required', "'preset'"])
  assert_user_error(run('compare', '--plugins=~/mine.py'), [f'{tmp_path}/mine.py:1: ZeroDivisionError'])


@pytest.mark.long
def test_a_missing_device_is_reported_in_one_line(tmp_path):
  flags = ['--config=configs/digits.py:mnih2014', f'--workdir={tmp_path}/run']
  command = [sys.executable, '-m', 'experiments.train', *flags]
  result = subprocess.run(command, env=os.environ | {'JAX_PLATFORMS': 'rocm'}, capture_output=True, text=True)
  assert result.returncode == 2 and 'Traceback' not in result.stderr
  message = 'JAX_PLATFORMS=rocm: jax finds no such device on this machine; JAX_PLATFORMS=cpu works on any machine'
  assert result.stderr.endswith(f'error: {message}\n')


@pytest.mark.long
def test_closed_standard_streams_are_empty(tmp_path):
  main = "def main():\n  print('lost')\n  assert not sys.stdin.read()\n  raise UserError('seen')\n\nlaunch(main)\n"
  imports = 'import sys\nfrom attention_jax.errors import UserError\nfrom experiments.launch import launch\n\n'
  (tmp_path / 'program.py').write_text(imports + main)
  command = ['sh', '-c', '"$0" "$1" <&- >&-', sys.executable, str(tmp_path / 'program.py')]
  settings = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': '.'}
  result = subprocess.run(command, env=settings, stderr=subprocess.PIPE, text=True)
  assert (result.returncode, result.stderr) == (2, 'error: seen\n')


REMEDY = 'lower the batch size, the buckets, the beams, the samples, the maximum length or the sizes of the model'
# an error -> its message
ERRORS = {
  'OSError(28, "No space left on device", "/runs/a/metrics.jsonl")': '/runs/a/metrics.jsonl: No space left on device',
  'ValueError("RESOURCE_EXHAUSTED: writing \'/runs/1\': Disk quota exceeded")': '/runs/1: Disk quota exceeded',
  'OSError(30, "Read-only file system")': 'the disk: Read-only file system',
  'PermissionError(13, "Permission denied", "runs/out.txt")': 'runs/out.txt: Permission denied',
  'MemoryError("Unable to allocate 888. PiB")': f'out of memory: Unable to allocate 888. PiB; {REMEDY}',
  'RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 137 bytes.")': (
    f'out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 137 bytes; {REMEDY}'
  ),
}


def test_errors_of_the_disk_and_of_memory_are_reported_in_one_line(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'failing').mkdir()
  for i, (error, message) in enumerate(ERRORS.items()):
    text = f'from experiments.launch import launch\n\ndef main():\n  raise {error}\n\nlaunch(main)\n'
    (tmp_path / 'failing' / f'program{i}.py').write_text(text)
    assert run(f'program{i}', package='failing') == (2, '', f'error: {message}\n')


# Fields of a config that compiles faster.
FAST_FIELDS = ('model.encoder=embedded', 'training.steps=1', 'evaluation.beams=1')


def test_plugins_are_stored_and_required(task, tmp_path, restored_tables):
  paths = [tmp_path / 'user_file.py', tmp_path / 'other_file.py']
  row = 'aj.Row(lambda query, key: -jnp.sum((query[None, :] - key) ** 2, axis=-1), project=True)'
  paths[0].write_text(f"import attention_jax as aj\nimport jax.numpy as jnp\naj.SCORES['user_score'] = {row}\n")
  paths[1].write_text('print("other")\n')
  folder = tmp_path / 'run'
  plugins = f'--plugins={paths[0]},{paths[1]}'
  fields = [f'--config.{field}' for field in ('model.attention.score=user_score', *FAST_FIELDS)]
  assert run('train', plugins, *tiny_arguments(task, folder, *fields)).code == 0
  result = run('evaluate', plugins, f'--workdir={folder}')
  assert result.code == 0 and 'alignment_error_rate' in result.out
  stored = [folder / 'plugin_1.py', folder / 'plugin_2.py']
  assert [file.read_bytes() for file in stored] == [file.read_bytes() for file in paths]
  flag = f'--plugins={stored[0]},{stored[1]}'
  assert run('export_run', flag, f'--workdir={folder}', f'--output={tmp_path}/exported').code == 0
  assert {file.name for file in (tmp_path / 'exported').glob('plugin_*')} == {'plugin_1.py', 'plugin_2.py'}
  paths[0].write_text(paths[0].read_text().replace('** 2', '** 4'))
  for changed in (plugins, f'--plugins={stored[0]}'):
    result = run('evaluate', changed, f'--workdir={folder}')
    assert_user_error(result, [f'was trained with other plug-ins; use {flag}'])
  for command in (['evaluate', f'--workdir={folder}'], ['train', *tiny_arguments(task, folder)]):
    assert_user_error(run(*command), [f'trained with plug-ins; add {flag}'])


@pytest.mark.long
def test_a_model_of_all_plugins_of_the_page_is_trained(task, tmp_path, restored_tables):
  paths = []
  for code in re.findall(r'^```python\n(.*?)^```', (ROOT / 'docs' / 'plugins.md').read_text(), re.M | re.S):
    paths.append(tmp_path / f'part_{len(paths)}.py')
    paths[-1].write_text(code)
  fields = {
    'data.task': 'sorting(rows=24)',
    'data.vocabulary': 'char',
    'data.buckets': '((10, 10),)',
    'model.attention.score': 'euclidean',
    'model.attention.alignment': 'off_by_one',
    'model.encoder': 'feedforward',
    'model.decoder': 'context_only(features=4, readout=4, rnn="minimal")',
    'model.output': 'low_rank(rank=3)',
    'training.optimizer': 'sign_descent(momentum=0.5)',
    'training.steps': 2,
    'training.select': 'length_ratio',
    'evaluation.metrics': "('length_ratio',)",
  }
  arguments = [word for word in tiny_arguments(task, tmp_path / 'run') if '.buckets=' not in word]
  flags = [f'--config.{field}={value}' for field, value in fields.items()]
  result = run('train', f'--plugins={",".join(map(str, paths))}', '--trackers=printer', *arguments, *flags)
  assert result.code == 0, result.err
  for words in ("/run 2 {'train/loss': ", "/run 2 {'results/test/loss': ", 'the best by validation length_ratio'):
    assert words in result.out


@pytest.mark.long
@pytest.mark.parametrize('field', ['model.encoder', 'data.vocabulary'])
def test_an_unknown_name_may_be_that_of_a_plugin(task, tmp_path, field):
  result = run('train', *tiny_arguments(task, tmp_path / 'run', f'--config.{field}=mine'))
  assert_user_error(result, ["'mine'", '; expected one of: '])
  assert ('; a plug-in may be missing: --plugins=FILE' in result.err) == (field != 'data.vocabulary')


@pytest.mark.long
def test_an_alignment_of_a_plugin_that_ignores_the_mask_stops_training(task, tmp_path, restored_tables):
  path = tmp_path / 'user_file.py'
  row = 'aj.Row(lambda scores, mask: jax.nn.softmax(scores))'
  path.write_text(f"import jax\nimport attention_jax as aj\naj.ALIGNMENTS['unmasked'] = {row}\n")
  fields = [f'--config.{field}' for field in ('model.attention.alignment=unmasked', *FAST_FIELDS)]
  result = run('train', f'--plugins={path}', *tiny_arguments(task, tmp_path / 'run', *fields))
  part = "alignment 'unmasked': weights of an example without unmasked positions must be 0, got 0.14"
  assert_user_error(result, [part])
  assert not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('aj.SCORES["user_score"] = 1\n', [':1: NameError', 'a plug-in adds rows to tables']),
    ('def f(\n', [':1: ']),
  ],
)
def test_mistakes_in_a_plugin_are_located(text, parts, tmp_path):
  path = tmp_path / 'user_file.py'
  path.write_text(text)
  assert_user_error(run('evaluate', f'--plugins={path}', f'--workdir={tmp_path}'), [str(path), *parts])
  assert_user_error(run('evaluate', f'--plugins={path}s', f'--workdir={tmp_path}'), ['user_file.pys: no such file'])


def test_programs_hide_the_alarms_of_the_compiler_before_jax_is_imported():
  code = "import sys, os, experiments; print('jax' in sys.modules, os.environ['TF_CPP_MIN_LOG_LEVEL'])"
  environment = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
  result = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True)
  assert result.stdout.split() == ['False', '3']


@pytest.mark.parametrize(
  ('command', 'program'),
  [
    (['python', '-m', 'experiments.ablate', '--workdir=a'], ['-m', 'experiments.train']),
    (['python', 'experiments/ablate.py'], ['-m', 'experiments.train']),
    (['python', '/bin/attention-jax', 'ablate'], ['-m', 'attention_jax.cli', 'train']),
    (['python', '-X', 'dev', '-m', 'attention_jax.cli', 'ablate'], ['-m', 'attention_jax.cli', 'train']),
    (['python'], ['-m', 'experiments.train']),
  ],
)
def test_programs_start_others_in_the_way_in_which_they_were_started(command, program, monkeypatch):
  monkeypatch.setattr(sys, 'orig_argv', command)
  assert launch.program_command('train') == [sys.executable, *program]


def test_a_new_folder_may_end_with_a_slash(tmp_path):
  assert launch.check_output_folder(f'{tmp_path}/new/', 'output') == tmp_path / 'new'
  with pytest.raises(aj.UserError, match=f'{tmp_path} exists; choose another --output'):
    launch.check_output_folder(f'{tmp_path}/', 'output')
  with pytest.raises(aj.UserError, match=f"--output={tmp_path}/a/b: '{tmp_path}/a' is not a writable folder"):
    launch.check_output_folder(f'{tmp_path}/a/b/', 'output')


def test_jax_reports_a_compilation_as_the_compilation_event():
  with record_compilations() as compiled:
    jax.jit(lambda x: x + 41)(np.float32(1))
  assert compiled
