"""Generated records of people, with an occupation as the question. The answer copies the names of those who have it.

  pilot ? baker Ana Lima , Porto ; pilot Bo Ek , Graz ; baker Ida Holm , Oslo   -> pilot : Bo Ek from Graz .
  baker ? (the same records)               -> baker : Ana Lima from Porto and Ida Holm from Oslo .

Names and towns are real ones of many countries, from the lists of Faker. Their frequency decreases along each list, so
that a vocabulary of frequent words contains some of them; those of the split 'unseen' occur in no other split. A person
may share a name with another one of the same records. An answer of the form 'list' consists of words of the source; for
the two questions above, `Bo Ek` and `Ana Lima ; Ida Holm`.

Gold links join each name and town of an answer with the source word that it is copied from. The question is one of a
few occupations that every vocabulary contains, since a model cannot distinguish unknown words. The question comes
first, and the occupation of a person before the name, so that a unidirectional network can select a person before it
reads the name.
"""

import functools
import importlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attention_jax.errors import choose
from attention_jax.pharaoh import Link

Draw = Callable[[], float]

SIZES = {'train': 20000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
LOCALES = ('cs_CZ', 'da_DK', 'de_DE', 'fi_FI', 'hr_HR', 'pt_PT', 'ro_RO', 'sk_SK', 'sl_SI', 'sv_SE')
OCCUPATIONS = (
  'baker',
  'brewer',
  'butcher',
  'carpenter',
  'dentist',
  'farmer',
  'florist',
  'gardener',
  'lawyer',
  'mason',
  'nurse',
  'painter',
  'pilot',
  'plumber',
  'potter',
  'sailor',
  'surgeon',
  'tailor',
  'teacher',
  'weaver',
)
MAX_WORDS = 300  # of a kind from one country
NUM_PEOPLE = (2, 3, 4)
NAMESAKE_SHARE = 0.15  # of the people after the first share a name with an earlier one
COLLEAGUE_SHARE = 0.3  # of the people after the first have the occupation of the one before
UNSEEN_SLOTS = 7  # of 23 slots: names and towns with a hash in the first 7 belong to the split 'unseen' alone
FIRST_NAME, LAST_NAME, TOWN = 1, 2, 3  # positions in Person.words


class Person(NamedTuple):
  """One record: its words (occupation, first name, last name, town), and their positions in the source."""

  words: tuple[str, str, str, str]
  positions: tuple[int, int, int, int]

  @property
  def occupation(self) -> str:
    """The first of the words."""
    return self.words[0]


def generate(split: str, form: str = 'sentence', seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields the examples of a split, a pure function of (split, form, seed).

  Args:
    split: 'train', 'validation' and 'test' share their names; those of 'unseen' occur in no other split.
    form: the form of the answers, a key of FORMS.
    seed: any integer.

  Yields:
    source, target, links (Pharaoh format between words, 0-based).

  Raises:
    UserError: for an unknown split or form.
  """
  size = SIZES[choose(split, SIZES, 'split of records')]
  make_answer = FORMS[choose(form, FORMS, 'form of records')]
  # Every draw is made with random(), the only method whose values are guaranteed across Python versions.
  draw = random.Random(f'records {split} {seed}').random
  names = [_words(kind, split == 'unseen') for kind in ('first_names', 'last_names', 'cities')]
  for _ in range(size):
    people = _draw_people(draw, names)
    occupation = people[int(draw() * len(people))].occupation
    words, links = make_answer([person for person in people if person.occupation == occupation], occupation)
    records = ' ; '.join('{} {} {} , {}'.format(*person.words) for person in people)
    pairs = ' '.join(f'{source}-{target}' for source, target in links)
    yield {'source': f'{occupation} ? {records}', 'target': ' '.join(words), 'links': pairs}


def _draw_people(draw: Draw, names: list[tuple[str, ...]]) -> list[Person]:
  people = []
  towns = set()
  for i in range(NUM_PEOPLE[int(draw() * len(NUM_PEOPLE))]):
    first, last, town = (_draw_frequent(draw, words) for words in names)
    while town in towns:
      town = _draw_frequent(draw, names[2])
    towns.add(town)
    if people and draw() < NAMESAKE_SHARE:
      namesake = people[int(draw() * len(people))]
      if draw() < 0.5:
        first = namesake.words[FIRST_NAME]
      else:
        last = namesake.words[LAST_NAME]
    occupation = OCCUPATIONS[int(draw() * len(OCCUPATIONS))]
    if people and draw() < COLLEAGUE_SHARE:
      occupation = people[-1].occupation
    start = 2 + 6 * i  # question ? occupation first last , town ;
    people.append(Person((occupation, first, last, town), (start, start + 1, start + 2, start + 4)))
  return people


def _draw_frequent(draw: Draw, words: tuple[str, ...]) -> str:
  """One of the words; the earlier in the list, the more frequent."""
  return words[int(len(words) * draw() ** 2)]


class _Answer:
  """Words of an answer, and the links of those that are copied."""

  def __init__(self):
    self.words: list[str] = []
    self.links: list[Link] = []

  def append(self, word: str) -> None:
    self.words.append(word)

  def copy(self, person: Person, fields: tuple[int, ...]) -> None:
    """Appends words of a person, and their links."""
    for field in fields:
      self.links.append((person.positions[field], len(self.words)))
      self.words.append(person.words[field])


def _sentence(people: list[Person], occupation: str) -> tuple[list[str], list[Link]]:
  """Returns the answer as a sentence, `baker : Ana Lima from Porto and Ida Holm from Oslo .`, and its links."""
  answer = _Answer()
  answer.append(occupation)
  answer.append(':')
  for i, person in enumerate(people):
    if i:
      answer.append('and')
    answer.copy(person, (FIRST_NAME, LAST_NAME))
    answer.append('from')
    answer.copy(person, (TOWN,))
  answer.append('.')
  return answer.words, answer.links


def _list(people: list[Person], occupation: str) -> tuple[list[str], list[Link]]:
  """Returns the answer as a list of names, `Ana Lima ; Ida Holm`, and its links."""
  answer = _Answer()
  for i, person in enumerate(people):
    if i:
      answer.append(';')
    answer.copy(person, (FIRST_NAME, LAST_NAME))
  return answer.words, answer.links


FORMS = {'sentence': _sentence, 'list': _list}


@functools.cache
def _words(kind: str, unseen: bool) -> tuple[str, ...]:
  """Single words of a kind; countries alternate, so that the most frequent words come from all of them."""
  by_country = [_words_of_country(kind, locale) for locale in LOCALES]
  longest = max(map(len, by_country))
  words = dict.fromkeys(country[i] for i in range(longest) for country in by_country if i < len(country))
  return tuple(word for word in words if (zlib.crc32(word.encode()) * 23 >> 32 < UNSEEN_SLOTS) == unseen)


def _words_of_country(kind: str, locale: str) -> list[str]:
  provider_name = 'address' if kind == 'cities' else 'person'
  provider = importlib.import_module(f'faker.providers.{provider_name}.{locale}').Provider
  words = (word if isinstance(word, str) else word[0] for word in getattr(provider, kind))
  # Letters only: other characters could be confused with the separators of the records.
  return list(dict.fromkeys(word for word in words if word.isalpha() and word not in OCCUPATIONS))[:MAX_WORDS]
