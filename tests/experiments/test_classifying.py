"""The programs on documents: trained, evaluated, drawn, refused, as on any other data."""

import json

import pytest

from tests.experiments.helpers import copy_interrupted_run, run

WORDS = {'good': 'praise', 'fine': 'praise', 'bad': 'blame', 'dull': 'blame'}


@pytest.fixture(scope='module')
def reviews(tmp_path_factory):
  """A folder of reviews, and the arguments that train on them."""
  folder = tmp_path_factory.mktemp('reviews')
  rows = [(i, word, label) for i in range(8) for word, label in WORDS.items()]
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
  ran = run('train', *reviews[1], f'--workdir={reviews[0]}/run')
  assert ran.code == 0, ran.err
  return reviews[0] / 'run', ran.out


def test_it_learns_and_says_what_it_saw(trained):
  folder, out = trained
  assert 'train: 32 documents (16 blame, 16 praise); unknown words: 0.00 %' in out
  results = json.loads((folder / 'results.json').read_text())['results']['validation']
  assert results['accuracy']['value'] == 100 and results['loss']['unit'] == 'nat/document'
  said = (folder / 'hypotheses.validation.txt').read_text().split()
  assert said == list(WORDS.values()) * 8


def test_it_is_evaluated_and_drawn(trained, tmp_path):
  folder, _ = trained
  ran = run('evaluate', f'--workdir={folder}', '--split=train', f'--output={tmp_path}/said.txt')
  assert ran.code == 0 and 'accuracy' in ran.out and len((tmp_path / 'said.txt').read_text().split()) == 32
  assert run('inspect_attention', f'--workdir={folder}', '--split=validation', '--rows=0,3').code == 0
  page = (folder / 'attention.html').read_text('utf-8')
  assert page.count('<h2>') == 2 and 'right: blame' in page and page.count('class="sentence"') == 6
  path = tmp_path / 'own.html'
  ran = run('inspect_attention', f'--workdir={folder}', '--text=It was <fine>. So!', f'--output={path}')
  assert ran.code == 0, ran.err
  assert '&lt;' in path.read_text() and 'right:' not in path.read_text() and 'not read' not in path.read_text()
  long = 'It was fine. ' * 4 + 'We left.'  # the fifth sentence is one more than any bucket has
  assert run('inspect_attention', f'--workdir={folder}', f'--text={long}', f'--output={tmp_path}/long.html').code == 0
  assert '… and 3 more words that were not read' in (tmp_path / 'long.html').read_text('utf-8')


def test_new_texts_are_told(trained, tmp_path):
  workdir = f'--workdir={trained[0]}'
  ran = run('predict', workdir, stdin=b'It was fine.\nIt was dull. We left.\n')
  assert ran.code == 0 and ran.out.split() == ['praise', 'blame'], ran
  (tmp_path / 'texts').write_text('We left. It was bad.')
  first = json.loads(run('predict', workdir, f'--input={tmp_path}/texts', '--json').out)
  assert (first['line'], first['input'], first['label']) == (1, 'We left. It was bad.', 'blame')
  assert set(first['probabilities']) == {'praise', 'blame'} and first['unread'] == 0
  assert [part['tokens'] for part in first['parts']] == [['we', 'left', '.'], ['it', 'was', 'bad', '.']]
  assert all(sum(part['weights'][0]) == pytest.approx(1, abs=1e-4) for part in first['parts'])
  blank = run('predict', workdir, stdin=b'It was fine.\n\n')
  assert blank.code == 2 and blank.err == 'error: stdin:2: the text is empty\n'


def test_the_same_command_goes_on_exactly(reviews, trained, tmp_path):
  folder = copy_interrupted_run(trained[0], tmp_path / 'run')
  assert 'going on at' in run('train', *reviews[1], f'--workdir={folder}').out
  whole, parts = (json.loads((path / 'results.json').read_text()) for path in (trained[0], folder))
  assert whole['results'] == parts['results']


def test_a_run_that_was_killed_before_it_had_its_labels_begins_again(reviews, trained, tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_bytes((trained[0] / 'config.json').read_bytes())
  assert run('train', *reviews[1], f'--workdir={tmp_path}/run').code == 0
  for name in ('labels.json', 'results.json', 'vocabulary.source.json'):
    assert (tmp_path / 'run' / name).read_bytes() == (trained[0] / name).read_bytes()


@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    (['--config.model.pooling=attenton'], "unknown pooling 'attenton'"),
    (['--config.model.classifier=flatt'], "unknown classifier 'flatt'"),
    (['--config.model.classifier=decomposable'], 'two texts are compared, got 4'),
    (['--config.model.classifier=decomposable', '--config.data.buckets=((2, 16),)'], 'compares pairs of texts'),
    (['--config.training.auxiliary=redundancy'], 'is of one level; possible: config.model.classifier=flat'),
    (
      ['--config.training.auxiliary=redundancy', '--config.model.classifier=flat', '--config.model.pooling=max'],
      'is of weights that are learned; possible: pooling=attention',
    ),
    (['--config.training.objective=r_drop'], "training.objective is 'r_drop'; possible for documents: likelihood"),
    (['--config.training.auxiliary=coverage'], "unknown auxiliary loss 'coverage'"),
    (['--config.training.select=bleu'], "unknown metric in training.select: 'bleu'"),
    (['--config.data.task=text'], "unknown task 'text'"),
    (["--config.data.task=jsonl(train='no.jsonl')"], 'no.jsonl: no such file'),
    (['--config.data.buckets=((4, 0),)'], 'different (sentences, words)'),
    (['--config.system=translation'], 'possible: the fields of'),
    (['--config.system=translating'], "unknown system 'translating'"),
  ],
)
def test_mistakes_are_one_line(reviews, tmp_path, flags, said):
  name = lambda flag: flag.partition('=')[0]
  others = [flag for flag in reviews[1] if name(flag) not in map(name, flags)]
  ran = run('train', *others, *flags, f'--workdir={tmp_path}/run')
  assert ran.code == 2 and said in ran.err and ran.err.count('\n') == 1
  assert not (tmp_path / 'run').exists()


def test_programs_for_other_systems_say_so(trained):
  folder, _ = trained
  ran = run('translate', f'--workdir={folder}', stdin=b'It was good.')
  assert ran.code == 2 and "is a run of system 'classification'; possible here: translation" in ran.err
  ran = run('evaluate', f'--workdir={folder},{folder}')
  assert ran.code == 2 and "runs of system 'classification' cannot be an ensemble" in ran.err
  ran = run('train', '--config=configs/imdb.py:luong2015', '--workdir=x')
  assert ran.code == 2 and "unknown preset 'luong2015'" in ran.err
