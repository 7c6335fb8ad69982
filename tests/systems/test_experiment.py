"""Training of whole experiments: what is checked before a folder is touched, what is written, and resuming."""

import contextlib
import json
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from attention_jax.data.batching import eval_batches
from attention_jax.decoding.metrics import MetricValue
from attention_jax.errors import UserError
from attention_jax.systems import experiment
from attention_jax.systems import text_evaluation as evaluation
from attention_jax.systems.config import default_config, parse_config
from attention_jax.systems.export import export_run
from attention_jax.systems.provenance import code_version
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import open_run
from attention_jax.systems.translation.system import TranslationSystem
from attention_jax.training.checkpoint import LATEST, Checkpoints
from attention_jax.training.watch import unwatched
from attention_jax.training.writers import TRACKERS, Writer, read_metrics
from tests.systems.helpers import read_tree, tiny_config, train_quietly

pytestmark = pytest.mark.usefixtures('on_two_devices')

FILES = (
  'best checkpoints commits.txt config.json data.json digests.json goodput.json hypotheses.test.txt metrics '
  'results.json tensorboard vocabulary.source.json vocabulary.target.json'
)

# Fields of the config that are wrong -> the message.
CONFIG_ERRORS = [
  ({'seeds': 0}, 'config.seeds must be at least 1 and at most 1000, got 0'),
  ({'training__optimizer': 'adan'}, "unknown optimizer 'adan'"),
  ({'training__select': 'bleu'}, "unknown metric in training.select: 'bleu'"),
  ({'training__anneal': 'temperature: cosine'}, 'training.anneal: '),
  ({'model__decoder': 'bahdanu'}, "unknown decoder 'bahdanu'"),
  ({'model__output': 'pointer'}, 'needs one vocabulary for both sides; set config.data.shared_vocabulary=True'),
  ({'model__decoder': 'plain', 'training__select': 'recall'}, 'measures alignments, but this decoder has no attention'),
  ({'model__decoder': 'plain', 'evaluation__replace_unknown': True}, 'but this decoder has no attention'),
  ({'mesh__fsdp': 3}, 'config.mesh (data=-1, fsdp=3, tensor=1) must multiply to the 2 devices'),
  ({'data__vocabulary': 'wrd'}, "unknown vocabulary 'wrd'"),
  ({'evaluation__metrics': ('bleu', 'bleu')}, "must name each metric once, got 'bleu' more than once"),
]
# The same for mistakes that only the data reveal.
LEARNED_POSITIONS = 'transformer(features=4, heads=2, hidden=4, position="learned(max_positions=3)")'
DATA_ERRORS = [
  ({'data__buckets': ((1, 1),)}, 'config.data.buckets'),
  ({'data__buckets': ((2, 2),)}, 'train: 12 of its 16 rows fit no bucket, a greater share than config.data.max_'),
  ({'data__task': "tsv(train='none.tsv')"}, 'none.tsv: no such file'),
  ({'model__encoder': LEARNED_POSITIONS}, 'max_positions'),
]


@pytest.mark.parametrize(
  ('fields', 'message'), [*CONFIG_ERRORS, *(pytest.param(*error, marks=pytest.mark.long) for error in DATA_ERRORS)]
)
def test_errors_are_raised_before_the_folder_is_touched(data_folder, tmp_path, fields, message, monkeypatch):
  if (fields, message) in CONFIG_ERRORS:  # which are found before data are loaded
    monkeypatch.setattr(TranslationSystem, 'load', None)
  with pytest.raises(UserError) as error:
    train_quietly(tiny_config(data_folder, **fields), tmp_path / 'run')
  assert message in str(error.value)
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_a_source_of_the_greatest_length_of_the_model_is_no_error(data_folder, tmp_path):
  """Longer sources than the buckets are padded to multiples of 32 only if the model accepts such a length."""
  folder = shutil.copytree(data_folder, tmp_path / 'data')
  with open(folder / 'validation.tsv', 'a', encoding='utf-8') as file:
    file.write(f'{" ".join("a" * 33)}\ta\t0-0\n')
  for max_positions, message in ((34, None), (33, 'the memory has S=34 positions but w only max_positions=33 rows')):
    fields = {'model__attention__score': f'location(max_positions={max_positions})'}
    system = TranslationSystem.load(parse_config(tiny_config(folder, **fields)), None)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
      system.check_data(lambda line: None)


