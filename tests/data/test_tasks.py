"""Tasks: splits, vocabularies and ids from a config, and one line for each mistake."""

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys

import pytest

from attention_jax.data import tasks
from attention_jax.data.builders import dates
from attention_jax.data.pair_streams import open_pairs
from attention_jax.data.splits import SPLITS
from attention_jax.data.tasks import (
  TranslationDataConfig,
  get_split,
  load,
  load_buckets,
  load_vocabularies,
  save_buckets,
  save_vocabularies,
)
from attention_jax.training import digests
from tests.data.helpers import error_message, write_tfds_set

BUCKETS = ((4, 4), (8, 8))
TEXT = "text(train='train', validation='val', source='en', target='de')"


def make_config(task, folder='', vocabulary='word', shared=False, buckets=BUCKETS, normalization='none'):
  return TranslationDataConfig(task, str(folder), vocabulary, shared, normalization, buckets)


@pytest.fixture
def folder(tmp_path):
  files = {
    'train.en': 'a dog\na cat\n\nthe bird sings\n',
    'train.de': 'ein Hund\neine Katze\nnichts\nder Vogel singt\n',
    'val.en': 'a bird\n',
    'val.de': 'ein Vogel\n',
    'train.tsv': 'a b\tA\t0-0 1-0\nc\tC\t0-0\n',
    'dev.tsv': 'b a\tB\n',
  }
  for name, content in files.items():
    (tmp_path / name).write_text(content)
  return tmp_path


def test_text_files_are_loaded_and_reported(folder):
  data = load(make_config(TEXT, folder), str(folder / 'run'))
  assert list(data.corpora) == list(data.encoded) == ['train', 'validation']
  assert data.corpora['validation'][:3] == (['a bird'], ['ein Vogel'], None)
  assert data.encoded['train'].rows == 3
  assert data.source_vocab.decode(data.encoded['validation'].source) == 'a bird'
  where = f'{folder}/train'
  assert data.report == [
    'source vocabulary word: 10 entries, made from the training split',
    'target vocabulary word: 11 entries, made from the training split',
    f'{where}.en, {where}.de: 1 pair with a blank side skipped (line 3)',
    f'train: 3 pairs ({where}.en); buckets 4x4: 3, 8x8: 0',
    f'validation: 1 pair ({folder}/val.en); buckets 4x4: 1, 8x8: 0',
  ]


def test_text_is_normalised(folder):
  (folder / 'train.tsv').write_text('fu\u0308r\tfu\u0308r\nno\u00a010\tx\n', 'utf-8')
  config = make_config("tsv(train='train.tsv')", folder, normalization='NFC')
  data = load(config, None)
  assert data.corpora['train'].source == ['für', 'no\u00a010']
  assert (
    data.source_vocab.encode('fu\u0308r') == data.source_vocab.encode('für') == data.encoded['train'].row(0)[0][:-1]
  )
  assert load(dataclasses.replace(config, normalization='NFKC'), None).corpora['train'].source[1] == 'no 10'
  stream, _ = open_pairs(config)
  assert next(stream.pairs())[0] == ('für', 'für')
  message = "unknown normalization 'NFD'"
  assert error_message(tasks.check, dataclasses.replace(config, normalization='NFD')).startswith(message)


def test_normalization_that_moves_links_is_an_error(folder):
  (folder / 'train.tsv').write_text('no\u00a010 x\ta b\t0-0 1-1\n', 'utf-8')
  config = make_config("tsv(train='train.tsv')", folder, normalization='NFC')
  assert load(config, None).encoded['train'].links.tolist() == [[0, 0], [1, 0], [2, 1]]
  assert error_message(load, dataclasses.replace(config, normalization='NFKC'), None).startswith(
    f'{folder}/train.tsv:1: NFKC changes the number of words of the source, in which links are counted'
  )


