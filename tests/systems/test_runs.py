"""Opening of trained runs: checkpoints, overrides, ensembles, and errors."""

import asyncio
import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import char
from attention_jax.decoding import predictor
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.systems import runs
from attention_jax.systems.base import SupportsLinePrediction
from attention_jax.systems.config import default_run_config, parse_config
from attention_jax.systems.recall.system import RecallSystem
from attention_jax.systems.runs import Run, open_run, open_run_or_ensemble
from tests.models.helpers import build_transformer
from tests.modules.helpers import variables
from tests.systems.helpers import read_tree, two_devices

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture
def copy(trained, tmp_path):
  """A copy of the finished run, which a test may change."""
  return shutil.copytree(trained.folder, tmp_path / 'run')


@pytest.fixture
def recall_run():
  """A run of a system without optional abilities; it has no parameters."""
  return Run(Path('runs/recall'), RecallSystem(default_run_config('recall')), {}, (3,))


def edit_file(folder, edit, name='config.json'):
  """Changes the content of a JSON file, or writes what `edit` returns instead."""
  content = json.loads((folder / name).read_text('utf-8'))
  (folder / name).write_text(json.dumps(edit(content) or content), 'utf-8')
  (folder / 'digests.json').unlink()  # otherwise opening the run reports the changed file


@pytest.mark.long
def test_checkpoints_are_opened_by_name_and_step(trained):
  names = ('best', 'latest', 'average', '2', '4')
  opened = [open_run(trained.folder, name) for name in names]
  best_step = json.loads((trained.folder / 'results.json').read_text('utf-8'))['step']
  assert [run.steps for run in opened] == [(best_step,), (4,), (2, 4), (2,), (4,)]
  assert opened[names.index('average')].step == 4
  arrays = list(zip(*(jax.tree.leaves(run.params) for run in opened), strict=True))
  for best, latest, average, second, fourth in arrays:
    np.testing.assert_array_equal(latest, fourth)
    np.testing.assert_array_equal(best, {2: second, 4: fourth}[best_step])
    np.testing.assert_allclose(average, (second + fourth) / 2, rtol=1e-6, atol=1e-7)
  assert not all(np.array_equal(second, fourth) for *_, second, fourth in arrays)


def test_opening_a_run_changes_and_prints_nothing(trained, capfd):
  before = read_tree(trained.folder)
  for checkpoint in ('best', 'average'):
    open_run(trained.folder, checkpoint)
  assert read_tree(trained.folder) == before and capfd.readouterr() == ('', '')


@pytest.mark.long
def test_training_keep_bounds_the_average(copy):
  edit_file(copy, lambda config: config['training'].update(keep=1))
  assert open_run(copy, 'average').steps == (4,)


def test_a_missing_best_checkpoint_is_an_error(copy):
  shutil.rmtree(copy / 'best')
  with pytest.raises(UserError, match=r'best has no checkpoint, but .* that of step 4; .* such as latest'):
    open_run(copy)
  assert open_run(copy, 'latest').steps == (4,)


def test_a_folder_without_a_run_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r'holds no config\.json'):
    open_run(tmp_path)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('checkpoint', ['latest', '4'])
def test_a_run_without_checkpoints_is_an_error(checkpoint, copy):
  for name in ('best', 'checkpoints'):
    shutil.rmtree(copy / name)
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


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    (lambda config: [1], r'config\.json must be an object with the groups of a config, got \[1\]'),
    (lambda config: config.update(training=3), r'unknown fields in .*config\.json: training;'),
    (lambda config: config['training'].update(sed=1), r'unknown fields in .*config\.json: training\.sed'),
    (lambda config: config['training'].update(steps='4'), r"training\.steps must be a whole number, got '4'"),
    (lambda config: config['model'].update(encoder=3), r'model\.encoder must be a string or a list, got 3'),
    (lambda config: config['data'].update(shared_vocabulary=1), r'shared_vocabulary must be True or False, got 1'),
    (lambda config: config.update(seeds=2), r'holds 2 runs, one for each seed; expected one of: .*_0, .*/seed_1'),
    pytest.param(lambda config: config['model'].update(embedding=6), 'another model', marks=pytest.mark.long),
  ],
)
def test_a_stored_config_of_wrong_fields_or_of_another_model_is_an_error(copy, edit, message):
  edit_file(copy, edit)
  with pytest.raises(UserError, match=message):
    open_run(copy)


