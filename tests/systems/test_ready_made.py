"""Ready-made models: '@NAME' opens a model that was made, and is reported in one line otherwise."""

import pytest

from attention_jax.errors import UserError
from attention_jax.systems.export import export_run
from attention_jax.systems.ready_made import READY_MADE, ready_made_folder, resolve_folder
from attention_jax.systems.runs import open_run, system_of
from experiments.config_files import load_config

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))


@pytest.mark.long
def test_a_model_that_was_made_is_opened_by_its_name(trained):
  export_run(trained.folder, ready_made_folder('dates'))
  assert open_run('@dates').steps == open_run(trained.folder).steps
  assert system_of('@dates')[0] == 'translation'


def test_the_path_of_a_folder_is_returned_unchanged(tmp_path):
  assert resolve_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('@dates', '^@dates has not been made yet; run: make models'),
    ('@daets', r"^unknown ready-made model 'daets' \(did you mean 'dates'\?\); expected one of: dates, nettalk, shape"),
    ('@', "unknown ready-made model ''"),
  ],
)
def test_models_that_were_not_made_and_unknown_names_are_reported_in_one_line(name, message):
  with pytest.raises(UserError, match=message) as error:
    open_run(name)
  assert '\n' not in str(error.value)


def test_configs_of_ready_made_models_exist():
  systems = {name: load_config(model.config).system for name, model in READY_MADE.items()}
  assert systems == {'dates': 'translation', 'nettalk': 'translation', 'shapes': 'captioning'}
