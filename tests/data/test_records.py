"""The generated records: every question has its answer, and links join equal words."""

import subprocess
import sys

import pytest

from attention_jax.data import tasks
from attention_jax.data.builders import records
from attention_jax.errors import UserError

ALL = {split: list(records.generate(split)) for split in records.SIZES}


def parse(row):
  """People as [occupation, first, last, town], and the occupation of the question."""
  occupation, records = row['source'].split(' ? ')
  return [[word for word in record.split() if word != ','] for record in records.split(' ; ')], occupation


@pytest.mark.long
@pytest.mark.parametrize('split', ALL)
def test_every_question_has_its_answer(split):
  answer_sizes = set()
  for row in ALL[split]:
    people, occupation = parse(row)
    answer = [person for person in people if person[0] == occupation]
    assert row['target'] == f'{occupation} : {" and ".join("{} {} from {}".format(*p[1:]) for p in answer)} .'
    answer_sizes.add(len(answer))
  assert answer_sizes == {1, 2, 3, 4}


def test_links_join_equal_words():
  for row in (*ALL['test'], *records.generate('test', 'list')):
    source = row['source'].split()
    target = row['target'].split()
    links = [tuple(map(int, link.split('-'))) for link in row['links'].split()]
    assert links and all(source[s] == target[t] for s, t in links)
    copied = {t for t, word in enumerate(target) if word in source and word not in (',', ';')}
    question = {0} if target[1] == ':' else set()
    assert {t for _, t in links} == copied - question


def test_lists_consist_of_words_of_the_source():
  for row in records.generate('validation', 'list'):
    assert set(row['target'].split()) <= set(row['source'].split())


def test_names_of_unseen_occur_in_no_other_split():
  names = {}
  for split, rows in ALL.items():
    names[split] = {word for row in rows for person in parse(row)[0] for word in person[1:]}
  assert names['unseen'].isdisjoint(names['train'] | names['validation'] | names['test'])
  assert len(names['train']) > 3000 and len(names['unseen']) > 700
  sources = {split: {row['source'] for row in rows} for split, rows in ALL.items()}
  assert sources['train'].isdisjoint(sources['validation'] | sources['test'])
  assert sources['validation'].isdisjoint(sources['test'])


@pytest.mark.long
def test_generation_is_deterministic_across_processes():
  program = "from attention_jax.data.builders import records; print(next(records.generate('test', seed=3)))"
  process = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert process.stdout.strip() == str(next(records.generate('test', seed=3)))


@pytest.mark.parametrize(
  ('options', 'message'),
  [('form="poem"', "unknown form of records 'poem'; expected one of: list, sentence"), ('rows=3', "'rows'")],
)
def test_invalid_options_are_reported(options, message):
  with pytest.raises(UserError, match=message):
    tasks.load_corpora(tasks.TranslationDataConfig(f'records({options})', ''))