def test_repetitions_and_unknown_characters_are_reported(folder):
  (folder / 'train.tsv').write_text('a b\tA\na b\tA\na b\tB\nc\tC\n')
  (folder / 'dev.tsv').write_text('a b\tA\na я\tA\n', 'utf-8')
  report = load(make_config("tsv(train='train.tsv', validation='dev.tsv')", folder), None).report
  assert report[-3:] == [
    "validation: sources have 1 character that the source vocabulary lacks: 'я'",
    'train: 1 of 4 pairs repeat an earlier pair of the split',
    'validation: 1 of 2 pairs are also in train',
  ]


def test_text_files_may_be_pairs_of_paths(folder):
  corpora = tasks.load_corpora(make_config("text(train=('train.en', 'train.de'))", folder))
  assert corpora['train'].target == ['ein Hund', 'eine Katze', 'der Vogel singt']
  assert corpora['train'].level == 'word'
  corpora = tasks.load_corpora(make_config("text(train=('train.en', 'train.de'), level='char')", folder))
  assert corpora['train'].level == 'char'


def test_links_of_a_tsv_are_between_words_unless_the_level_is_char(folder):
  task = "tsv(train='train.tsv', test='dev.tsv')"
  data = load(make_config(task, folder), None)
  assert data.corpora['train'].links == [((0, 0), (1, 0)), ((0, 0),)] and data.corpora['test'].links is None
  data = load(make_config(task, folder, 'char'), None)
  assert data.corpora['train'].links == [((0, 0), (1, 0)), ((0, 0),)]  # unchanged: between words
  assert not any('links between' in line for line in data.report)
  assert data.encoded['train'].links.tolist() == [[0, 0], [2, 0], [0, 0]] and data.encoded['test'].links is None
  data = load(make_config("tsv(train='train.tsv', level='char')", folder, 'word'), None)
  assert data.corpora['train'].links is None and data.encoded['train'].links is None
  assert 'train: links between chars are not used with a word vocabulary' in data.report


def test_a_resumed_run_restores_its_vocabularies(folder):
  run = str(folder / 'run')
  assert error_message(load_vocabularies, make_config(TEXT), run) == (
    f'{run}: contains no source and no target vocabulary; expected a run folder'
  )
  first = load(make_config(TEXT, folder), run)
  assert not (folder / 'run').exists()  # loading stores nothing
  (folder / 'run').mkdir()
  save_vocabularies(make_config(TEXT), first.source_vocab, first.target_vocab, run)
  (folder / 'train.en').write_text('other\nwords\nin\nhere\n')
  second = load(make_config(TEXT, folder), run)
  assert second.source_vocab.encode('a dog') == first.source_vocab.encode('a dog')
  assert 'source vocabulary word: 10 entries, stored' in second.report
  source, target = load_vocabularies(make_config(TEXT), run)
  assert (len(source), len(target)) == (len(first.source_vocab), len(first.target_vocab))


@pytest.mark.parametrize('vocabulary', ['char', 'word', 'subword(size=36)'])
def test_a_shared_vocabulary_is_one_object_after_loading_and_restoring(folder, vocabulary):
  shared = make_config(TEXT, folder, vocabulary, shared=True, buckets=((32, 32),))
  data = load(shared, None)
  (folder / 'run').mkdir()
  save_vocabularies(shared, data.source_vocab, data.target_vocab, str(folder / 'run'))
  assert data.source_vocab is data.target_vocab
  assert data.source_vocab.decode(data.source_vocab.encode('a Katze')) == 'a Katze'
  source, target = load_vocabularies(shared, str(folder / 'run'))
  assert source is target and len(source) == len(data.source_vocab)


def test_chosen_buckets_are_those_of_the_training_split_and_restored_without_data(folder):
  config = make_config(TEXT, folder, buckets=())
  tasks.check(config)
  data = load(config, None)
  assert data.buckets == ((4, 4),) and 'buckets 4x4: 3' in data.report[3]
  (folder / 'run').mkdir()
  run = str(folder / 'run')
  assert error_message(load_buckets, config, run).startswith(
    f'cannot read the buckets of the run in {run}/buckets.json'
  )
  assert save_buckets(config, data.buckets, run) == ['buckets.json']
  assert load_buckets(config, run) == data.buckets
  fixed = make_config(TEXT, folder)
  assert save_buckets(fixed, load(fixed, None).buckets, run) == [] and load_buckets(fixed, run) == BUCKETS
  (folder / 'run' / 'buckets.json').write_text('[3]')
  assert 'must be distinct pairs' in error_message(load_buckets, config, run)


