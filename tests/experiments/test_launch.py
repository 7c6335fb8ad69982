"""Help, config files of a user's own, and devices that are not there."""

import os
import subprocess
import sys

import pytest

import attention_jax as aj
from tests.experiments.helpers import run, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error

RUN = ('--workdir:', '--checkpoint:', '--dtype:')
SEARCH = ('--beams:', '--alpha:', '--beta:', '--gamma:', '--max_length:', '--replace_unknown:')
PROGRAMS = {
  'train': ('--config:', '--workdir:', '--distributed:'),
  'evaluate': (*RUN, '--split:', '--hypotheses:', '--output:', '--metrics:', '--json:', *SEARCH),
  'translate': (
    *RUN,
    '--input:',
    '--nbest:',
    '--alignments:',
    '--json:',
    '--stream:',
    '--samples:',
    '--seed:',
    '--temperature:',
    '--top_k:',
    '--top_p:',
    '--min_p:',
    '--groups:',
    '--diversity:',
    '--prefixes:',
    '--mbr:',
    *SEARCH,
  ),
  'predict': (*RUN, '--input:', '--json:'),
  'score': (*RUN, '--source:', '--target:', '--layers:'),
  'inspect_attention': (*RUN, '--split:', '--rows:', '--text:', '--layers:', '--output:'),
}


@pytest.mark.parametrize('program', PROGRAMS)
def test_help_is_what_the_program_is_for_and_its_own_flags(program):
  ran = run(program, '--help')
  assert ran.code == 0 and ran.err == ''
  assert f'python -m experiments.{program} --' in ran.out
  flags = [line.split()[0] for line in ran.out.splitlines() if line.startswith('  --') and ':' in line.split()[0]]
  assert sorted(flags) == sorted([*PROGRAMS[program], '--variants:'])


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('def get_config(preset):\n  return preset +\n', [':2: invalid syntax']),
    ('import nosuchmodule\n', [":1: ModuleNotFoundError: No module named 'nosuchmodule'"]),
    ('def get_config(preset):\n  x = 1\n  return x.y\n', [':3: AttributeError']),
    ('def other():\n  pass\n', ["KeyError: 'get_config'", 'a config file defines get_config(preset)']),
    ('def get_config():\n  pass\n', ['TypeError: get_config() takes 0 positional arguments but 1 was given']),
    ('def get_config(preset):\n  return 3\n', ['get_config returned 3', 'default_config()']),
  ],
)
def test_config_files_with_mistakes(text, parts, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  assert_user_error(run('train', f'--config={path}:preset', f'--workdir={tmp_path}/run'), [str(path), *parts])


def test_config_file_that_needs_a_preset(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text('def get_config(preset):\n  return preset\n')
  assert_user_error(run('train', f'--config={path}', f'--workdir={tmp_path}/run'), ['missing 1 required', "'preset'"])


def test_a_device_that_is_not_there_is_told_in_one_line(tmp_path):
  command = [sys.executable, '-m', 'experiments.benchmark', '--suites=limits', f'--out={tmp_path}']
  ran = subprocess.run(command, env=os.environ | {'JAX_PLATFORMS': 'rocm'}, capture_output=True, text=True)
  assert ran.returncode == 2 and 'Traceback' not in ran.stderr
  assert ran.stderr.endswith('error: JAX_PLATFORMS=rocm: jax finds no such device here; possible: cpu\n')


@pytest.mark.parametrize(
  ('error', 'said'),
  [
    (
      'OSError(28, "No space left on device", "/runs/a/metrics.jsonl")',
      '/runs/a/metrics.jsonl: No space left on device',
    ),
    ('ValueError("RESOURCE_EXHAUSTED: writing \'/runs/1\': Disk quota exceeded")', '/runs/1: Disk quota exceeded'),
    ('OSError(30, "Read-only file system")', 'the disk: Read-only file system'),
    ('PermissionError(13, "Permission denied", "runs/out.txt")', 'runs/out.txt: Permission denied'),
  ],
)
def test_a_disk_that_takes_no_more_is_told_in_one_line(error, said, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(f'from experiments.launch import launch\ndef main():\n  raise {error}\nlaunch(main)\n')
  settings = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': '.'}
  ran = subprocess.run([sys.executable, str(path)], env=settings, capture_output=True, text=True)
  assert (ran.returncode, ran.stderr) == (2, f'error: {said}\n')


def test_a_score_of_ones_own_is_known_by_its_name(task, tmp_path):
  path, folder = tmp_path / 'mine.py', tmp_path / 'run'
  row = 'aj.Row(lambda query, key: -jnp.sum((query[None, :] - key) ** 2, axis=-1), project=True)'
  path.write_text(f"import attention_jax as aj\nimport jax.numpy as jnp\naj.SCORES['mine'] = {row}\n")
  mine = f'--variants={path}'
  try:
    assert run('train', mine, *tiny_arguments(task, folder, '--config.model.attention.score=mine')).code == 0
    ran = run('evaluate', mine, f'--workdir={folder}')
    assert ran.code == 0 and 'alignment_error_rate' in ran.out
  finally:
    aj.SCORES.pop('mine', None)
  assert_user_error(run('evaluate', f'--workdir={folder}'), ["unknown score 'mine'"])


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('aj.SCORES["mine"] = 1\n', [':1: NameError', 'it adds rows to tables']),
    ('def f(\n', [':1: ']),
  ],
)
def test_files_of_variants_with_mistakes(text, parts, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  assert_user_error(run('evaluate', f'--variants={path}', f'--workdir={tmp_path}'), [str(path), *parts])
  assert_user_error(run('evaluate', f'--variants={path}s', f'--workdir={tmp_path}'), ['mine.pys: no such file'])


@pytest.mark.skipif(sys.platform != 'linux', reason='a setting of the GNU C library')
@pytest.mark.parametrize(
  ('given', 'found'),
  [
    ('', 'glibc.malloc.hugetlb=1'),
    ('glibc.malloc.tcache_count=7', 'glibc.malloc.tcache_count=7:glibc.malloc.hugetlb=1'),
    ('glibc.malloc.hugetlb=0', 'glibc.malloc.hugetlb=0'),
  ],
)
def test_programs_ask_for_large_pages_unless_somebody_said_otherwise(given, found, tmp_path):
  says = tmp_path / 'says.py'
  says.write_text("import os; print(os.environ['GLIBC_TUNABLES'])", 'utf-8')
  command = [sys.executable, '-m', 'experiments.evaluate', f'--variants={says}', '--workdir=']
  done = subprocess.run(
    command, env=os.environ | {'GLIBC_TUNABLES': given}, capture_output=True, text=True, check=False
  )
  assert done.stdout.split() == [found]
  assert done.returncode == 2
  assert 'workdir' in done.stderr
