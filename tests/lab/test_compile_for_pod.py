"""Programs that compile for absent devices, here for those of the CPU, with the rates of a made-up chip."""

import jax
import pytest

from attention_jax.errors import UserError
from lab import pods
from lab.ahead_of_time import DoesNotFitError
from lab.pods import CHIPS, Chip
from tests.experiments.train_every_system import CONFIGS
from tests.lab.helpers import run

TINY = """
from attention_jax.systems.config import default_config


def get_config():
  config = default_config()
  config.data.buckets = ((3, 3), (5, 4))
  config.data.batch_size = 8
  config.model.embedding = 4
  config.model.encoder = 'embedded'
  config.model.decoder = 'luong(rnn="simple", features=4, input_feeding=False)'
  config.model.attention.features = 4
  return config
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
  """The flag of a small config; all topologies are two devices of the CPU."""
  monkeypatch.setattr('lab.topologies.topology_devices', lambda topology: jax.devices()[:2])
  monkeypatch.setitem(CHIPS, 'cpu', Chip(1e12, 2**30, 1e9))
  path = tmp_path / 'tiny.py'
  path.write_text(TINY)
  return f'--config={path}'


@pytest.mark.long
def test_the_cost_of_every_bucket_is_printed(config):
  result = run('compile_for_pod', config, '--vocabulary_size=20')
  assert result.code == 0, result.err
  _, *lines = result.out.splitlines()
  assert [line.split(':')[0] for line in lines] == ['8 x (3, 3)', '8 x (5, 4)']
  assert all('; fits; ' in line and ' ms; XLA, loops once: ' in line for line in lines)


@pytest.mark.long
def test_another_system_is_compiled_from_its_data(config):
  fields = [f'--config.{name}={value}' for name, value in CONFIGS['glimpsing'][1].items()]
  fields += ['--config.data.batch_size=6', '--config.seeds=2']
  result = run('compile_for_pod', '--config=configs/digits.py:mnih2014', *fields, '--config.mesh.fsdp=2')
  assert result.code == 0, result.err
  _, line = result.out.splitlines()
  assert line.startswith('6 x (20, 20): ') and '; fits; ' in line


def test_the_tokens_of_a_batch_are_an_error_for_other_systems_than_translation(config):
  result = run('plan_pods', '--config=configs/digits.py:mnih2014')
  assert result.code == 2 and "config.system must be 'translation' for batches of --tokens" in result.err


@pytest.mark.long
def test_no_mesh_is_tried_after_one_that_fits(config):
  result = run('compile_for_pod', config, '--vocabulary_size=20', '--try_meshes')
  assert result.code == 0, result.err
  _, line = result.out.splitlines()
  assert line.startswith('fsdp=1, tensor=1: 8 x (5, 4): ') and line.endswith('; fits')


@pytest.mark.long
def test_it_is_an_error_if_no_mesh_fits(config, monkeypatch):
  monkeypatch.setitem(CHIPS, 'cpu', Chip(1e12, 2**10, 1e9))
  result = run('compile_for_pod', config, '--vocabulary_size=20', '--try_meshes')
  assert result.code == 2 and result.out.splitlines()[-1].endswith(' KiB')
  assert 'none of the meshes tried on --topology=v5e:2x2 fits' in result.err


@pytest.mark.long
def test_plan_pods_prints_a_table_of_slices(config):
  result = run(
    'plan_pods', config, '--vocabulary_size=20', '--tokens=16', '--topologies=v5e:2x2', '--config.mesh.fsdp=8'
  )
  assert result.code == 0, result.err
  head, rule, row = result.out.splitlines()
  assert head.count('|') == rule.count('|') == row.count('|')
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert cells[:3] == ['v5e:2x2', '2', '8 x (5, 4)'] and float(cells[6]) > 0


@pytest.mark.long
def test_the_table_continues_after_a_slice_that_is_too_small(config, monkeypatch):
  def compile_two_devices(config, devices, *arguments, **options):
    if len(devices) == 1:
      raise DoesNotFitError('an update does not fit')
    return update_costs(config, devices, *arguments, **options)

  update_costs = pods.update_costs
  monkeypatch.setattr(pods, 'update_costs', compile_two_devices)
  sizes = {'v5e:1x1': 1, 'v5e:2x2': 2}
  monkeypatch.setattr('lab.topologies.topology_devices', lambda topology: jax.devices()[: sizes[topology]])
  result = run('plan_pods', config, '--vocabulary_size=20', '--tokens=16', '--topologies=v5e:1x1,v5e:2x2')
  assert result.code == 0, result.err
  head, _, first, second = result.out.splitlines()
  assert first.startswith('| v5e:1x1 | 1 | ') and 'does not fit' in first and first.count('|') == head.count('|')
  assert second.startswith('| v5e:2x2 | 2 | ')


def test_no_slice_is_compiled_if_a_later_one_does_not_exist(config, monkeypatch):
  def find_devices(topology):
    if topology == 'v9:2x2':
      raise UserError('cannot describe the TPU')
    return jax.devices()[:2]

  monkeypatch.setattr('lab.topologies.topology_devices', find_devices)
  result = run('plan_pods', config, '--vocabulary_size=20', '--tokens=16', '--topologies=v5e:2x2,v9:2x2')
  assert result.code == 2 and not result.out and 'cannot describe the TPU' in result.err


def test_no_slice_is_compiled_if_a_later_one_has_not_the_devices_of_the_mesh(config, monkeypatch):
  sizes = {'v5e:2x2': 2, 'v5e:1x1': 1}
  monkeypatch.setattr('lab.topologies.topology_devices', lambda topology: jax.devices()[: sizes[topology]])
  flags = ['--vocabulary_size=20', '--tokens=16', '--topologies=v5e:2x2,v5e:1x1', '--config.mesh.tensor=2']
  result = run('plan_pods', config, *flags)
  assert result.code == 2 and not result.out
  assert 'v5e:1x1: the sizes of config.mesh (data=-1, fsdp=1, tensor=2) must multiply to the 1 devices' in result.err


@pytest.mark.long
def test_fsdp_may_take_the_rest_of_the_devices(config):
  arguments = [
    'compile_for_pod',
    config,
    '--vocabulary_size=20',
    '--config.mesh.data=1',
    '--config.data.buckets=((3,3),)',
  ]
  rest, both = (run(*arguments, f'--config.mesh.fsdp={size}').out.splitlines() for size in (-1, 2))
  assert len(rest) == 2
  assert [line.split('; compiled in')[0] for line in rest] == [line.split('; compiled in')[0] for line in both]


def test_a_topology_that_does_not_exist_is_an_error(config, monkeypatch):
  monkeypatch.undo()
  result = run('compile_for_pod', '--config=configs/wmt14.py', '--topology=v9:2x2')
  assert result.code == 2 and "cannot describe the TPU 'v9:2x2'" in result.err and result.err.count('\n') == 1
