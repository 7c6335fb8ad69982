"""An occupation that is asked for and records of people -> who has it: data in which names have to be copied.

  pilot ? baker Ana Lima , Porto ; pilot Bo Ek , Graz ; baker Ida Holm , Oslo   -> pilot : Bo Ek from Graz .
  baker ? and the same                     -> baker : Ana Lima from Porto and Ida Holm from Oslo .

Names and towns are real ones of many countries, from Faker's lists. How often they are drawn falls with their place in
a list, so that a vocabulary of frequent words knows some of them; those of the split 'unseen' stand in no other. A
person may have a name that somebody else in the same records has too. As 'list' the answer has nothing but words of the
source: `Bo Ek` and `Ana Lima ; Ida Holm`.

Gold links say which source word each name and town of an answer was copied from. What is asked for is one of a few
words, which every vocabulary knows: unknown ones look all the same to a model. The question and the occupations stand
before the names, so that a network that reads onward alone knows who is meant when it comes to them.
"""

import functools
import importlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attention_jax.errors import choose

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
MOST = 300  # words of a kind from one country
PEOPLE = (2, 3, 4)
NAMESAKES = 0.15  # of the people after the first have a part of an earlier one's name
UNSEEN = 7  # of 23 words stand in the split 'unseen' alone


class Person(NamedTuple):
  """One record, and where its four words stand in the source."""

  words: tuple[str, str, str, str]  # occupation, first name, last name, town
  places: tuple[int, int, int, int]


def generate(split: str, form: str = 'sentence', seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields the examples of a split, a pure function of (split, form, seed).

  Args:
    split: 'train', 'validation' and 'test' share their names; those of 'unseen' stand nowhere else.
    form: of the answers, a name in FORMS.
    seed: any integer.

  Yields: source, target, links (Pharaoh format between words, counted from 0).
  Raises: UserError for an unknown split or form.
  """
  size, answer = SIZES[choose(split, SIZES, 'split of records')], FORMS[choose(form, FORMS, 'form of records')]
  # Only random() is promised to stay the same from one Python version to the next, so every draw below comes from it.
  draw = random.Random(f'records {split} {seed}').random
  names = [_words(kind, split == 'unseen') for kind in ('first_names', 'last_names', 'cities')]
  for _ in range(size):
    people = _people(draw, names)
    asked = people[int(draw() * len(people))].words[0]
    words, links = answer([person for person in people if person.words[0] == asked], asked)
    records = ' ; '.join('{} {} {} , {}'.format(*person.words) for person in people)
    pairs = ' '.join(f'{source}-{target}' for target, source in links)
    yield {'source': f'{asked} ? {records}', 'target': ' '.join(words), 'links': pairs}


def _people(draw: Callable[[], float], names: list[tuple[str, ...]]) -> list[Person]:
  people, towns = [], set()
  for i in range(PEOPLE[int(draw() * len(PEOPLE))]):
    first, last, town = (_frequent(draw, words) for words in names)
    while town in towns:
      town = _frequent(draw, names[2])
    towns.add(town)
    if people and draw() < NAMESAKES:
      other = people[int(draw() * len(people))]
      first, last = (other.words[1], last) if draw() < 0.5 else (first, other.words[2])
    occupation = OCCUPATIONS[int(draw() * len(OCCUPATIONS))]
    if people and draw() < 0.3:
      occupation = people[-1].words[0]
    start = 2 + 6 * i  # asked ? occupation first last , town ;
    people.append(Person((occupation, first, last, town), (start, start + 1, start + 2, start + 4)))
  return people


def _frequent(draw: Callable[[], float], words: tuple[str, ...]) -> str:
  return words[int(len(words) * draw() ** 2)]


Links = list[tuple[int, int]]  # (target word, source word)


def _sentence(people: list[Person], asked: str) -> tuple[list[str], Links]:
  words, links = _each(people, 'and', 2, lambda person: ((1, 2), 'from', (3,)))
  return [asked, ':', *words, '.'], links


def _list(people: list[Person], asked: str) -> tuple[list[str], Links]:
  return _each(people, ';', 0, lambda person: ((1, 2),))


FORMS = {'sentence': _sentence, 'list': _list}


def _each(people: list[Person], between: str, start: int, parts: Callable) -> tuple[list[str], Links]:
  """What is said of each person, one after the other, the first word of it at `start` of the target.

  parts(person) are words, and tuples of which words of the person to copy.
  """
  words, links = [], []
  for person in people:
    words += [between] * bool(words)
    for part in parts(person):
      for which in part if isinstance(part, tuple) else ():
        links.append((start + len(words), person.places[which]))
        words.append(person.words[which])
      words += [part] if isinstance(part, str) else []
  return words, links


@functools.cache
def _words(kind: str, unseen: bool) -> tuple[str, ...]:
  """Single words of a kind, of every country in turn, so that the most frequent ones are from everywhere."""
  by_country = [_of_country(kind, locale) for locale in LOCALES]
  turns = max(map(len, by_country))
  words = dict.fromkeys(words[i] for i in range(turns) for words in by_country if i < len(words))
  return tuple(word for word in words if (zlib.crc32(word.encode()) * 23 >> 32 < UNSEEN) == unseen)


def _of_country(kind: str, locale: str) -> list[str]:
  of = 'address' if kind == 'cities' else 'person'
  provider = importlib.import_module(f'faker.providers.{of}.{locale}').Provider
  given = (word if isinstance(word, str) else word[0] for word in getattr(provider, kind))
  # Anything but letters would be taken for what stands between words.
  return list(dict.fromkeys(word for word in given if word.isalpha() and word not in OCCUPATIONS))[:MOST]
