"""Opening of trained runs: checkpoints, overrides, ensembles, and errors."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import predictor
from attention_jax.errors import UserError
from attention_jax.systems import runs
from attention_jax.systems.base import SupportsLinePrediction, SupportsTranslation
from attention_jax.systems.config import default_run_config, parse_config
from attention_jax.systems.recall.system import RecallSystem
from attention_jax.systems.runs import Run, open_run, open_run_or_ensemble
from tests.systems.helpers import read_tree

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture
def copy(trained, tmp_path):
  """A copy of the finished run, which a test may change."""
  shutil.copytree(trained.folder, tmp_path / 'run')
  return tmp_path / 'run'


@pytest.fixture
def recall_run():
  """A run of a system without optional abilities; it has no parameters."""
  return Run(Path('runs/recall'), RecallSystem(default_run_config('recall')), {}, (3,))


def edit_config(folder, edit):
  config = json.loads((folder / 'config.json').read_text('utf-8'))
  edit(config)
  (folder / 'config.json').write_text(json.dumps(config), 'utf-8')
  (folder / 'digests.json').unlink()  # otherwise opening the run reports the changed file


def test_checkpoints_are_opened_by_name_and_step(trained):
  opened = {name: open_run(trained.folder, name) for name in ('best', 'latest', 'average', '2', '4')}
  steps = {name: run.steps for name, run in opened.items()}
  best_step = json.loads((trained.folder / 'results.json').read_text('utf-8'))['step']
  assert steps == {'best': (best_step,), 'latest': (4,), 'average': (2, 4), '2': (2,), '4': (4,)}
  assert opened['average'].step == 4
  jax.tree.map(np.testing.assert_array_equal, opened['latest'].params, opened['4'].params)
  jax.tree.map(np.testing.assert_array_equal, opened['best'].params, opened[str(best_step)].params)
  jax.tree.map(
    lambda mean, a, b: np.testing.assert_allclose(mean, (a + b) / 2, rtol=1e-6, atol=1e-7),
    opened['average'].params,
    opened['2'].params,
    opened['4'].params,
  )
  assert not all(
    np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(opened[name].params) for name in '24'), strict=True)
  )


def test_opening_a_run_changes_nothing(trained):
  before = read_tree(trained.folder)
  open_run(trained.folder, 'average')
  assert read_tree(trained.folder) == before


def test_training_keep_bounds_the_average(copy):
  edit_config(copy, lambda config: config['training'].update(keep=1))
  assert open_run(copy, 'average').steps == (4,)


def test_a_missing_best_checkpoint_is_an_error(copy):
  shutil.rmtree(copy / 'best')
  with pytest.raises(UserError, match=r'best has no checkpoint, but .* that of step 4; .* such as latest'):
    open_run(copy)
  assert open_run(copy, 'latest').steps == (4,)


@pytest.mark.parametrize(
  ('checkpoint', 'message'),
  [
    ('bst', r"unknown checkpoint or step 'bst' \(did you mean 'best'\?\); expected one of: average, best, latest"),
    ('3', r"unknown checkpoint of .*run: '3'.*; expected one of: 2, 4"),
  ],
)
def test_unknown_checkpoints_are_errors(trained, checkpoint, message):
  with pytest.raises(UserError, match=message):
    open_run(trained.folder, checkpoint)


def test_a_folder_without_a_run_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r'holds no config\.json'):
    open_run(tmp_path)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('checkpoint', ['latest', '4'])
def test_a_run_without_checkpoints_is_an_error(checkpoint, copy):
  shutil.rmtree(copy / 'best')
  shutil.rmtree(copy / 'checkpoints')
  with pytest.raises(UserError, match=r'no checkpoint in .*checkpoints; expected'):
    open_run(copy, checkpoint)


def test_a_run_without_its_vocabulary_is_an_error(copy):
  (copy / 'vocabulary.target.json').unlink()
  with pytest.raises(UserError, match=r'not as the run stored it: vocabulary\.target\.json is missing; restore'):
    open_run(copy)
  (copy / 'digests.json').unlink()
  with pytest.raises(UserError, match='target vocabulary'):
    open_run(copy)


@pytest.mark.parametrize('name', ['config.json', 'data.json', 'vocabulary.source.json', 'results.json'])
def test_a_changed_file_is_an_error(copy, name):
  content = (copy / name).read_bytes()
  (copy / name).write_bytes(content.replace(b'"', b' "', 1))
  with pytest.raises(UserError, match=rf'not as the run stored it: {name} has changed; restore the files, or delete'):
    open_run(copy)


def test_reordered_tokens_of_a_vocabulary_are_an_error(copy):
  path = copy / 'vocabulary.source.json'
  content = json.loads(path.read_text('utf-8'))
  content['tokens'].reverse()
  path.write_text(json.dumps(content), 'utf-8')
  with pytest.raises(UserError, match=r'vocabulary\.source\.json has changed'):
    open_run(copy)


def test_a_checkpoint_of_another_model_is_an_error(copy):
  edit_config(copy, lambda config: config['model'].update(embedding=6))
  with pytest.raises(UserError, match='another model'):
    open_run(copy)


def test_a_config_with_unknown_fields_is_an_error(copy):
  edit_config(copy, lambda config: config['training'].update(sed=1))
  with pytest.raises(UserError, match=r'unknown fields in .*config\.json: training\.sed'):
    open_run(copy)


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    (lambda config: config['training'].update(steps='4'), r"training\.steps must be a whole number, got '4'"),
    (lambda config: config['model'].update(dropout=None), r'model\.dropout must be a number, got None'),
    (lambda config: config['model'].update(encoder=3), r'model\.encoder must be a string or a list, got 3'),
    (lambda config: config['data'].update(buckets=1.5), r'data\.buckets must be a string or a list, got 1\.5'),
    (lambda config: config['data'].update(shared_vocabulary=1), r'shared_vocabulary must be True or False, got 1'),
    (lambda config: config.update(training=3), r'unknown fields in .*: training;'),
  ],
)
def test_a_stored_config_with_wrong_types_is_an_error(copy, edit, message):
  edit_config(copy, edit)
  with pytest.raises(UserError, match=message):
    open_run(copy)


def test_a_stored_config_that_is_no_object_is_an_error(copy):
  (copy / 'config.json').write_text('[1]')
  (copy / 'digests.json').unlink()
  with pytest.raises(UserError, match=r'config\.json must be an object with the groups of a config, got \[1\]'):
    open_run(copy)


def test_opening_a_folder_of_several_seeds_is_an_error(copy):
  edit_config(copy, lambda config: config.update(seeds=2))
  with pytest.raises(UserError, match=r'holds 2 runs, one for each seed; expected one of: .*/seed_0, .*/seed_1'):
    open_run(copy)


def test_overrides_change_the_opened_config_and_not_the_stored_config(trained):
  run = open_run(trained.folder, evaluation={'beams': 1}, dtype='bfloat16')
  assert run.config.evaluation.beams == 1 and run.config.model.dtype == 'bfloat16'
  assert run.model.decoder.cell.dtype == jnp.bfloat16
  stored = json.loads((trained.folder / 'config.json').read_text('utf-8'))
  assert stored['evaluation']['beams'] == 2 and stored['model']['dtype'] == 'float32'
  with pytest.raises(UserError, match=r"unknown field of config\.evaluation of .*: 'beam'.* \(did you mean 'beams'"):
    open_run(trained.folder, evaluation={'beam': 1})


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'alpha': 20.0}, r'^config\.evaluation\.alpha must be at least 0 and at most 10, got 20\.0$'),
    ({'metrics': ['bleu', 'bleu(lowercase=True)']}, "must name each metric once, got 'bleu' more than once"),
  ],
)
def test_invalid_overrides_are_errors(trained, fields, message):
  with pytest.raises(UserError, match=message):
    open_run(trained.folder, evaluation=fields)


def test_a_run_translates(trained):
  run = open_run(trained.folder)
  assert run.predictor is run.predictor
  (prediction,) = run.predictor(['a b'], beams=1)
  assert prediction.source == 'a b' and len(prediction.hypotheses) == 1


def test_a_very_long_source_has_no_hypotheses(trained, monkeypatch):
  """A search of such a source would take gigabytes of memory."""
  monkeypatch.setattr(predictor, 'MAX_SOURCE_LENGTH', 32)
  long, short = open_run(trained.folder).predictor(['a ' * 32, 'a ' * 31])
  assert not long.hypotheses and len(short.hypotheses) == 1


def test_evaluate_split_returns_the_results_of_training(trained):
  run = open_run(trained.folder)
  metrics, predictions = runs.evaluate_split(run, 'test')
  assert metrics == trained.results['test'] and len(predictions) == 6
  with pytest.raises(UserError, match="unknown split 'unseen'; expected one of: test, train, validation"):
    runs.evaluate_split(run, 'unseen')


def test_evaluate_hypotheses_returns_the_metrics_of_the_config(trained):
  run = open_run(trained.folder)
  references = run.system.corpus('test').target
  metrics = runs.evaluate_hypotheses(run, 'test', references)
  assert {name: metric.value for name, metric in metrics.items()} == {'exact_match': 100, 'token_error_rate': 0}
  with pytest.raises(UserError, match='1 hypotheses for the 6 rows of test; expected one for each row'):
    runs.evaluate_hypotheses(run, 'test', references[:1])
  run.system.data.corpora['test'] = run.system.corpus('test')._replace(report=('a.de: 1 pair skipped (line 3)',))
  with pytest.raises(UserError, match=r'7 hypotheses for the 6 rows .* each row; a\.de: 1 pair skipped \(line 3\)$'):
    runs.evaluate_hypotheses(run, 'test', [*references, ''])
  without_metrics = open_run(trained.folder, evaluation={'metrics': ()})
  with pytest.raises(UserError, match=r'evaluation\.metrics of the run is empty'):
    runs.evaluate_hypotheses(without_metrics, 'test', references)


def test_an_ensemble_of_one_run_with_itself_scores_like_the_run(trained):
  ensemble = open_run_or_ensemble(f'{trained.folder}, {trained.folder}', '4')
  assert ensemble.steps == (4, 4) and len(ensemble.params) == 2
  single = open_run(trained.folder, '4')
  losses = [runs.evaluate_split(run, 'test')[0]['loss'].value for run in (ensemble, single)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_several_checkpoints_of_one_run_are_an_ensemble(trained):
  ensemble = open_run_or_ensemble(str(trained.folder), 'latest,2')
  assert ensemble.steps == (4, 2) and ensemble.folder == trained.folder


def test_one_folder_is_no_ensemble(trained):
  run = open_run_or_ensemble(str(trained.folder), '2')
  assert run.steps == (2,) and not isinstance(run.params, tuple)


def test_an_existing_folder_with_a_comma_in_its_name_is_one_run(trained, tmp_path):
  folder = tmp_path / 'score=dot,seed=1'
  shutil.copytree(trained.folder, folder)
  assert open_run_or_ensemble(str(folder), '2').folder == folder
  assert runs.split_commas(str(folder / 'config.json'), '--hypotheses') == [str(folder / 'config.json')]
  assert runs.split_commas(f'{tmp_path}/score=dot,a', 'workdir') == [f'{tmp_path}/score=dot', 'a']


def test_runs_with_different_vocabularies_are_no_ensemble(trained, copy):
  path = copy / 'vocabulary.source.json'
  content = json.loads(path.read_text('utf-8'))
  content['tokens'][0] += 'x'
  path.write_text(json.dumps(content), 'utf-8')
  (copy / 'digests.json').unlink()
  with pytest.raises(UserError, match=f'{trained.folder},{copy}: runs with different vocabularies cannot be'):
    open_run_or_ensemble(f'{trained.folder},{copy}')


def test_an_ensemble_has_the_buckets_of_the_first_run_that_every_model_accepts(trained):
  system = open_run(trained.folder).system
  limited = "transformer(features=4, layers=1, heads=2, hidden=4, position='learned(max_positions=3)')"

  def with_fields(buckets, encoder):
    data = dataclasses.replace(system.config.data, buckets=buckets)
    model = dataclasses.replace(system.config.model, encoder=encoder)
    return system.with_config(dataclasses.replace(system.config, data=data, model=model))

  first = with_fields(((2, 5), (3, 3), (4, 5)), 'birnn(features=4)')
  second = with_fields(((3, 3),), limited)
  assert first.ensemble([second]).config.data.buckets == ((2, 5), (3, 3))
  assert first.ensemble([first]).config == first.config
  with pytest.raises(UserError, match=r'buckets of the first run are \(\(4, 5\),\); another run accepts none'):
    with_fields(((4, 5),), 'birnn(features=4)').ensemble([second])


def test_an_ensemble_of_a_system_without_ensembles_is_an_error(recall_run, monkeypatch):
  monkeypatch.setattr(runs, 'open_run', lambda *args: recall_run)
  with pytest.raises(UserError, match="runs/recall: runs of system 'recall' cannot be an ensemble"):
    open_run_or_ensemble('a,b')


@pytest.mark.parametrize(('folders', 'checkpoints'), [('a,', 'best'), (',', 'best'), ('', 'best'), ('a', 'best,,2')])
def test_empty_parts_between_commas_are_errors(folders, checkpoints):
  with pytest.raises(UserError, match='must be one value or several separated by commas, none of them empty, got'):
    open_run_or_ensemble(folders, checkpoints)


def test_a_system_without_the_required_ability_is_an_error(trained, recall_run):
  run = open_run(trained.folder)
  assert run.system_with(SupportsTranslation) is run.system
  message = "runs/recall is a run of system 'recall'; expected one of: captioning, classification"
  with pytest.raises(UserError, match=message):
    recall_run.system_with(SupportsLinePrediction)
  with pytest.raises(UserError, match=r'expected one of: translation$'):
    _ = recall_run.predictor
  with pytest.raises(UserError, match=r'expected one of: captioning, translation$'):
    runs.evaluate_hypotheses(recall_run, 'test', [])


def test_the_first_process_alone_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  runs.write_lines(tmp_path / 'lines.txt', ['a', 'b'])
  runs.write_json(tmp_path / 'record.json', {'a': 1})
  assert list(tmp_path.iterdir()) == []
  monkeypatch.setattr(jax, 'process_index', lambda: 0)
  runs.write_lines(tmp_path / 'lines.txt', ['a', 'ü'])
  runs.write_json(tmp_path / 'record.json', {'a': 1})
  assert read_tree(tmp_path) == {'lines.txt': 'a\nü\n'.encode(), 'record.json': b'{\n  "a": 1\n}\n'}


def test_the_folder_of_a_seed_has_its_number():
  config = parse_config({'seeds': 3, 'training': {'seed': 5}})
  assert [runs.seed_folder(Path('r'), seed) for seed in config.run_seeds] == [
    Path('r/seed_5'),
    Path('r/seed_6'),
    Path('r/seed_7'),
  ]