@pytest.mark.parametrize('system', SYSTEMS)
def test_a_batch_without_rows_is_an_error_of_the_config(system):
  config = default_config(system)
  config.data.batch_size = 0
  with pytest.raises(UserError, match=r'^config\.data\.batch_size must be at least 1, got 0$'):
    experiment.check_config(parse_config(config))


@pytest.mark.parametrize(
  ('fields', 'trackers', 'message'),
  [
    ({'initial_run': ['a', 'b']}, (), "config.initial_run must be a string, got ('a', 'b')"),
    ({'initial_vectors': ['a', 'b']}, (), "config.initial_vectors must be a string, got ('a', 'b')"),
    ({'training': {'sed': 1}}, (), 'unknown fields in the config: training.sed; expected the fields of'),
    ({}, ['wandbb'], "unknown tracker 'wandbb'"),
  ],
)
def test_wrong_types_fields_and_trackers_are_errors(config, fields, trackers, message, tmp_path):
  with pytest.raises(UserError) as error:
    train_quietly(config | fields, tmp_path / 'run', trackers=trackers)
  assert message in str(error.value) and not (tmp_path / 'run').exists()


@pytest.mark.long
def test_a_folder_with_another_config_is_left_as_it_is(trained, config):
  before = read_tree(trained.folder)
  with pytest.raises(UserError, match='another config'):
    train_quietly(config | {'model': config['model'] | {'embedding': 6}}, trained.folder)
  assert read_tree(trained.folder) == before


def test_a_finished_run_has_all_files_and_no_unfinished_file(trained):
  assert {path.name for path in trained.folder.glob('[!.]*')} == {*FILES.split()}
  assert not [name for name in read_tree(trained.folder) if name.endswith('.part')]
  assert len(read_metrics(trained.folder)) == 4


@pytest.mark.long
def test_a_run_with_sharded_parameters_has_the_same_results(trained, config, tmp_path):
  results, _ = train_quietly(config | {'mesh': {'fsdp': 2}}, tmp_path)
  for name, result in results['test'].items():
    assert result.value == pytest.approx(trained.results['test'][name].value, rel=1e-5), name
  params = [jax.device_get(open_run(folder).params) for folder in (tmp_path, trained.folder)]
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *params)


@pytest.mark.long
def test_results_json_has_the_results_and_their_origin(trained, config):
  record = json.loads((trained.folder / 'results.json').read_text('utf-8'))
  assert list(record) == ['step', 'parameters', 'implementation', 'commit', 'evaluation', 'results']
  assert record['step'] in (2, 4) and record['implementation'] == 'auto (xla, one query at a time)'
  assert record['parameters'] == sum(x.size for x in jax.tree.leaves(open_run(trained.folder).params))
  assert record['commit'] == code_version()
  assert record['evaluation'] == json.loads(json.dumps(config['evaluation']))
  assert list(record['results']) == ['test'] == list(trained.results)
  for name, result in trained.results['test'].items():
    assert record['results']['test'][name] == result._asdict()
    assert math.isfinite(result.value) and result.unit and result.signature
  assert {'loss', 'accuracy', 'exact_match', 'token_error_rate', 'entropy'} <= set(trained.results['test'])
  assert set(trained.results['test']) <= experiment.measurable_metrics(parse_config(config))
  hypotheses = (trained.folder / 'hypotheses.test.txt').read_text('utf-8')
  assert hypotheses.count('\n') == 6  # the rows of test.tsv