def test_overrides_change_the_opened_config_and_not_the_stored_config(trained):
  run = open_run(trained.folder, evaluation={'beams': 1}, dtype='bfloat16')
  assert run.config.evaluation.beams == 1 and run.config.model.dtype == 'bfloat16'
  assert run.model.decoder.cell.dtype == jnp.bfloat16
  stored = json.loads((trained.folder / 'config.json').read_text('utf-8'))
  assert stored['evaluation']['beams'] == 2 and stored['model']['dtype'] == 'float32'


@pytest.mark.parametrize(
  ('checkpoint', 'fields', 'message'),
  [
    ('bst', {}, r"unknown checkpoint or step 'bst' \(did you mean 'best'\?\); expected one of: average, best, latest"),
    ('3', {}, r"unknown checkpoint of .*run: '3'.*; expected one of: 2, 4"),
    ('best', {'beam': 1}, r"unknown field of config\.evaluation of .*: 'beam'.* \(did you mean 'beams'"),
    ('best', {'alpha': 20.0}, r'^config\.evaluation\.alpha must be at least 0 and at most 10, got 20\.0$'),
    ('best', {'metrics': ['bleu', 'bleu(lowercase=True)']}, "must name each metric once, got 'bleu' more than once"),
  ],
)
def test_unknown_checkpoints_and_invalid_overrides_are_errors(trained, checkpoint, fields, message):
  with pytest.raises(UserError, match=message):
    open_run(trained.folder, checkpoint, evaluation=fields)


@pytest.mark.long
def test_a_very_long_source_has_no_hypotheses(trained, monkeypatch):
  """A search of such a source would take gigabytes of memory."""
  monkeypatch.setattr(predictor, 'MAX_SOURCE_LENGTH', 32)
  long, short = open_run(trained.folder).predictor(['a ' * 32, 'a ' * 31])
  assert not long.hypotheses and len(short.hypotheses) == 1


@pytest.mark.long
def test_evaluate_split_returns_the_results_of_training(trained):
  run = open_run(trained.folder)
  metrics, predictions = runs.evaluate_split(run, 'test')
  assert metrics == trained.results['test'] == run.evaluate('test')
  hypotheses = (trained.folder / 'hypotheses.test.txt').read_text('utf-8').splitlines()
  assert run.system.format_predictions(predictions) == hypotheses and len(hypotheses) == 6


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


@pytest.mark.long
def test_several_folders_or_checkpoints_are_an_ensemble(trained):
  ensemble = open_run_or_ensemble(f'{trained.folder}, {trained.folder}', '4')
  assert ensemble.steps == (4, 4) and len(ensemble.params) == 2
  losses = [runs.evaluate_split(run, 'test')[0]['loss'].value for run in (ensemble, open_run(trained.folder, '4'))]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # with itself, a run scores like alone
  ensemble = open_run_or_ensemble(str(trained.folder), 'latest,2')
  assert ensemble.steps == (4, 2) and ensemble.folder == trained.folder


def test_one_folder_is_no_ensemble(trained):
  run = open_run_or_ensemble(str(trained.folder), '2')
  assert run.steps == (2,) and not isinstance(run.params, tuple)


@pytest.mark.long
def test_an_existing_folder_with_a_comma_in_its_name_is_one_run(trained, tmp_path):
  folder = shutil.copytree(trained.folder, tmp_path / 'score=dot,seed=1')
  assert open_run_or_ensemble(str(folder), '2').folder == folder
  assert runs.split_commas(str(folder / 'config.json'), '--hypotheses') == [str(folder / 'config.json')]
  assert runs.split_commas(f'{tmp_path}/score=dot,a', 'workdir') == [f'{tmp_path}/score=dot', 'a']


def test_runs_with_different_vocabularies_are_no_ensemble(trained, copy):
  edit_file(copy, lambda content: content['tokens'].reverse(), 'vocabulary.source.json')
  with pytest.raises(UserError, match=f'{trained.folder},{copy}: runs with different vocabularies cannot be'):
    open_run_or_ensemble(f'{trained.folder},{copy}')


