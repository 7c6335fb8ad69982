"""Tables of claims: differences, lengths, probes and gradients, each from made-up runs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from attention_jax.data.encoding import encode
from attention_jax.data.text import from_pairs
from attention_jax.data.vocab import word
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import build
from attention_jax.sweeps.ledger import PLANNED, Unit, open_ledger, planned_event
from attention_jax.sweeps.space import grid
from attention_jax.systems.config import parse_config
from lab import claim_rows
from lab.claim_rows import Factor, bin_rows, conditions, finished_settings, setting_rows
from lab.gradient_paths import recurrent_distances, rms_by_distance
from tests.modules.helpers import variables
from tests.sweeps.helpers import base_config, make_sweep

FACTORS = [Factor('model.embedding', 'width', int), Factor('model.attention.score', 'score')]
METRICS = ['exact_match', 'alignment_error_rate', 'entropy']
SETTINGS = grid({'model.embedding': [8, 16], 'model.attention.score': ['dot', 'general', 'additive']})


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('sweep')
  make_sweep(path, SETTINGS)
  return path


def test_differences_are_those_of_the_same_group(folder):
  settings = finished_settings(folder)
  rows = setting_rows(settings, 'test', METRICS, FACTORS, {'score': 'general'}, within=['width'])
  assert [row['factors'] for row in rows[:2]] == [
    {'width': 8, 'score': 'dot', 'parameters': '1,234'},
    {'width': 8, 'score': 'general', 'parameters': '1,234'},
  ]
  p_values = {metric: [] for metric in METRICS[:2]}
  for i, base in enumerate([1, 1, 1, 4, 4, 4]):
    for metric in METRICS[:2]:
      entry = rows[i]['metrics'][f'test/{metric}']
      if i == base:
        assert 'difference' not in entry
        continue
      x, y = (np.array(list(settings[row].values('test', metric).values())) for row in (i, base))
      test = scipy.stats.ttest_rel(x, y)
      assert entry['difference']['value'] == pytest.approx(np.mean(x - y))
      assert entry['difference']['low'] == pytest.approx(test.confidence_interval().low)
      p_values[metric].append((test.pvalue, entry['difference']['p']))
    # Neither end of the entropy is better, so that it has no differences.
    assert rows[i]['metrics']['test/entropy'].get('difference') == (None if i == base else {})
  for pairs in p_values.values():  # corrected within a metric, over the groups
    raw, corrected = zip(*pairs, strict=True)
    np.testing.assert_allclose(corrected, scipy.stats.false_discovery_control(raw), rtol=1e-9)


@pytest.mark.parametrize(
  ('metrics', 'factors', 'baseline', 'message'),
  [
    (METRICS, FACTORS, {'score': 'dot'}, r"2 settings have \{'score': 'dot'\}; expected exactly one of: \w"),
    (METRICS, [Factor('model.attention.heads', 'heads')], {'heads': '1'}, 'the sweep varies model.embedding, .*heads'),
    # Otherwise the sweep of another claim with the same factors would replace its record by an empty one.
    (
      [*METRICS, 'bleu'],
      FACTORS,
      {'score': 'general', 'width': 8},
      'embedding=8, score=dot: 0 of 3 runs have the metric test/bleu; expected the sweep of the claim',
    ),
  ],
)
def test_the_sweep_of_another_claim_is_an_error(folder, metrics, factors, baseline, message):
  with pytest.raises(UserError, match=message):
    setting_rows(finished_settings(folder), 'test', metrics, factors, baseline)


def test_one_pair_of_runs_has_a_difference_without_an_interval(tmp_path):
  make_sweep(tmp_path, SETTINGS[:2], seeds=1)
  first, _ = setting_rows(finished_settings(tmp_path), 'test', METRICS, FACTORS, {'score': 'general'})
  assert first['metrics']['test/exact_match']['difference'].keys() == {'value'}


def test_conditions_count_finished_runs_and_unfinished_sweeps_raise(tmp_path):
  make_sweep(tmp_path, SETTINGS[:2], seeds=2)
  measured = conditions(tmp_path, 'a machine')
  # A made-up run takes 12 seconds, and has no event that started it, like adopted runs.
  expected = {'runs': 4, 'seconds': 4 * 12, 'processes': 1, 'commits': ['unknown']}
  assert {name: measured[name] for name in expected} == expected
  with open_ledger(tmp_path) as ledger:
    ledger.append(PLANNED, **planned_event(Unit('x', 'x', {}, 'f.py', {}, (0,), 'x')))
  with pytest.raises(UserError, match='1 units have not finished, such as x'):
    finished_settings(tmp_path)


def test_rows_by_length_have_the_metric_of_each_bin_and_seed(folder, monkeypatch):
  targets = ['x', 'x y', 'x y z', 'x y z x']
  corpus = from_pairs(['a', 'a b', 'a b c', 'a b c d'], targets, None, level='word', name='made up')
  system = types.SimpleNamespace(open=lambda config, folder: types.SimpleNamespace(corpus=lambda split: corpus))
  monkeypatch.setattr(claim_rows, 'SYSTEMS', {'translation': system})
  (setting,) = finished_settings(folder)[:1]
  for run in setting.runs:
    hypotheses = [*targets[:2], 'wrong' if run.seed == 0 else targets[2], 'wrong']
    (run.folder / 'hypotheses.test.txt').write_text('\n'.join(hypotheses) + '\n', 'utf-8')
  short, long = bin_rows([setting], 'test', FACTORS, bins=2)
  assert (short['factors']['source length'], long['factors']['source length']) == ('1 to 2', '3 to 4')
  assert short['metrics']['test/exact_match']['values'] == [100, 100, 100]
  assert long['metrics']['test/exact_match']['values'] == [0, 50, 50]
  assert bin_rows([setting], 'test', FACTORS, 2, by='target_length')[0]['factors']['target length'] == '1 to 2'


@pytest.fixture(scope='module')
def encoded_corpus():
  """Two sentences, encoded, and the vocabularies."""
  corpus = from_pairs(['a b c', 'b c'], ['x y', 'y'], ['0-0 2-1', '1-0'], level='word', name='made up')
  vocabularies = [word(lines) for lines in (corpus.source, corpus.target)]
  return encode(corpus, *vocabularies), vocabularies


@pytest.mark.long
def test_encoder_states_do_not_depend_on_padding(encoded_corpus):
  encoded, vocabularies = encoded_corpus
  config = base_config(model__encoder='birnn(features=4)', model__decoder='luong(features=4)', model__embedding=4)
  model = build(parse_config(config).model, *map(len, vocabularies))
  params = variables(model, *(np.ones((1, 3), dtype) for dtype in (np.int32, bool, np.int32)))
  sentences = claim_rows.encode_sentences(model, params['params'], encoded, 5)
  assert [list(sentence.tokens) for sentence in sentences] == [list(encoded.source[:3]), list(encoded.source[4:6])]
  ids = np.array(encoded.source[4:7])[None]
  encode_alone = jax.jit(lambda params: model.apply(params, ids, ids >= 0, True, method=lambda m, *x: m.encoder(*x)))
  np.testing.assert_allclose(sentences[1].states, encode_alone(params).memory[0, :2], atol=1e-6)


def test_rows_are_spread_over_a_sorted_split():
  assert claim_rows.spread_rows(101, 3).tolist() == [0, 50, 100]
  assert claim_rows.spread_rows(2, 9).tolist() == [0, 1]


@pytest.mark.long
def test_probe_rows_are_those_of_each_setting_and_a_control(folder, monkeypatch, encoded_corpus):
  encoded, vocabularies = encoded_corpus
  system = types.SimpleNamespace(
    initializer=lambda: lambda seed: 0,
    model=None,
    source_vocab=vocabularies[0],
    data=types.SimpleNamespace(encoded={'train': encoded, 'test': encoded}),
  )
  monkeypatch.setattr(claim_rows, 'open_run', lambda folder: types.SimpleNamespace(system=system, params=1))

  def states(model, params, encoded, count):
    """States that are 0 before training and one-hot tokens afterwards."""
    tokens = [encoded.source[:3], encoded.source[4:6]]
    return [claim_rows.Sentence(np.eye(9)[row] * params, row) for row in tokens]

  monkeypatch.setattr(claim_rows, 'encode_sentences', states)
  rows = claim_rows.probe_rows(finished_settings(folder)[:1], 'test', FACTORS, [0, 1], 5)
  names = [(row['factors']['score'], row['factors']['states'], row['factors']['offset']) for row in rows]
  kinds = [('dot', 'before training'), ('dot', 'after training'), ('token alone', 'one-hot')]
  assert names == [(*kind, offset) for kind in kinds for offset in (0, 1)]
  # a b c, b c: of constant states the probe predicts b or c, each 2 of 5, and c as the next token, 2 of 3.
  values = [row['metrics']['probe/accuracy']['value'] for row in rows]
  np.testing.assert_allclose(values, [40, 200 / 3, 100, 100, 100, 100], atol=1e-3)


def test_gradients_are_grouped_by_distance_and_links(monkeypatch, encoded_corpus):
  encoded, _ = encoded_corpus

  def made_up(model, params, source, mask, target):
    return params * (1.0 + jnp.outer(jnp.arange(len(target)), jnp.arange(len(source))))

  monkeypatch.setattr(claim_rows, 'MIN_PAIRS', 1)
  monkeypatch.setattr(claim_rows, 'source_gradients', made_up)
  gradients = claim_rows.measure_gradient_norms(None, jnp.float32(2.0), encoded, 5)
  norms = [2 + 2 * np.outer(np.arange(t), np.arange(s)) for s, t in ((4, 3), (3, 2))]  # with the ends of sentences
  distances = [recurrent_distances(*norm.T.shape) for norm in norms]
  expected = rms_by_distance(*(np.concatenate([x.ravel() for x in xs]) for xs in (distances, norms)))
  assert gradients.all == pytest.approx(expected)
  linked = [(0, 0, 0), (0, 1, 2), (1, 0, 1)]  # sentence, target, source
  pairs = [(distances[i][t, s], norms[i][t, s]) for i, t, s in linked]
  assert gradients.linked == pytest.approx(rms_by_distance(*map(np.array, zip(*pairs, strict=True))))


def test_gradient_rows_are_measured_before_and_after_training(folder, monkeypatch):
  system = types.SimpleNamespace(
    initializer=lambda: lambda seed: 0.5, model=None, data=types.SimpleNamespace(encoded={'test': None})
  )
  monkeypatch.setattr(claim_rows, 'open_run', lambda folder: types.SimpleNamespace(system=system, params=0.25))

  def measure(model, params, encoded, count):
    norms = {distance: 8 * params**distance for distance in (1, 2, 3)}
    return claim_rows.GradientNorms(linked={1: norms[1], 2: norms[2]}, all=norms)

  monkeypatch.setattr(claim_rows, 'measure_gradient_norms', measure)
  summaries, curves = claim_rows.gradient_rows(finished_settings(folder)[:1], 'test', FACTORS, 7)
  assert [row['factors']['training'] for row in summaries] == ['before', 'after']
  assert [row['metrics']['all/factor']['value'] for row in summaries] == [0.5, 0.25]
  assert [row['factors']['distance'] for row in curves] == [1, 2, 3] * 2
  assert [row['metrics']['all/norm']['value'] for row in curves] == [4, 2, 1, 2, 0.5, 0.125]
  assert [list(row['metrics']) for row in curves[1:3]] == [['linked/norm', 'all/norm'], ['all/norm']]
