"""The records that ship with the package: what is asked is answered, and links say from where."""

import subprocess
import sys

import pytest

from attention_jax.data import tasks
from attention_jax.data.builders import records
from attention_jax.errors import UserError

ALL = {split: list(records.generate(split)) for split in records.SIZES}


def parse(row):
  """People as [occupation, first, last, town], and what is asked."""
  asked, told = row['source'].split(' ? ')
  return [[word for word in one.split() if word != ','] for one in told.split(' ; ')], asked


@pytest.mark.parametrize('split', ALL)
def test_every_question_has_its_answer(split):
  kinds = set()
  for row in ALL[split]:
    people, asked = parse(row)
    found = [one for one in people if asked == one[0]]
    assert row['target'] == f'{asked} : {" and ".join("{} {} from {}".format(*one[1:]) for one in found)} .'
    kinds.add(len(found))
  assert kinds == {1, 2, 3, 4}


def test_links_join_equal_words():
  for row in (*ALL['test'], *records.generate('test', 'list')):
    source, target = row['source'].split(), row['target'].split()
    links = [tuple(map(int, link.split('-'))) for link in row['links'].split()]
    assert links and all(source[s] == target[t] for s, t in links)
    said = {t for t, word in enumerate(target) if word in source and word not in (',', ';')}
    assert {t for _, t in links} == said - ({0} if target[1] == ':' else set())


def test_lists_hold_nothing_but_words_of_the_source():
  for row in records.generate('validation', 'list'):
    assert set(row['target'].split()) <= set(row['source'].split())


def test_names_that_nobody_has_seen():
  of = lambda rows: {word for row in rows for one in parse(row)[0] for word in one[1:]}
  names = {split: of(rows) for split, rows in ALL.items()}
  assert names['unseen'].isdisjoint(names['train'] | names['validation'] | names['test'])
  assert len(names['train']) > 3000 and len(names['unseen']) > 700
  sources = {split: {row['source'] for row in rows} for split, rows in ALL.items()}
  assert sources['train'].isdisjoint(sources['validation'] | sources['test'])
  assert sources['validation'].isdisjoint(sources['test'])


def test_the_same_from_one_process_to_the_next():
  program = "from attention_jax.data.builders import records; print(next(records.generate('test', seed=3)))"
  ran = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert ran.stdout.strip() == str(next(records.generate('test', seed=3)))


@pytest.mark.parametrize(
  ('options', 'message'),
  [('form="poem"', "unknown form of records 'poem'; possible: list, sentence"), ('rows=3', "'rows'")],
)
def test_mistakes_are_named(options, message):
  with pytest.raises(UserError, match=message):
    tasks.load_corpora({'task': f'records({options})', 'folder': ''})
