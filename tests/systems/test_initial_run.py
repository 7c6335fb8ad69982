"""Training that starts from the parameters of another run."""

import shutil

import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import flatten_names
from attention_jax.systems import initial_run
from attention_jax.systems.config import parse_config
from attention_jax.systems.runs import open_run
from attention_jax.training.writers import read_metrics
from tests.systems.helpers import tiny_config, train_quietly, write_pairs

pytestmark = pytest.mark.usefixtures('on_two_devices')

CONSTANT_PARAMETERS = {  # parameters keep their initial values up to 1e-12, and nothing is evaluated
  'training__schedule': 'constant(rate=1e-12)',
  'training__steps': 1,
  'data__task': "tsv(train='train.tsv')",
}


@pytest.mark.long
def test_a_second_stage_starts_from_the_best_parameters(trained, tmp_path):
  first = shutil.copytree(trained.folder, tmp_path / 'first')
  data = write_pairs(tmp_path)
  for path in data.glob('*.tsv'):
    path.write_text(path.read_text('utf-8').replace('a', 'h'), 'utf-8')  # a word that the data of the first run lack
  second = tiny_config(data, initial_run=str(first), model__attention__score='coverage', **CONSTANT_PARAMETERS)
  folder = tmp_path / 'second'
  _, lines = train_quietly(second, folder)
  for side in ('source', 'target'):
    name = f'vocabulary.{side}.json'
    assert (folder / name).read_bytes() == (first / name).read_bytes()
  expected = flatten_names(open_run(first, 'best').params)
  params = flatten_names(open_run(folder, 'latest').params)
  (new,) = params.keys() - expected.keys()
  assert f'random at the start: {new}' in lines
  for name, array in expected.items():
    np.testing.assert_allclose(params[name], array, atol=1e-6)

  shutil.rmtree(first)  # the second run has stored the parameters that it starts from
  stored = initial_run.open_initial_run(parse_config(second), folder)
  assert stored.system is None and stored.arrays.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(stored.arrays[name], array)


@pytest.mark.long
def test_another_learning_rate_continues_the_latest_state_with_its_optimiser_and_step(trained, config, tmp_path):
  fields = CONSTANT_PARAMETERS | {'initial_run': str(trained.folder), 'initial_state': True, 'training__steps': 6}
  second = tiny_config(config['data']['folder'], **fields)
  folder = tmp_path / 'second'
  _, lines = train_quietly(second, folder)
  assert f'continues the optimiser of config.initial_run={str(trained.folder)!r} at step 4' in lines
  expected = flatten_names(open_run(trained.folder, 'latest').params)
  for name, array in flatten_names(open_run(folder, 'latest').params).items():
    np.testing.assert_allclose(array, expected[name], atol=1e-6)
  assert [record['step'] for record in read_metrics(folder)] == [5, 6]

  system = open_run(folder, 'latest').system

  def read(path, **training):
    options = second['training'] | {'steps': 100} | training
    changed = second | {'initial_run': str(path), 'training': options}
    return initial_run.read_continued_state(parse_config(changed), system, system.initializer())

  for path, steps in ((trained.folder, 4), (folder, 6)):
    state = read(path)
    assert {int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0} == {steps} and state.step == steps
  with pytest.raises(UserError, match=r'steps must be greater than the step of config.initial_run, 4, got 4'):
    read(trained.folder, steps=4)
  with pytest.raises(UserError, match=r'holds another model: opt_state'):
    read(trained.folder, optimizer='sgd')
  with pytest.raises(UserError, match=r'config.initial_state requires config.initial_run, and config.seeds to be 1'):
    parse_config(second | {'initial_run': ''})


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'system': 'recall'}, "{folder}' is a run of system 'translation'; expected a run of system 'recall'"),
    ({'data': {'vocabulary': 'char'}}, "config.data.vocabulary must be that of config.initial_run='{folder}', 'word'"),
    ({'initial_run': '@nowhere'}, "unknown ready-made model 'nowhere'"),
  ],
)
def test_an_initial_run_that_is_unknown_or_does_not_fit_is_an_error(trained, fields, message):
  with pytest.raises(UserError) as error:
    initial_run.check_initial_run(parse_config({'initial_run': str(trained.folder)} | fields))
  assert message.format(folder=trained.folder) in str(error.value)


def test_parameters_are_merged_by_name():
  arrays = {'cell.kernel': np.ones((2, 3)), 'old': np.ones(4)}
  params = {'cell': {'kernel': np.zeros((2, 3), np.float32), 'bias': np.zeros(3)}}
  merged = initial_run.start_from(lambda seed: jax.tree.map(lambda x: x + seed, params), arrays)(5)
  assert merged['cell']['kernel'].dtype == np.float32
  assert merged['cell']['kernel'].tolist() == np.ones((2, 3)).tolist() and merged['cell']['bias'].tolist() == [5] * 3
  lines = []
  initial_run.describe_start(arrays, params, "config.initial_run='runs/x'", lines.append)
  assert lines == [
    "starts with 1 of its 2 parameter arrays from config.initial_run='runs/x'",
    'random at the start: cell.bias',
    "not used from config.initial_run='runs/x': old",
  ]
  with pytest.raises(UserError, match=r"cell.kernel is \[3\] in config.initial_run='runs/x', and \[2, 3\] in this"):
    initial_run.describe_start({'cell.kernel': np.ones(3)}, params, "config.initial_run='runs/x'", lines.append)
  with pytest.raises(UserError, match=r"config\.initial_run='runs/x' has no parameter of the same name"):
    initial_run.describe_start({'old': np.ones(3)}, params, "config.initial_run='runs/x'", lines.append)