def test_the_log_describes_the_model_the_batches_and_the_written_files(trained):
  lines = '\n'.join(trained.lines)
  for text in (
    'attention implementation auto (xla, one query at a time); 2 x cpu',
    'batches of shapes (rows, source, target) [(8, 5, 5)]',
    ' parameters, 2 updates an epoch, ',
    'all 4 steps are done (',
    'the best by validation loss',
    f'written to {trained.folder}: best/, checkpoints/, commits.txt, config.json',
  ):
    assert text in lines, text


@pytest.mark.long
def test_a_run_with_buckets_from_its_data_continues_and_opens_without_data(data_folder, tmp_path):
  folder = shutil.copytree(data_folder, tmp_path / 'data')
  config = tiny_config(folder, data__buckets=(), data__vocabulary='subword(size=8000, min_count=5)')
  train_quietly(config | {'training': config['training'] | {'steps': 2}}, tmp_path / 'run')
  assert json.loads((tmp_path / 'run' / 'buckets.json').read_text('utf-8'))
  _, lines = train_quietly(config, tmp_path / 'run')  # with more steps
  assert 'all 4 steps are done (' in '\n'.join(lines)
  assert [record['step'] for record in read_metrics(tmp_path / 'run')] == [1, 2, 3, 4]
  run = open_run(tmp_path / 'run')
  assert run.step in (2, 4) and run.config.data.buckets == () and run.config.training.steps == 4
  export_run(tmp_path / 'run', tmp_path / 'exported')
  shutil.rmtree(folder)
  exported = open_run(tmp_path / 'exported')
  assert exported.system.buckets == run.system.buckets == ((4, 4), (8, 8))
  assert exported.translate(['a b'])[0].text == run.translate(['a b'])[0].text
  assert exported.score([('a b', 'b a')])[0].log_prob == run.score([('a b', 'b a')])[0].log_prob


@pytest.mark.long
def test_resuming_a_finished_run_by_a_relative_path_evaluates_it_again_alone(trained, config, monkeypatch):
  monkeypatch.chdir(trained.folder.parent)
  before = read_tree(trained.folder)
  results, lines = train_quietly(config, Path(trained.folder.name), trackers=())  # which get the results again
  assert results == trained.results
  assert any(line.startswith('all 4 steps are done (') for line in lines)
  assert read_tree(trained.folder) == before


@pytest.mark.parametrize('is_killed', [pytest.param(False, marks=pytest.mark.long), True])
def test_fewer_steps_than_the_run_has_made_are_an_error(is_killed, trained, config, tmp_path):
  """Also if it was killed after the evaluation of step 4, and before the latest state of that step was on disk."""
  folder = shutil.copytree(trained.folder, tmp_path / 'run')
  if is_killed:
    shutil.rmtree(folder / 'best')
    (folder / 'best').mkdir()
    (folder / 'checkpoints' / '4').rename(folder / 'best' / '4')
  before = read_tree(folder)
  with pytest.raises(UserError, match=r'steps is 3, but the run in .* has made 4 updates; expected at least 4'):
    train_quietly(config | {'training': config['training'] | {'steps': 3}}, folder)
  assert read_tree(folder) == before


@pytest.mark.parametrize(
  ('dtype', 'cpu_flags', 'is_slow'),
  [
    ('bfloat16', 'avx512_bf16 amx_bf16 amx_tile', False),
    ('bfloat16', 'avx512f avx512_bf16', True),
    ('bfloat16', None, True),
    ('float32', 'avx512_bf16', False),
  ],
)
def test_a_run_in_16_bits_on_a_cpu_without_amx_is_described(dtype, cpu_flags, is_slow, tmp_path):
  if cpu_flags:
    (tmp_path / 'cpuinfo').write_text(f'processor\t: 0\nflags\t\t: fpu {cpu_flags}\n')
  line = experiment._describe_precision(parse_config({'model': {'dtype': dtype}}), tmp_path / 'cpuinfo')
  assert line.startswith(f"config.model.dtype='{dtype}' is usually slower than float32") == is_slow == bool(line)


