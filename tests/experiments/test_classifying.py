"""The programs on documents: training, evaluation, plots, mistakes."""

import json

import jax
import numpy as np
import pytest

from attention_jax.systems import runs
from attention_jax.systems.classification.outputs import ClassificationPrediction, CutDocument, shade_document
from attention_jax.systems.classification.system import ClassificationSystem
from attention_jax.systems.config import default_config, parse_config
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error

LABELS = {'good': 'praise', 'fine': 'praise', 'bad': 'blame', 'dull': 'blame'}


@pytest.fixture(scope='module')
def reviews(tmp_path_factory):
  """A folder of reviews, and the arguments of train.py for them."""
  folder = tmp_path_factory.mktemp('reviews')
  rows = [(i, word, label) for i in range(8) for word, label in LABELS.items()]
  for split in ('train', 'dev'):
    texts = [f'We saw it {"again " * i}yesterday. It was {word}. We left.' for i, word, _ in rows]
    lines = [json.dumps({'text': text, 'label': label}) for text, (_, _, label) in zip(texts, rows, strict=True)]
    (folder / f'{split}.jsonl').write_text('\n'.join(lines), 'utf-8')
  sizes = {'embedding': 8, 'dropout': 0.0, 'attention.features': 8, 'encoder': 'birnn(features=8)'}
  args = ['--config=configs/imdb.py:yang2016', f'--config.data.folder={folder}']
  args += ["--config.data.task=jsonl(train='train.jsonl', validation='dev.jsonl')", '--config.data.vocabulary=word']
  args += ['--config.data.batch_size=8', '--config.data.buckets=((4, 16),)', '--config.training.steps=40']
  args += ['--config.training.evaluate_every=20', '--config.training.checkpoint_every=20']
  args += ['--config.training.schedule=constant(rate=3e-2)']
  return folder, args + [f'--config.model.{name}={value}' for name, value in sizes.items()]


@pytest.fixture(scope='module')
def trained(reviews):
  result = run('train', *reviews[1], f'--workdir={reviews[0]}/run')
  assert result.code == 0, result.err
  return reviews[0] / 'run', result.out


def test_training_learns_the_labels_and_reports_the_data(trained):
  folder, out = trained
  assert 'train: 32 documents (16 blame, 16 praise); unknown words: 0.00 %' in out
  results = json.loads((folder / 'results.json').read_text())['results']['validation']
  assert results['accuracy']['value'] == 100 and results['loss']['unit'] == 'nat/document'
  labels = (folder / 'hypotheses.validation.txt').read_text().split()
  assert labels == list(LABELS.values()) * 8


@pytest.mark.long
def test_documents_without_weights_have_no_entropy(tmp_path):
  """Scores of 0 get weights of 0 from softpick."""
  lines = [json.dumps({'text': f'It was {word}.', 'label': label}) for word, label in LABELS.items()]
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines), 'utf-8')
  config = default_config('classification')
  config.data.task = "jsonl(train='train.jsonl')"
  config.data.folder = str(tmp_path)
  config.model.attention.alignment = 'softpick'
  system = ClassificationSystem.load(parse_config(config), None)
  params = jax.tree.map(np.zeros_like, system.initializer()(0))
  assert set(system.evaluate(params, 'train')[0]) == {'loss', 'accuracy'}


def test_splits_are_evaluated_and_drawn(trained, tmp_path):
  folder, _ = trained
  result = run('evaluate', f'--workdir={folder}', '--split=train', f'--output={tmp_path}/hypotheses.txt')
  assert result.code == 0 and 'accuracy' in result.out and len((tmp_path / 'hypotheses.txt').read_text().split()) == 32
  assert run('inspect_attention', f'--workdir={folder}', '--split=validation', '--rows=0,3').code == 0
  page = (folder / 'attention.html').read_text('utf-8')
  assert page.count('<h2 ') == 2 and 'gold: blame' in page and page.count('class="sentence"') == 6
  path = tmp_path / 'text.html'
  result = run('inspect_attention', f'--workdir={folder}', '--text=It was <fine>. So!', f'--output={path}')
  assert result.code == 0, result.err
  assert '&lt;' in path.read_text() and 'gold:' not in path.read_text() and 'not read' not in path.read_text()
  long = 'It was fine. ' * 4 + 'We left.'  # one sentence more than any bucket holds
  assert run('inspect_attention', f'--workdir={folder}', f'--text={long}', f'--output={tmp_path}/long.html').code == 0
  assert '… and 3 more tokens that were not read' in (tmp_path / 'long.html').read_text('utf-8')


