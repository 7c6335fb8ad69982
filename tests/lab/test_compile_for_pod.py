"""Programs that compile for absent devices, here for those of the CPU, with the rates of a made-up chip."""

import jax
import pytest

from lab import pods
from lab.ahead_of_time import DoesNotFitError
from lab.pods import CHIPS, Chip
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
def topologies(monkeypatch):
  """The number of CPU devices that stand for each topology."""
  sizes = {'v5e:2x2': 2, 'v5e:1x1': 1}
  monkeypatch.setattr('lab.topologies.topology_devices', lambda topology: jax.devices()[: sizes[topology]])
  monkeypatch.setitem(CHIPS, 'cpu', Chip(1e12, 2**30, 1e9))


@pytest.fixture
def config(tmp_path, topologies):
  """The flag of a small config."""
  path = tmp_path / 'tiny.py'
  path.write_text(TINY)
  return f'--config={path}'


def compile_for_pod(*arguments):
  """Returns the lines that the program prints for its updates."""
  result = run('compile_for_pod', *arguments)
  assert result.code == 0, result.err
  return result.out.splitlines()[1:]


def plan_pods(config, topologies, *fields):
  return run('plan_pods', config, '--vocabulary_size=20', '--tokens=16', f'--topologies={topologies}', *fields)


@pytest.mark.long
def test_the_cost_of_every_bucket_is_printed(config):
  lines = compile_for_pod(config, '--vocabulary_size=20')
  assert [line.split(':')[0] for line in lines] == ['8 x (3, 3)', '8 x (5, 4)']
  assert all('; fits; ' in line and ' ms; XLA, loops once: ' in line for line in lines)


@pytest.mark.long
def test_meshes_are_tried_until_one_fits(config, monkeypatch):
  flags = (config, '--vocabulary_size=20', '--try_meshes')
  (line,) = compile_for_pod(*flags)
  assert line.startswith('fsdp=1, tensor=1: 8 x (5, 4): ') and line.endswith('; fits')
  monkeypatch.setitem(CHIPS, 'cpu', Chip(1e12, 2**10, 1e9))
  result = run('compile_for_pod', *flags)
  assert result.code == 2 and result.out.splitlines()[-1].endswith(' KiB')
  assert 'none of the meshes tried on --topology=v5e:2x2 fits' in result.err


@pytest.mark.long
def test_the_table_of_slices_continues_after_one_that_is_too_small(config, monkeypatch):
  def compile_two_devices(config, devices, *arguments, **options):
    if len(devices) == 1:
      raise DoesNotFitError('an update does not fit')
    return update_costs(config, devices, *arguments, **options)

  update_costs = pods.update_costs
  monkeypatch.setattr(pods, 'update_costs', compile_two_devices)
  result = plan_pods(config, 'v5e:1x1,v5e:2x2', '--config.mesh.fsdp=8')
  assert result.code == 0, result.err
  head, rule, first, second = result.out.splitlines()
  assert len({line.count('|') for line in (head, rule, first, second)}) == 1
  assert first.startswith('| v5e:1x1 | 1 | ') and 'does not fit' in first
  cells = [cell.strip() for cell in second.strip('|').split('|')]
  assert cells[:3] == ['v5e:2x2', '2', '8 x (5, 4)'] and float(cells[6]) > 0


def test_no_slice_is_compiled_if_a_later_one_is_invalid(config):
  result = plan_pods(config, 'v5e:2x2,v5e:1x1', '--config.mesh.tensor=2')
  assert result.code == 2 and not result.out
  assert 'v5e:1x1: the sizes of config.mesh (data=-1, fsdp=1, tensor=2) must multiply to the 1 devices' in result.err
  result = run('plan_pods', '--config=configs/digits.py:mnih2014')
  assert result.code == 2 and "config.system must be 'translation' for batches of --tokens" in result.err


def test_a_topology_that_does_not_exist_is_an_error():
  result = run('compile_for_pod', '--config=configs/wmt14.py', '--topology=v9:2x2')
  assert result.code == 2 and "cannot describe the TPU 'v9:2x2'" in result.err and result.err.count('\n') == 1