def test_more_steps_under_a_schedule_that_depends_on_them_report_both_rates(config, monkeypatch):
  def described(made=4, **fields):
    stored = config | {'training': config['training'] | fields}
    params = {'temperature': np.zeros([])}
    raised = stored | {'training': stored['training'] | {'steps': 8}}
    return experiment._describe_raised_steps(parse_config(stored), parse_config(raised), params, made)

  assert described(schedule='cosine(peak=1.0)') == [
    'training.steps was 4 and is now 8, on which the schedule of the learning rate depends: it was 0 at step 4, and is '
    '0.3087 at step 5'
  ]
  (line,) = described(anneal='temperature: linear(peak=2.0, end=1.0)')
  assert 'the schedule of the temperature depends: it was 1 at step 4, and is 1.375 at step 5' in line
  assert described(schedule='cosine(steps=4)') == described(schedule='cosine', made=0) == described() == []


def interrupted_stream(batches, start, stop):
  for step in range(start, stop):
    if step == 1:
      signal.raise_signal(signal.SIGTERM)  # the second update is still made
    yield batches[step]


def interrupted_batches(*args, **options):
  signal.raise_signal(signal.SIGTERM)
  return eval_batches(*args, **options)


@pytest.mark.long
@pytest.mark.parametrize(
  ('module', 'function', 'interrupted'),
  [(experiment, 'stream', interrupted_stream), (evaluation, 'eval_batches', interrupted_batches)],
  ids=['training', 'validation'],
)
def test_a_signal_stops_training_and_the_same_call_resumes_it(
  trained, config, tmp_path, monkeypatch, module, function, interrupted
):
  """Quick forms: tests/training/test_train.py, and the signal during the final evaluation."""
  folder = tmp_path / 'run'
  with monkeypatch.context() as patch:
    patch.setattr(module, function, interrupted)
    results, lines = train_quietly(config, folder)
  assert results is None
  assert lines[-1] == 'run the same command again to resume from step 2'
  assert not (folder / 'results.json').exists() and not list(folder.glob('hypotheses.*'))
  results, _ = train_quietly(config, folder)
  assert results == trained.results
  for kind in ('latest', 'best'):
    jax.tree.map(np.testing.assert_array_equal, open_run(folder, kind).params, open_run(trained.folder, kind).params)


def test_a_signal_stops_the_final_evaluation_and_the_same_call_repeats_it(trained, config, tmp_path, monkeypatch):
  folder = shutil.copytree(trained.folder, tmp_path / 'run')
  before = read_tree(folder)
  with monkeypatch.context() as patch:
    patch.setattr(evaluation, 'eval_batches', interrupted_batches)
    results, lines = train_quietly(config, folder)
  assert results is None
  assert lines[-1] == 'stopped by SIGTERM while evaluating; run the same command again to repeat the evaluation'
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  results, _ = train_quietly(config, folder, trackers=())
  assert results == trained.results and read_tree(folder) == before


