"""Tables of sentence pairs: the normalisations and filters of tutorials, and splits without a common source."""

import pytest

from attention_jax.data.pairs import pytorch, tensorflow
from attention_jax.data.tasks import TranslationDataConfig, load, load_corpora
from attention_jax.errors import UserError

TABLE = """Go.	Va !	CC-BY 2.0 (France)
I'm cold.	J'ai froid.	CC-BY 2.0 (France)
I am cold.	J'ai froid.	CC-BY 2.0 (France)
I am one two three four five six seven.	Je suis trop long.

She's here!	Elle est là !
He is old.	Il est âgé.
I am old.	Je suis âgée.
"""
PREFIXES = ('i am ', 'i m ', 'he is', 'she s ')


def make_config(folder, **options):
  values = {'path': 'fra.txt', 'validation': 0.0, 'test': 0.0} | options
  spec = ', '.join(f'{name}={value!r}' for name, value in values.items())
  return TranslationDataConfig(f'pairs({spec})', str(folder), vocabulary='word', buckets=((12, 12),))


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'fra.txt').write_text(TABLE, 'utf-8')
  return tmp_path


@pytest.mark.parametrize(
  ('normalizer', 'sentence', 'expected'),
  [
    (pytorch, " I'm COLD!", 'i m cold !'),
    (pytorch, 'Où êtes-vous… là ?', 'ou etes vous la ?'),
    (pytorch, '10 cœurs.', 'c urs .'),
    (tensorflow, '¿Todavía está en casa?', '¿ todavia esta en casa ?'),
    (tensorflow, "I'm cold, Tom!", 'im cold , tom !'),
  ],
)
def test_normalisations_are_those_of_the_tutorials(normalizer, sentence, expected):
  assert normalizer(sentence) == expected


def test_filters_leave_out_pairs_and_reverse_swaps_the_sides(folder):
  (train,) = load_corpora(make_config(folder, prefixes=PREFIXES, reverse=True)).values()
  assert train.source == ['j ai froid .', 'j ai froid .', 'elle est la !', 'il est age .', 'je suis agee .']
  assert train.target == ['i m cold .', 'i am cold .', 'she s here !', 'he is old .', 'i am old .']
  assert list(train.lines) == [2, 3, 6, 7, 8]
  assert train.report == (f'{folder}/fra.txt: 5 of 8 pairs used; left out: 1 blank, 1 without a prefix, 1 too long',)


def test_the_length_includes_the_end_of_the_sentence(folder):
  rows = [len(load_corpora(make_config(folder, max_length=n))['train'].source) for n in (0, 3, 5, 10, 11)]
  assert rows == [7, 1, 6, 6, 7]  # 'i am one ... seven .' has ten words


def test_no_source_is_in_two_splits(folder):
  data = load(make_config(folder, reverse=True, validation=0.2, test=0.2), None)
  sources = [set(corpus.source) for corpus in data.corpora.values()]
  assert list(data.corpora) == ['train', 'validation', 'test']
  assert [len(part) for part in sources] == [3, 1, 1]  # of five distinct sources
  assert len(set.union(*sources)) == 5
  assert sum('left out' in line for line in data.report) == 1
  again = load_corpora(make_config(folder, reverse=True, validation=0.2, test=0.2))
  other = [load_corpora(make_config(folder, reverse=True, validation=0.2, test=0.2, seed=seed)) for seed in range(5)]
  assert again == data.corpora and any(corpora != again for corpora in other)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'normalize': 'torch'}, "unknown normaliser 'torch'.*expected one of: none, pytorch, tensorflow"),
    ({'prefixes': ('we ',)}, r"0 of 8 .*one pair with normalize='pytorch', max_length=10 and prefixes=\('we ',\)"),
    ({'validation': 0.5, 'test': 0.5}, 'validation=0.5, test=0.5 leaves no training pair of 6 distinct sources'),
    ({'max_length': -1}, 'option max_length must be at least 0, got -1'),
    ({'prefixes': 'i am'}, r'option prefixes must be tuple\[str, ...\], got'),
  ],
)
def test_invalid_options_are_reported(folder, options, message):
  with pytest.raises(UserError, match=message) as error:
    load_corpora(make_config(folder, **options))
  assert '\n' not in str(error.value)


def test_a_line_without_a_tab_is_reported(folder):
  (folder / 'fra.txt').write_text('Go.\tVa !\nGo on.\n', 'utf-8')
  with pytest.raises(UserError, match=r'fra.txt:2: 1 column; expected sentence TAB translation'):
    load_corpora(make_config(folder))