def test_an_ensemble_has_the_buckets_of_the_first_run_that_every_model_accepts(trained):
  system = open_run(trained.folder).system
  limited = "transformer(features=4, layers=1, heads=2, hidden=4, position='learned(max_positions=3)')"

  def with_fields(buckets, encoder):
    model = dataclasses.replace(system.config.model, encoder=encoder)
    changed = system.with_config(dataclasses.replace(system.config, model=model))
    changed.buckets = buckets
    return changed

  first = with_fields(((2, 5), (3, 3), (4, 5)), 'birnn(features=4)')
  second = with_fields(((3, 3),), limited)
  assert first.ensemble([second]).buckets == ((2, 5), (3, 3))
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


@pytest.mark.parametrize(
  ('call', 'expected'),
  [
    (lambda run: run.system_with(SupportsLinePrediction), 'captioning, classification'),
    (lambda run: run.predictor, 'translation'),
    (lambda run: run.translate(['a']), 'translation'),
    (lambda run: run.score(PAIRS), 'translation'),
    (lambda run: run.align(PAIRS), 'translation'),
    (lambda run: runs.evaluate_hypotheses(run, 'test', []), 'captioning, translation'),
  ],
)
def test_a_system_without_the_required_ability_is_an_error(recall_run, call, expected):
  with pytest.raises(UserError, match=f"runs/recall is a run of system 'recall'; expected one of: {expected}$"):
    call(recall_run)


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
  config = parse_config({'seeds': 2, 'training': {'seed': 5}})
  assert [str(runs.seed_folder(Path('r'), seed)) for seed in config.run_seeds] == ['r/seed_5', 'r/seed_6']


@pytest.fixture(scope='module')
def run(trained):
  """The finished run, opened by its public name."""
  with two_devices():
    return aj.open_run(trained.folder)


def with_config(run, config):
  """A run of the same system with another model, which has random parameters."""
  system = run.system.with_config(config)
  return Run(run.folder, system, system.initializer()(0), (0,))


PAIRS = [('a b c', 'c b a'), ('d', 'd')]


@pytest.mark.long
def test_a_run_translates_lines(run):
  best = run.translate(['a b c', 'd'])
  lists = run.translate(['a b c', 'd'], nbest=2)
  predictions = run.predictor(['a b c', 'd'], beams=2)
  assert run.predictor is run.predictor and predictions[0].source == 'a b c'
  for translation, hypotheses, prediction in zip(best, lists, predictions, strict=True):
    assert translation.text == hypotheses[0].text == prediction.hypotheses[0].text
    assert translation.score == prediction.hypotheses[0].score
    assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == len(hypotheses) <= 2
    assert all(s < len(prediction.tokens) and t < len(translation.tokens) for s, t in translation.alignment)
  (samples,) = run.translate(['a b c'], nbest=3, sampling=Sampling(3))
  assert len(samples) == 3  # repeated samples count
  assert run.translate([]) == []


def test_a_run_scores_aligns_and_attends(run):
  scored = run.score(PAIRS)
  aligned = run.align(PAIRS)
  for (source, target), pair, alignment in zip(PAIRS, scored, aligned, strict=True):
    shape = (len(target.split()) + 1, len(source.split()) + 1)
    assert len(pair.log_probs) == shape[0] and pair.log_prob == pytest.approx(sum(pair.log_probs))
    assert tuple(alignment.links) == pair.alignment  # words are tokens
    np.testing.assert_allclose(alignment.weights, pair.weights, rtol=1e-6)
    maps = run.attention(source, target)
    assert maps.source_tokens == [*source.split(), '</s>'] and maps.target_tokens == [*target.split(), '</s>']
    assert maps.weights.shape == shape and maps.layer_weights is None
    np.testing.assert_allclose(maps.weights, pair.weights, rtol=1e-5)
  assert run.attention('a b').target_tokens[:-1] == run.translate(['a b'])[0].tokens


