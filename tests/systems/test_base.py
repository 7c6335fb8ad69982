"""The base class of systems: its defaults, the protocols of optional abilities, and the helpers of subclasses."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

from attention_jax.analysis.reading import SupportsReadings
from attention_jax.errors import UserError
from attention_jax.kernels.api import attend
from attention_jax.modules.attention import Attention
from attention_jax.systems import base
from attention_jax.systems.config import default_config, parse_config
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import shards_parameters

PROTOCOLS = {
  base.SupportsTranslation: {'translation'},
  base.SupportsLinePrediction: {'captioning', 'classification'},
  base.SupportsCorpus: {'captioning', 'translation'},
  SupportsReadings: {'translation'},
  base.SupportsEnsembles: {'classification', 'translation'},
  base.SupportsWordVectors: {'classification', 'translation'},
}


class MinimalSystem(base.System):
  """A system with nothing but what the base class requires."""

  loss = report = splits = implementation = None

  def __init__(self, batch_size, **fields):
    self.config = parse_config({'evaluation': {'batch_size': batch_size}} | fields)

  def _required(self, *args, **kwargs):
    raise NotImplementedError

  check = selectable_metrics = load = open = with_config = initializer = batches = _required
  evaluate = format_predictions = plot = _required


def test_the_base_class_has_no_arrays_and_checks_and_saves_nothing(tmp_path):
  system = MinimalSystem(3)
  lines = []
  system.check_data(lines.append)
  system.save(str(tmp_path))
  assert system.arrays == {} and lines == [] and list(tmp_path.iterdir()) == []
  assert system.extra_plot_suffixes == ()


def test_evaluation_rows_are_a_multiple_of_the_devices():
  assert [MinimalSystem(size).evaluation_rows for size in (1, 8, 9, 128)] == [8, 8, 16, 128]


def test_parameters_are_replicated_over_all_local_devices():
  system = MinimalSystem(1)
  params = system.place_params({'w': np.arange(3.0, dtype=np.float32)})
  assert params['w'].sharding.is_fully_replicated and params['w'].devices() == set(jax.local_devices())
  np.testing.assert_array_equal(params['w'], np.arange(3.0))


def test_evaluations_use_the_mesh_of_training_if_it_shards_the_parameters_of_one_run():
  system = MinimalSystem(1, mesh={'fsdp': 4})
  assert system.mesh == system.training_mesh and system.mesh.shape['fsdp'] == 4
  kernel = system.place_params({'blocks_0': {'feed': {'Dense_0': {'kernel': np.ones((8, 4), np.float32)}}}})
  (kernel,) = jax.tree.leaves(kernel)
  assert kernel.addressable_shards[0].data.shape == (2, 4)
  assert not shards_parameters(MinimalSystem(1, mesh={'fsdp': 4}, seeds=2).mesh)


def test_a_subclass_must_define_what_the_base_class_requires():
  with pytest.raises(TypeError, match='abstract'):
    base.System()


@pytest.mark.parametrize('protocol', PROTOCOLS)
def test_only_the_listed_systems_implement_a_protocol(protocol):
  assert {name for name, cls in SYSTEMS.items() if issubclass(cls, protocol)} == PROTOCOLS[protocol]


def test_every_system_names_a_plot_file():
  for cls in SYSTEMS.values():
    assert '.' in cls.plot_filename and all(suffix.startswith('.') for suffix in cls.extra_plot_suffixes)


def test_rows_are_parsed_and_the_first_four_are_the_default():
  assert base.parse_rows(['0', ' 3'], 'test', 4) == [0, 3]
  for row in ('4', '-1', 'x', '', '²'):
    with pytest.raises(UserError, match=rf"row '{row}' is not in split 'test'; expected 0 to 3"):
      base.parse_rows(['0', row], 'test', 4)
  assert base.parse_rows([], 'test', 3) == [0, 1, 2]
  assert base.parse_rows([], 'test', 9) == [0, 1, 2, 3]


def test_a_setting_with_an_unsupported_value_raises():
  base.check_setting(Training(), 'objective', 'likelihood', 'recall')
  with pytest.raises(UserError, match=r"^training\.objective must be 'likelihood' for system 'recall', got 'r_drop'"):
    base.check_setting(Training(objective='r_drop'), 'objective', 'likelihood', 'recall')


def test_trace_loss_raises_what_the_loss_raises_and_computes_nothing():
  calls = []

  def fn(params, batch, rngs, running, update):
    calls.append((isinstance(params, jax.core.Tracer), rngs is None, sorted(running)))
    if batch.shape[0] > 2:
      raise UserError('too long')
    return {'loss': params.sum()}

  loss = Loss(fn, running=('cross_entropy',))
  params = jax.ShapeDtypeStruct((3,), np.float32)
  base.trace_loss(loss, params, np.zeros(2))
  base.trace_loss(loss, params, np.zeros(2), deterministic=True)
  assert calls == [(True, False, ['cross_entropy']), (True, True, ['cross_entropy'])]
  with pytest.raises(UserError, match='too long'):
    base.trace_loss(loss, params, np.zeros(3))


def test_the_default_implementation_is_auto_in_configs_and_xla_in_attend():
  assert default_config().model.attention.implementation == 'auto'
  assert inspect.signature(attend).parameters['implementation'].default == 'xla'


def test_descriptions_name_the_implementation_that_auto_selects():
  for implementation, details, text in (('chunked', (), 'chunked'), ('auto', ('one by one',), 'auto (one by one)')):
    assert base.describe_implementation(Attention(implementation=implementation), *details) == text
  assert base.describe_implementation(Attention(implementation='auto')).startswith('auto (xla')


@pytest.mark.parametrize('name', SYSTEMS)
def test_a_system_of_another_config_has_the_same_data(name):
  def load():
    raise AssertionError('the data are read again')

  arguments = {
    'captioning': [list('abcde'), (8, 8, 3), load],
    'classification': [list('abcde'), ['x', 'y'], load],
    'glimpsing': [load],
    'recall': [],
    'translation': [None, list('abcde'), list('abcdefg'), ((8, 8),), load],  # the model is built by with_config
  }
  config = default_config(name)
  if name == 'captioning':
    config.model.encoder = 'grid'
  config = parse_config(config)
  other = SYSTEMS[name](config, *arguments[name]).with_config(dataclasses.replace(config, seeds=7))
  assert type(other) is SYSTEMS[name] and other.config.seeds == 7
  assert load not in arguments[name] or other._load_data is load