def test_an_ensemble_classifies_like_its_runs(trained):
  folder, _ = trained
  values = {}
  for checkpoints in ('best', 'latest', 'best,latest'):
    workdirs = ','.join([str(folder)] * len(checkpoints.split(',')))
    arguments = [f'--workdir={workdirs}', f'--checkpoint={checkpoints}', '--split=validation', '--json']
    result = run('evaluate', *arguments)
    assert result.code == 0, result.err
    values[checkpoints] = {name: entry['value'] for name, entry in json.loads(result.out)['results'].items()}
  ensemble = values['best,latest']
  assert ensemble['accuracy'] == 100
  low, high = sorted(values[name]['loss'] for name in ('best', 'latest'))
  assert low < ensemble['loss'] < (low + high) / 2  # of the mean of two probabilities, -log is convex


def test_new_texts_get_labels(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  result = run('predict', workdir, stdin=b'It was fine.\nIt was dull. We left.\n')
  assert result.code == 0 and result.out.split() == ['praise', 'blame'], result
  (tmp_path / 'texts').write_text('We left. It was bad.')
  record = json.loads(run('predict', workdir, f'--input={tmp_path}/texts', '--json').out)
  assert (record['line'], record['input'], record['label']) == (1, 'We left. It was bad.', 'blame')
  assert set(record['probabilities']) == {'praise', 'blame'} and record['unread'] == 0
  assert [part['tokens'] for part in record['parts']] == [['we', 'left', '.'], ['it', 'was', 'bad', '.']]
  assert all(sum(part['weights'][0]) == pytest.approx(1, abs=1e-4) for part in record['parts'])
  assert_user_error(run('predict', workdir, stdin=b'It was fine.\n\n'), ['error: stdin:2: the text is empty\n'])


@pytest.mark.long
def test_a_run_killed_before_it_stored_its_labels_starts_again(reviews, trained, tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_bytes((trained[0] / 'config.json').read_bytes())
  assert run('train', *reviews[1], f'--workdir={tmp_path}/run').code == 0
  for name in ('labels.json', 'results.json', 'vocabulary.source.json'):
    assert (tmp_path / 'run' / name).read_bytes() == (trained[0] / name).read_bytes()


def test_weights_of_pairs_are_shown_as_the_mean_over_heads():
  by_head = np.random.default_rng(0).dirichlet(np.ones(3), (2, 4))  # [N, words of the other text, words of the text]
  prediction = ClassificationPrediction('yes', {'yes': 1.0}, [by_head.reshape(8, 3)] * 2, np.ones((1, 2)))
  document = CutDocument([['a', 'b', 'c']] * 2, 0)
  shaded = shade_document('pair', '', document, prediction, pair_heads=2)
  assert shaded.is_pair
  np.testing.assert_allclose(shaded.word_weights[0], by_head.mean(0))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (['model.classifier=decomposable', 'data.buckets=((2, 16),)'], 'compares pairs of texts'),
    (['training.auxiliary=redundancy'], 'needs a classifier that pools all words of a document at once; expected '),
    (
      ['training.auxiliary=redundancy', 'model.classifier=flat', 'model.pooling=max'],
      'needs learned weights; expected config.model.pooling=attention',
    ),
    (['training.auxiliary=coverage'], "unknown auxiliary loss 'coverage'"),
    (['training.select=bleu'], "unknown metric in training.select: 'bleu'"),
    (['data.task=text'], "unknown task 'text'"),
    (["data.task=jsonl(train='no.jsonl')"], 'no.jsonl: no such file'),
    (['data.buckets=((4, 0),)'], 'buckets must be pairs (sentences, words)'),
    (['system=translation'], 'expected the fields of'),
    (['system=translating'], "unknown system 'translating'"),
  ],
)
def test_mistakes_are_reported_in_one_line(reviews, tmp_path, fields, message):
  flags = [f'--config.{field}' for field in fields]
  names = {flag.partition('=')[0] for flag in flags}
  other_flags = [flag for flag in reviews[1] if flag.partition('=')[0] not in names]
  assert_user_error(run('train', *other_flags, *flags, f'--workdir={tmp_path}/run'), [message])
  assert not (tmp_path / 'run').exists()


def test_programs_options_and_presets_of_other_systems_are_errors(trained, monkeypatch):
  monkeypatch.setattr(runs, 'evaluate_split', None)  # nothing is evaluated
  workdir = f'--workdir={trained[0]}'
  part = "is a run of system 'classification'; expected one of: translation"
  assert_user_error(run('translate', workdir, stdin=b'It was good.'), [part])
  assert_user_error(run('evaluate', workdir, '--split=validation', '--by=source_length'), [part])
  result = run('train', '--config=configs/imdb.py:luong2015', '--workdir=x')
  assert_user_error(result, ["unknown preset 'luong2015'"])
