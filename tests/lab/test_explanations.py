"""Tables of explanations from made-up runs: means, deviations over seeds, intervals over examples, guided probes."""

import types

import numpy as np
import pytest
import scipy.special
import scipy.stats

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.sweeps.space import grid
from attention_jax.systems.classification.batches import EncodedDocuments
from attention_jax.systems.config import default_run_config, parse_config
from attention_jax.tokens import EOS, PAD, UNK
from lab import explanations, probes
from lab.claim_rows import Factor, finished_settings
from lab.explanation_measures import Example, Explanations, MeasureOptions
from lab.explanations import GUIDES, MEASURES, Study, document_examples, explanation_rows, pair_examples
from tests.sweeps.helpers import make_sweep

N, T, S, TOKENS = 30, 2, 4, 5
STUDY = Study('validation', MeasureOptions(0.05), num_explained=N, num_probe_train=N, num_probe_test=N)


def make_examples(system, split, count):
  """Returns examples in which query t has source token t as its target; the last query is padding."""
  rng = np.random.default_rng(len(split))
  source = rng.integers(3, 3 + TOKENS, (count, S))
  mask = np.arange(S) < rng.integers(2, S + 1, count)[:, None]
  steps = np.tile([True, True, False], (count, 1))
  return Example(np.where(mask, source, 0), mask, np.pad(source[:, :T], ((0, 0), (0, 1))), steps)


def pointed_weights(examples):
  """Weights that point to the position of each target."""
  return np.tile(np.eye(T + 1, S), (len(examples.source), 1, 1))


def make_rows(folder, seeds):
  """Returns the rows of explanations and of probes of a sweep of one setting."""
  make_sweep(folder, grid({'model.attention.score': ['dot']}), seeds)
  opened = iter(range(seeds))

  def open_run(folder):
    system = types.SimpleNamespace(model=next(opened))
    return types.SimpleNamespace(config=default_run_config('translation'), params=None, system=system)

  def explain(reader, seed, params, examples, options):
    weights = 0.1 * seed * np.ones([N, T + 1, S]) / S + (1 - 0.1 * seed) * pointed_weights(examples)
    steps = np.tile([seed, seed + 1.0, np.nan], (N, 1)) + np.arange(N)[:, None]
    return Explanations(weights, weights, weights[..., ::-1], steps, steps / 100)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(explanations, 'open_run', open_run)
    patch.setattr(explanations, 'explain', explain)
    patch.setattr(explanations, 'read_weights', lambda reader, model, params, examples: pointed_weights(examples))
    patch.setattr(explanations, 'EXAMPLES', {'translation': make_examples})
    patch.setattr(probes, 'REGULARISATION', (1.0,))
    return explanation_rows(finished_settings(folder), [Factor('model.attention.score', 'score')], STUDY)


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
  return make_rows(tmp_path_factory.mktemp('sweep'), 3)


@pytest.mark.long
def test_values_are_means_of_each_seed_and_intervals_are_over_examples(rows):
  measures = {row['factors']['measure']: row for row in rows[0]}
  assert list(measures) == list(MEASURES.values())
  row = measures[MEASURES['permutation']]
  by_example = 1.5 + np.arange(N)
  np.testing.assert_allclose(row['metrics']['explanation/value']['values'], np.arange(3) - 1 + by_example.mean())
  options = {'method': 'percentile', 'rng': np.random.default_rng(0), 'n_resamples': 9999}
  interval = scipy.stats.bootstrap((by_example,), np.mean, **options).confidence_interval
  assert row['factors']['score'] == 'dot'
  assert row['factors']['interval'] == f'[{interval.low:.3f}, {interval.high:.3f}]'
  assert measures[MEASURES['weights and gradients']]['metrics']['explanation/value']['value'] == 1


def test_divergence_of_seeds_is_that_of_each_pair(rows):
  entry = rows[0][-1]['metrics']['explanation/value']
  weights = [0.1 * seed * np.ones(S) / S + (1 - 0.1 * seed) * np.eye(S)[0] for seed in range(3)]
  expected = []
  for i, j in ((0, 1), (0, 2), (1, 2)):
    middle = (weights[i] + weights[j]) / 2
    expected.append(0.5 * sum(scipy.special.rel_entr(weights[k], middle).sum() for k in (i, j)))
  np.testing.assert_allclose(entry['values'], expected, atol=5e-5)  # records have four digits


def test_guided_probes_need_the_right_weights(rows):
  accuracies = {row['factors']['weights']: row['metrics']['probe/accuracy']['value'] for row in rows[1]}
  assert list(accuracies) == list(GUIDES)
  assert accuracies['those of the model'] == 100
  assert max(accuracies['uniform'], accuracies['the same in random order']) < 90


def test_guides_are_0_at_masked_positions():
  rng = np.random.default_rng(0)
  weights = np.array([[0.5, 0.3, 0.2, 0.0]])
  mask = np.array([True, True, True, False])
  np.testing.assert_allclose(GUIDES['uniform'](weights, mask, rng), [[1 / 3, 1 / 3, 1 / 3, 0]])
  shuffled = GUIDES['the same in random order'](weights, mask, rng)
  assert sorted(shuffled[0, :3]) == [0.2, 0.3, 0.5] and shuffled[0, 3] == 0


def test_examples_of_documents_are_spread_over_the_split():
  encoded = EncodedDocuments(np.arange(3, 9), np.array([0, 2, 5, 6]), np.arange(4), np.array([0, 1, 1], np.int32), 0)
  config = parse_config({'system': 'classification', 'data': {'buckets': ((1, 2), (1, 4))}})
  system = types.SimpleNamespace(encoded={'train': encoded}, config=config)
  examples = document_examples(system, 'train', 2)
  np.testing.assert_array_equal(examples.source, [[3, 4, 0, 0], [8, 0, 0, 0]])
  np.testing.assert_array_equal(examples.mask.sum(1), [2, 1])
  assert examples.target.tolist() == [[0], [1]] and examples.target_mask.shape == (2, 1)


def test_examples_of_pairs_have_the_lengths_of_the_longest():
  encoded = EncodedCorpus(np.array([4, 2, 5, 6, 2]), np.array([0, 2, 5]), np.array([7, 2, 2]), np.array([0, 2, 3]))
  model = types.SimpleNamespace(output_size=lambda source_length: 7)
  system = types.SimpleNamespace(data=types.SimpleNamespace(encoded={'train': encoded}), model=model)
  examples = pair_examples(system, 'train', 9)
  np.testing.assert_array_equal(examples.source, [[4, 2, 0], [5, 6, 2]])
  np.testing.assert_array_equal(examples.target, [[UNK, EOS], [EOS, PAD]])  # id 7 is of no word that the model emits
  np.testing.assert_array_equal(examples.target_mask, [[True, True], [True, False]])