def test_numbers_are_loaded_by_their_builder():
  corpora = tasks.load_corpora(make_config('numbers'))
  assert [len(corpus.source) for corpus in corpora.values()] == [2400, 300, 300]


def test_dates_are_loaded_by_their_builder(monkeypatch, tmp_path):
  columns = {'source': ['4. März'], 'target': ['-03-04'], 'links': ['0-5 3-2'], 'locale': ['de']}
  calls = []
  monkeypatch.setattr(dates, 'load', lambda split, folder: calls.append((split, folder)) or columns)
  data = load(make_config('dates', tmp_path, 'char'), None)
  assert calls == [(split, str(tmp_path)) for split in SPLITS]
  assert data.corpora['unseen'][:4] == (['4. März'], ['-03-04'], [((0, 5), (3, 2))], 'char')


@pytest.mark.parametrize(
  ('task', 'message'),
  [
    ('txt', "unknown task 'txt' (did you mean 'text'?); expected one of: dates, huggingface, numbers, "),
    ('txt', '; a plug-in may be missing: --plugins=FILE'),
    ('text(', "cannot parse task 'text(' (did you mean 'text'?); expected 'name' or 'name(option=literal, ...)'"),
    ('dates(size=3)', "task 'dates' has no options, got 'size'"),
    ("tsv(trian='train.tsv')", "unknown option of task 'tsv': 'trian' (did you mean 'train'?); expected one of: colu"),
    ("tsv(test='dev.tsv')", "task 'tsv' needs train; its options: train, validation, test, unseen, columns, level"),
    ('tsv(train=3)', "task 'tsv': option train must be a string, got 3"),
    ("text(train='train')", "train='train' is a prefix and needs source and target such as 'en' and 'de'"),
    ('text(train=None)', "task 'text' needs train, got None"),
    ("text(train=('a',))", "train must be a prefix or a pair of (source, target) paths, got ('a',)"),
    ("text(train=('a', 'b'), links='l')", "links='l' needs prefixes, got the pair of paths train=('a', 'b')"),
    ("tsv(train='train.tsv', columns=(1,))", 'train.tsv: columns must be two or three numbers from 1, got (1,)'),
    ("tsv(train='train.tsv', columns=(0, 1))", 'columns must be two or three numbers from 1, got (0, 1)'),
    ("tsv(train='train.tsv', columns=(1, 4))", 'train.tsv:1: 3 columns; expected column 4'),
    ("tsv(train='train.tsv', columns=('a', 'b'))", "option columns must be tuple[int, ...], got ('a', 'b')"),
  ],
)
def test_invalid_tasks_are_reported(folder, task, message):
  assert message in error_message(load, make_config(task, folder), None)