@pytest.mark.long
@pytest.mark.parametrize('seeds', [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_signal_while_the_last_state_is_saved_stops_before_the_final_evaluation(config, tmp_path, monkeypatch, seeds):
  save = Checkpoints.save
  steps = config['training']['steps']

  def interrupted_save(checkpoints, state, host_values, kind=LATEST):
    if checkpoints.folder in (tmp_path, tmp_path / 'seed_1') and kind == LATEST and state.step == steps:
      signal.raise_signal(signal.SIGTERM)
    save(checkpoints, state, host_values, kind)

  monkeypatch.setattr(Checkpoints, 'save', interrupted_save)
  results, lines = train_quietly(config | {'seeds': seeds}, tmp_path)
  assert results is None and lines[-1] == f'run the same command again to resume from step {steps}'
  assert not (tmp_path / 'results.json').exists()


@pytest.mark.long
def test_a_run_that_was_killed_before_it_stored_its_data_resumes(trained, config, tmp_path):
  (tmp_path / 'config.json').write_bytes((trained.folder / 'config.json').read_bytes())
  results, lines = train_quietly(config, tmp_path)
  assert results == trained.results and any('data.json' in line for line in lines)
  for name in ('vocabulary.source.json', 'vocabulary.target.json', 'data.json', 'results.json'):
    assert (tmp_path / name).read_bytes() == (trained.folder / name).read_bytes()


@pytest.mark.parametrize('stored', [['source', 'target'], ['source'], []], ids=['both', 'source', 'none'])
def test_loading_a_system_writes_no_vocabulary(trained, config, tmp_path, stored):
  for side in stored:
    shutil.copy(trained.folder / f'vocabulary.{side}.json', tmp_path)
  before = read_tree(tmp_path)
  system = TranslationSystem.load(parse_config(config), str(tmp_path))
  assert read_tree(tmp_path) == before
  system.save(str(tmp_path))
  for name in ('vocabulary.source.json', 'vocabulary.target.json'):
    assert (tmp_path / name).read_bytes() == (trained.folder / name).read_bytes()


@pytest.mark.long
def test_a_task_without_validation_and_test_splits_has_no_results(data_folder, tmp_path):
  config = tiny_config(data_folder, data__task="tsv(train='train.tsv')", training__steps=1)
  results, lines = train_quietly(config, tmp_path / 'run')
  assert results == {} and json.loads((tmp_path / 'run' / 'results.json').read_text('utf-8'))['results'] == {}
  assert any(line.startswith('no validation split: training.select and training.patience have no') for line in lines)


def test_a_validation_loss_that_is_not_finite_is_an_error():
  system = SimpleNamespace(
    splits=['train', 'validation'],
    evaluate=lambda params, split, beams, watch: ({'loss': MetricValue(float('nan'), 'nat', '')}, []),
  )
  validate = experiment._make_validation(system)
  state = SimpleNamespace(step=7, average=None, params={})
  with pytest.raises(UserError, match='validation loss must be finite, got nan after step 7; try a lower'):
    validate(state, unwatched)


def test_results_of_several_seeds_are_summarized(tmp_path):
  runs = [{'test': {'loss': MetricValue(value, 'nat', 's')}} for value in (1.0, 3.0)]
  runs[0]['test']['entropy'] = MetricValue(0.5, 'nat', 's')
  lines = []
  summaries = experiment._summarize(tmp_path, [4, 5], runs, lines.append)
  assert summaries['test']['loss'].value == 2.0 and summaries['test']['loss'].values == (1.0, 3.0)
  assert 'entropy' not in summaries['test'] and lines[0] == 'test: no mean of entropy, which seed 5 lacks'
  record = json.loads((tmp_path / 'results.json').read_text('utf-8'))
  assert record['seeds'] == [4, 5] and record['results']['test']['loss']['values'] == [1.0, 3.0]


def test_stored_configs_of_earlier_versions_get_the_defaults_of_new_fields():
  config = default_config().to_dict()
  del config['evaluation']['gamma']
  assert experiment._make_completion('runs/x')(config) == default_config().to_dict()


def test_trackers_get_the_config_the_results_and_a_picture(config, tmp_path, monkeypatch):
  calls = []

  class Tracker(Writer):
    takes_pictures = True

    def __init__(self, run):
      self.records = {}
      calls.append((run, self.records))

    def write(self, step, record):
      self.records[step, min(record).partition('/')[0]] = record

    def picture(self, step, name, path):
      self.records[step, name] = path.read_bytes()

  monkeypatch.setitem(TRACKERS, 'mine', Tracker)
  results, _ = train_quietly(config, tmp_path / 'run', trackers=['mine'], group='sweep')
  ((run, records),) = calls
  assert run.group == 'sweep' and run.folder == tmp_path / 'run' and run.config['training']['steps'] == 4
  assert {step for step, kind in records if kind == 'train'} == {1, 2, 3, 4}
  assert records[4, 'attention/validation'].startswith(b'\x89PNG')
  assert records[4, 'results']['results/test/exact_match'] == results['test']['exact_match'].value
  assert not list(tmp_path.glob('run/*/tensorboard'))
