"""Generated numbers in English, German and French words -> digits: 'einundzwanzig' -> '21'. Splits share no number.

  python -m attention_jax.data.builders.numbers FOLDER

writes FOLDER/train.source, FOLDER/train.target and so on, which configs/text.py reads. German forms are those of Duden
with 'ein' (einhundert, eintausend), French ones are those before the reform of 1990 (vingt et un, quatre-vingt-dix).
"""

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from attention_jax.errors import choose

STOP = 10_000  # numbers are smaller; the rules below hold up to 999,999
SIZES = {'train': 800, 'validation': 100, 'test': 100}  # numbers, each in every language

ENGLISH = str.split(
  'zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen '
  'eighteen nineteen'
)
ENGLISH_TENS = str.split('twenty thirty forty fifty sixty seventy eighty ninety')
GERMAN = str.split(
  'null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn '
  'achtzehn neunzehn'
)
GERMAN_TENS = str.split('zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig')
FRENCH = str.split(
  'zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit '
  'dix-neuf'
)
FRENCH_TENS = str.split('vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt')


def english(number: int) -> str:
  """Returns a number below one million in English words: 'three hundred twenty-one'."""
  if number < 20:
    return ENGLISH[number]
  if number < 100:
    return '-'.join([ENGLISH_TENS[number // 10 - 2], *([ENGLISH[number % 10]] if number % 10 else [])])
  size, name = (1000, 'thousand') if number >= 1000 else (100, 'hundred')
  return ' '.join([english(number // size), name, *([english(number % size)] if number % size else [])])


def german(number: int) -> str:
  """Returns a number below one million in German words: 'dreihunderteinundzwanzig'."""
  if number < 20:
    return GERMAN[number]
  if number < 100:
    return (f'{_german_prefix(number % 10)}und' if number % 10 else '') + GERMAN_TENS[number // 10 - 2]
  size, name = (1000, 'tausend') if number >= 1000 else (100, 'hundert')
  return _german_prefix(number // size) + name + (german(number % size) if number % size else '')


def _german_prefix(number: int) -> str:
  """The form of a number before another word: 'eins' loses its s."""
  return german(number).removesuffix('s') if number % 100 == 1 else german(number)


def french(number: int) -> str:
  """Returns a number below one million in French words: 'trois cent vingt et un'."""
  if number < 20:
    return FRENCH[number]
  if number < 100:
    tens = FRENCH_TENS[number // 10 - 2]
    units = number % 20 if number >= 60 else number % 10  # from 60 on, twenties are counted
    if units == 0:
      return 'quatre-vingts' if number == 80 else tens
    return f'{tens} et {FRENCH[units]}' if units in (1, 11) and number < 80 else f'{tens}-{FRENCH[units]}'
  size, name = (1000, 'mille') if number >= 1000 else (100, 'cent')
  count, rest = divmod(number, size)
  # 'cents' and 'quatre-vingts' lose their s before 'mille'; 'cent' has one only at the end.
  prefix = [re.sub(r'(cent|vingt)s$', r'\1', french(count))] if count > 1 else []
  ending = 's' if name == 'cent' and count > 1 and not rest else ''
  return ' '.join([*prefix, name + ending, *([french(rest)] if rest else [])])


LANGUAGES = (english, german, french)


def generate(split: str, seed: int = 0) -> Iterator[tuple[str, str]]:
  """Yields (words, digits) of a split, a pure function of (split, seed).

  Args:
    split: a key of SIZES. No number is in two splits of one seed, in any language.
    seed: any integer.

  Raises:
    UserError: for an unknown split.
  """
  choose(split, SIZES, 'split of numbers')
  # Every draw is made with random(), the only method whose values are guaranteed across Python versions.
  draw = random.Random(f'numbers {seed}').random
  numbers = iter(sorted(range(STOP), key=[draw() for _ in range(STOP)].__getitem__))
  numbers_of = {name: [next(numbers) for _ in range(size)] for name, size in SIZES.items()}
  for number in numbers_of[split]:
    for spell in LANGUAGES:
      yield spell(number), str(number)


def write(folder: str) -> None:
  """Writes the words and the digits of every split into files of a folder, which is created."""
  Path(folder).mkdir(parents=True, exist_ok=True)
  for split in SIZES:
    for side, lines in zip(('source', 'target'), zip(*generate(split), strict=True), strict=True):
      (Path(folder) / f'{split}.{side}').write_text(''.join(f'{line}\n' for line in lines), 'utf-8')


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python -m attention_jax.data.builders.numbers FOLDER')
  write(sys.argv[1])