@pytest.mark.long
def test_weights_of_every_layer_and_head_are_those_of_the_model(run):
  layers = {side: 'transformer(features=4, layers=1, heads=2, hidden=4)' for side in ('encoder', 'decoder')}
  model = layers | {'embedding': 4, 'attention': {'score': 'scaled_dot', 'features': 4, 'heads': 2}}
  layered = with_config(run, parse_config({'model': model, 'data': dataclasses.asdict(run.config.data)}))
  assert layered.attention('a b', 'c').layer_weights.shape == (1, 2, 2, 3)
  assert layered.score([('a b', 'c')], layers=True)[0].layer_weights.shape == (1, 2, 2, 3)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda run: run.translate('a b'), "lines must be a list of texts, got 'a b'"),
    (lambda run: run.translate(['a', ' ']), "lines must not be blank, got ' ' at index 1"),
    (lambda run: run.translate(['a'], beams=0), 'beams must be at least 1, got 0'),
    (lambda run: run.translate(['a'], nbest=3), 'nbest must be from 1 to 2, the number of beams, got 3'),
    (lambda run: run.translate(['a'], nbest=3, sampling=Sampling(2)), 'the number of samples, got 3'),
    (lambda run: run.score(['ab']), "pairs must be pairs of a source and a target, got 'ab'"),
    (lambda run: run.score([('a', '')]), "targets must not be blank, got '' at index 0"),
    (lambda run: run.align(PAIRS, level='wrd'), "unknown level of links 'wrd'"),
    (lambda run: run.attention(''), "source and target must not be blank, got '' at index 0"),
    (lambda run: run.evaluate('tst'), "unknown split 'tst' (did you mean 'test'?); expected one of: test, train, val"),
  ],
)
def test_mistakes_in_calls_of_a_run_are_errors_of_one_line(run, call, message):
  with pytest.raises(UserError, match=re.escape(message)) as error:
    call(run)
  assert '\n' not in str(error.value)


def test_a_run_without_attention_has_no_alignments(run):
  model = dataclasses.replace(run.config.model, decoder='plain(features=4)', encoder='embedded')
  without = with_config(run, dataclasses.replace(run.config, model=model))
  for method, argument in ((without.align, PAIRS), (without.attention, 'a')):
    with pytest.raises(UserError, match='this run has no attention; expected a run whose decoder attends'):
      method(argument)


@pytest.mark.long
def test_training_in_a_thread_beside_an_event_loop_repeats_a_run(config, trained, tmp_path):
  """As in a notebook: an event loop runs, and its threads cannot set the handlers of signals."""

  async def train():
    return await asyncio.to_thread(aj.train, config, tmp_path / 'run', lambda line: None)

  assert asyncio.run(train()) == trained.results


@pytest.mark.long
@pytest.mark.parametrize('unlinked_targets', [True, False])
def test_error_rates_of_heads_are_those_of_their_largest_weights(unlinked_targets):
  vocabulary = char(['ab cd e'])
  model = build_transformer(sizes=(len(vocabulary), len(vocabulary)))
  ids = np.ones((1, 3), np.int32)
  predictor = SimpleNamespace(source_vocab=vocabulary, target_vocab=vocabulary, buckets=[(8, 8)])
  config = SimpleNamespace(data=SimpleNamespace(normalization='none'))
  system = SimpleNamespace(model=model, config=config, predictor=lambda params: predictor)
  params = jax.tree.map(lambda x: 5 * x, variables(model, ids, ids > 0, ids)['params'])  # weights that differ
  run = Run(Path('run'), system, params, (1,))
  links = [((0, 0), (1, 1)), ((0, 0),)]
  corpus = Corpus(['ab cd', 'e dc'], ['cd a', 'd ee'], links, possible=[links[0], ((0, 0), (1, 0))])

  def words(line):  # the word of each character, -1 for spaces
    return [-1 if char == ' ' else line[:i].count(' ') for i, char in enumerate(line)]

  expected = np.zeros((2, 4))
  scored = run.score(corpus, layers=True)
  for layer, head in np.ndindex(expected.shape):
    hits = total = 0
    for row, pair in enumerate(scored):
      sure, possible = set(corpus.links[row]), set(corpus.possible[row])
      for word in range(2):
        letters = [t for t, w in enumerate(words(corpus.target[row])) if w == word]
        mean = pair.layer_weights[layer, head][letters].mean(0)
        source = words(corpus.source[row])
        sums = [mean[[s for s, w in enumerate(source) if w == number]].sum() for number in range(2)] + [mean[-1]]
        best = int(np.argmax(sums))
        if best < 2 and (unlinked_targets or word in {target for _, target in possible}):
          hits += ((best, word) in sure) + ((best, word) in possible)
          total += 1
      total += len(sure)
    expected[layer, head] = 1 - hits / total
  rates = run.head_error_rates(corpus, unlinked_targets=unlinked_targets)
  np.testing.assert_allclose(rates, expected, atol=1e-12)
  assert len(np.unique(rates)) > 1
  with pytest.raises(UserError, match='the corpus has no gold links'):
    run.head_error_rates(corpus._replace(links=None))