# As OPUS and mtdata name files: https://opus.nlpl.eu, https://github.com/thammegowda/mtdata.
@pytest.mark.parametrize(
  ('files', 'task'),
  [
    (
      {'Europarl.de-en.de': 'ein Hund\n\nx\n', 'Europarl.de-en.en': 'a dog\ny\n\n', 'README': '', 'LICENSE': ''},
      "text(train='Europarl.de-en', source='de', target='en')",
    ),
    (
      {'train-parts/Statmt-10-deu-eng.deu.gz': 'ein Hund\n', 'train-parts/Statmt-10-deu-eng.eng': 'a dog\n'},
      "text(train='train-parts/Statmt-10-deu-eng', source='deu', target='eng')",
    ),
    ({'europarl-v10.de-en.tsv.gz': 'ein Hund\ta dog\n\tx\n\n'}, "tsv(train='europarl-v10.de-en.tsv.gz')"),
    (  # score, languages, and the texts in the other order
      {'WikiMatrix.de-en.tsv.gz': '1.2\ta dog\tein Hund\ten\tde\n\n'},
      "tsv(train='WikiMatrix.de-en.tsv.gz', columns=(3, 2))",
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_layouts_of_opus_and_mtdata_are_read_as_they_come(files, task, tmp_path):
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  assert tasks.load_corpora(make_config(task, tmp_path))['train'][:3] == (['ein Hund'], ['a dog'], None)
  stream, _ = open_pairs(make_config(task, tmp_path))
  assert next(stream.pairs())[0] == ('ein Hund', 'a dog')


def test_links_may_be_in_a_column_of_their_own(folder):
  (folder / 'train.tsv').write_text('0.5\tA\t0-0 1-0\ta b\n')
  corpus = tasks.load_corpora(make_config("tsv(train='train.tsv', columns=(4, 2, 3))", folder))['train']
  assert corpus[:3] == (['a b'], ['A'], [((0, 0), (1, 0))])


PYTHON = """
import pathlib
CALLS = pathlib.Path(__file__).parent / 'calls'
def pairs(split):
  with CALLS.open('a') as file:
    print(split, file=file)
  if split == 'train':
    yield 'ein Hund', 'a dog'
    yield {'source': 'eine\\nKatze', 'target': 'a cat', 'id': 2}
  yield ['ein Vogel', 'WORD']
"""


def test_pairs_of_a_python_function_are_read_once_and_guarded_by_digests(tmp_path):
  config = make_config("python(path='mine.py', name='pairs', splits=('train', 'test'))", tmp_path)

  def read(word):
    (tmp_path / 'mine.py').write_text(PYTHON.replace('WORD', word))
    return load(config, str(tmp_path))

  data = read('bird')
  assert (tmp_path / 'calls').read_text() == 'train\ntest\n'
  assert data.corpora['train'][:2] == (['ein Hund', 'eine Katze', 'ein Vogel'], ['a dog', 'a cat', 'bird'])
  assert list(data.corpora) == ['train', 'test'] and data.corpora['test'].target == ['bird']
  assert f'{tmp_path}/mine.py train: line breaks inside 1 text read as spaces' in data.report
  save_vocabularies(config, data.source_vocab, data.target_vocab, str(tmp_path))
  digests.store_digests(tmp_path, digests.compute_digests(data.encoded))
  digests.check_digests(tmp_path, digests.compute_digests(read('bird').encoded))
  message = error_message(digests.check_digests, tmp_path, digests.compute_digests(read('dog').encoded))
  assert message.startswith(f'{tmp_path} was trained on other data: test, train (or the vocabulary) changed since; ')


@pytest.mark.parametrize(
  ('code', 'message'),
  [
    (None, '{0}: no such file'),
    ('def pairs(:', '{0}:1: '),
    ('import nothing_like_it', "{0}:1: ModuleNotFoundError: No module named 'nothing_like_it'; expected pairs(split)"),
    ('def pair(split): pass', "unknown function of {0}: 'pairs' (did you mean 'pair'?); expected one of: pair"),
    ('def pairs(): pass', '{0}: TypeError: pairs() takes 0 positional arguments but 1 was given; expected pairs(spl'),
    ('def pairs(split): pass', "{0}: TypeError: 'NoneType' object is not iterable; expected pairs(split), which yie"),
    ('def pairs(split):\n  yield "a", "b"\n  1 / 0', '{0}:3: ZeroDivisionError: division by zero; expected pairs(s'),
    ('def pairs(split): yield "ab"', "{0}: pairs('train'), example 1: expected (source, target), got 'ab'"),
    ('def pairs(split): yield "a", 3', "{0}: pairs('train'), example 1: target must be a string, got 3"),
    ('def pairs(split): yield {{"source": "a"}}', "{0}: pairs('train'), example 1: target must be a string, got None"),
    ('def pairs(split):\n  if split == "train": yield "a", "b"', "{0}: pairs('validation') yields no example; leave"),
  ],
)
def test_mistakes_in_python_files_are_reported(code, message, tmp_path):
  path = tmp_path / 'mine.py'
  if code is not None:
    path.write_text(code.format())
  config = make_config("python(path='mine.py', name='pairs')", tmp_path)
  assert error_message(load, config, None).startswith(message.format(path))


@pytest.mark.parametrize(
  ('splits', 'message'),
  [
    (('dev',), "unknown split of task 'python': 'dev'; expected one of: test, train, unseen, validation"),
    (('test',), "task 'python' needs train, got None"),
  ],
)
def test_invalid_splits_of_python_files_are_reported(splits, message, tmp_path):
  (tmp_path / 'mine.py').write_text('def pairs(split): yield "a", "b"')
  config = make_config(f"python(path='mine.py', name='pairs', splits={splits})", tmp_path)
  assert error_message(load, config, None) == message


def test_invalid_paths_and_values_are_reported(folder):
  misspelt = TEXT.replace("'val'", "'vall'")
  assert error_message(load, make_config(misspelt, folder), None) == (
    f"{folder}/vall.en: no such file (did you mean '{folder}/val.en'?)"
  )
  assert error_message(load, make_config(TEXT, folder, 'words'), None).startswith("unknown vocabulary 'words'")
  too_short = error_message(load, make_config(TEXT, folder, buckets=((1, 1),)), None)
  assert too_short.startswith('train: 3 of 3 pairs fit no bucket') and 'lines 1, 2, 4 of' in too_short
  assert too_short.endswith('enlarge config.data.buckets=((1, 1),)')
  assert error_message(load, make_config(TEXT, folder, buckets=(4, 4)), None).startswith(
    'buckets must be distinct pairs of a source and a target'
  )
  data = load(make_config(TEXT, folder), None)
  assert get_split(data, 'train')[1] is data.encoded['train']
  assert error_message(get_split, data, 'valid') == (
    "unknown split 'valid' (did you mean 'validation'?); expected one of: train, validation"
  )


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A folder with a tfds set of translations."""
  rows = {'train': [('ein Hund', 'a dog'), ('Grüße\n漢字', 'greetings')], 'test': [('eine Katze', 'a cat')]}
  splits = {split: [dict(zip(('de', 'en'), pair, strict=True)) for pair in pairs] for split, pairs in rows.items()}
  return write_tfds_set(
    tmp_path_factory.mktemp('tfds'), lambda tfds: tfds.features.Translation(['de', 'en']), splits, 'de-en'
  )


def test_a_tfds_set_is_loaded_without_tensorflow(prepared):
  data = load(make_config("tfds(name='tiny/de-en')", prepared), None)
  pairs = dict(zip(data.corpora['train'].source, data.corpora['train'].target, strict=True))
  assert pairs == {'ein Hund': 'a dog', 'Grüße 漢字': 'greetings'}
  assert data.corpora['test'][:3] == (['eine Katze'], ['a cat'], None)
  assert 'tiny/de-en/1.0.0 train: line breaks inside 1 text read as spaces' in data.report
  assert 'tensorflow' not in sys.modules
  stream, _ = open_pairs(make_config("tfds(name='tiny/de-en')", prepared))
  assert ('Grüße 漢字', 'greetings') in [pair for pair, _ in stream.pairs()]
  assert stream.notes == ['tiny/de-en/1.0.0 train: line breaks inside 1 text read as spaces']


def test_a_tfds_set_is_loaded_from_a_url(prepared, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  corpora = tasks.load_corpora(make_config("tfds(name='tiny/de-en:1.0.0')", f'file://{prepared}'))
  assert corpora['test'][:2] == (['eine Katze'], ['a cat'])
  corpora = tasks.load_corpora(make_config("tfds(name='tiny/de-en:1.0.0', source='en', target='de')", prepared))
  assert corpora['test'][:2] == (['a cat'], ['eine Katze'])


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ("name='wmt14/de-en'", "'{0}'; run 'tfds build wmt14/de-en --file_format=array_record --data_dir={0}'"),
    ("name='tiny/de-en', source='fr', target='en'", "unknown language of tfds set 'tiny/de-en': 'fr'; expected one of"),
    ("name='tiny/de-en', source='en', target='en'", "source and target are both 'en'; expected two of: de, en"),
    ("name='tiny/de-en', source='en'", 'source and target must be set together, or neither; expected two of: de, en'),
    ('name=3', "task 'tfds': option name must be a string, got 3"),
    ("name='wmt14 de-en'", "tfds set 'wmt14 de-en' must be a name such as 'wmt14_translate/de-en'"),
  ],
)
def test_invalid_tfds_options_are_reported(prepared, options, message):
  assert message.format(prepared) in error_message(load, make_config(f'tfds({options})', prepared), None)


def test_tfds_sets_that_are_damaged_or_need_tensorflow_are_reported(prepared, tmp_path):
  copy = shutil.copytree(prepared, tmp_path / 'copy')
  stored = copy / 'tiny/de-en/1.0.0'
  config = make_config("tfds(name='tiny/de-en')", copy)
  info = json.loads((stored / 'dataset_info.json').read_text())
  (records,) = stored.glob('*train.array_record*')
  for damage in (lambda: records.write_bytes(records.read_bytes()[:40]), records.unlink):
    damage()
    message = f"tfds set 'tiny/de-en/1.0.0' in '{stored}', split 'train' cannot be read ("
    assert error_message(load, config, None).startswith(message)
  (stored / 'dataset_info.json').write_text(json.dumps(info | {'fileFormat': 'tfrecord'}))
  assert error_message(load, config, None) == (
    f"tfds set 'tiny/de-en' in {stored} is stored as tfrecord, which only TensorFlow reads; where it is "
    "installed, run 'python -m tensorflow_datasets.scripts.convert_format "
    f"--dataset_version_dir={stored} --out_file_format=array_record'"
  )
  for name in ('dataset_info.json', 'features.json'):
    (stored / name).write_text('{')
  assert error_message(load, config, None).startswith(f"tfds set 'tiny/de-en' in '{copy}' cannot be read (")


def test_tfds_rows_that_are_no_texts_are_reported(tmp_path):
  pairs = [{'de': b'\xff', 'en': 'a dog', 'id': 7}]
  write_tfds_set(
    tmp_path,
    lambda tfds: tfds.features.FeaturesDict(
      {'de': tfds.features.Text(), 'en': tfds.features.Text(), 'id': tfds.features.ClassLabel(num_classes=8)}
    ),
    {'train': pairs},
    'de-en',
  )
  for source, got in (('de', "b'\\xff'"), ('id', '7')):
    config = make_config(f"tfds(name='tiny/de-en', source='{source}', target='en')", tmp_path)
    message = f'tiny/de-en/1.0.0 train:0: {source} must be a text in UTF-8, got {got}'
    assert error_message(load, config, None) == message
    assert error_message(lambda stream: list(stream.pairs()), open_pairs(config)[0]) == message


def test_a_tfds_split_without_rows_is_left_out(tmp_path):
  pair = {'de': 'ein Hund', 'en': 'a dog'}
  splits = {'train': [pair], 'test': [pair]}
  folder = write_tfds_set(tmp_path, lambda tfds: tfds.features.Translation(['de', 'en']), splits, 'de-en')
  info = folder / 'tiny/de-en/1.0.0/dataset_info.json'
  content = json.loads(info.read_text())
  for split in content['splits']:
    split['shardLengths'] = ['0'] if split['name'] == 'test' else split['shardLengths']
  info.write_text(json.dumps(content))
  assert set(tasks.load_corpora(make_config("tfds(name='tiny/de-en')", folder))) == {'train'}


@pytest.mark.long
def test_importing_tasks_loads_no_optional_package():
  optional = {'tensorflow_datasets', 'sentencepiece', 'grain', 'tensorflow', 'flax'}
  script = f'import sys, attention_jax.data.tasks; print(sorted({optional} & set(sys.modules)))'
  assert subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True).stdout == '[]\n'
