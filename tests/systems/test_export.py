"""Exported runs have the same parameters and metrics, and fewer files; wrong uses are errors."""

import json
import shutil

import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import save_weights
from attention_jax.systems.export import export_run
from attention_jax.systems.runs import evaluate_split, open_run
from tests.systems.helpers import train_quietly

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture(scope='module')
def exported(trained, tmp_path_factory):
  """The folder of an exported run, and the size that `export_run` returned."""
  folder = tmp_path_factory.mktemp('exported') / 'run'
  return folder, export_run(trained.folder, folder)


def assert_same_params(folder, run):
  jax.tree.map(np.testing.assert_array_equal, open_run(folder).params, run.params)


def size_of(folder):
  return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


@pytest.mark.long
def test_an_exported_run_has_the_same_metrics_and_one_checkpoint_without_the_state_of_the_optimiser(trained, exported):
  folder, size = exported
  run = open_run(folder)
  original = open_run(trained.folder)
  assert run.steps == original.steps
  assert evaluate_split(run, 'test')[0] == evaluate_split(original, 'test')[0]
  assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ['best']
  checkpoints = [size_of(path / 'best' / str(run.step)) for path in (folder, trained.folder)]
  assert checkpoints[0] < 0.7 * checkpoints[1]
  assert size == size_of(folder)


@pytest.mark.long
@pytest.mark.parametrize('checkpoint', ['best', 'average'])
def test_any_checkpoint_is_exported_and_results_with_the_best_alone(checkpoint, trained, tmp_path):
  folder = tmp_path / 'run'
  export_run(trained.folder, folder, checkpoint)
  assert_same_params(folder, open_run(trained.folder, checkpoint))
  measured = {'results.json', 'hypotheses.test.txt'}
  stored = measured if checkpoint == 'best' else set()
  assert measured & {path.name for path in folder.iterdir()} == stored
  assert measured & set(json.loads((folder / 'digests.json').read_text('utf-8'))) == stored
  (folder / 'vocabulary.source.json').write_text('{}', 'utf-8')
  with pytest.raises(UserError, match=r'vocabulary\.source\.json has changed'):
    open_run(folder)


@pytest.mark.long
def test_a_run_without_digests_is_exported(trained, tmp_path):
  shutil.copytree(trained.folder, tmp_path / 'run')
  (tmp_path / 'run' / 'digests.json').unlink()
  export_run(tmp_path / 'run', tmp_path / 'exported')
  assert_same_params(tmp_path / 'exported', open_run(trained.folder))
  for name in ('config.json', 'vocabulary.source.json', 'results.json', 'data.json'):
    assert (tmp_path / 'exported' / name).read_bytes() == (trained.folder / name).read_bytes()


NO_STATE = 'is an exported run, from which training cannot resume'


@pytest.mark.long
def test_training_in_an_exported_run_is_an_error(config, exported):
  with pytest.raises(UserError, match=NO_STATE):
    train_quietly(config, exported[0])


@pytest.mark.long
def test_parameters_of_a_file_are_exported_without_results_and_without_training(trained, config, tmp_path):
  """The file may hold parameters of another run at the step of the results, or name no step."""
  run = open_run(trained.folder)
  for name, metadata in (('steps', {'steps': str(run.step)}), ('no_steps', {})):
    save_weights(run.params, tmp_path / f'{name}.safetensors', metadata)
    export_run(trained.folder, tmp_path / name, str(tmp_path / f'{name}.safetensors'))
    assert not (tmp_path / name / 'results.json').exists()
    with pytest.raises(UserError, match=NO_STATE):
      train_quietly(config, tmp_path / name)


def test_a_folder_that_exists_is_an_error(trained, tmp_path):
  with pytest.raises(UserError, match='exists; choose another folder'):
    export_run(trained.folder, tmp_path)
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'cannot export to .*: (File exists|Not a directory)'):
    export_run(trained.folder, tmp_path / 'file' / 'run')
