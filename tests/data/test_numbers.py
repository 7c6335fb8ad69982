"""The generated numbers: irregular forms of each language, and splits that share no number."""

import subprocess
import sys

import pytest

from attention_jax.data.builders import numbers

# number -> its forms in the order of numbers.LANGUAGES
FORMS = {
  0: ('zero', 'null', 'zéro'),
  1: ('one', 'eins', 'un'),
  16: ('sixteen', 'sechzehn', 'seize'),
  17: ('seventeen', 'siebzehn', 'dix-sept'),
  21: ('twenty-one', 'einundzwanzig', 'vingt et un'),
  30: ('thirty', 'dreißig', 'trente'),
  71: ('seventy-one', 'einundsiebzig', 'soixante et onze'),
  77: ('seventy-seven', 'siebenundsiebzig', 'soixante-dix-sept'),
  80: ('eighty', 'achtzig', 'quatre-vingts'),
  81: ('eighty-one', 'einundachtzig', 'quatre-vingt-un'),
  91: ('ninety-one', 'einundneunzig', 'quatre-vingt-onze'),
  100: ('one hundred', 'einhundert', 'cent'),
  101: ('one hundred one', 'einhunderteins', 'cent un'),
  200: ('two hundred', 'zweihundert', 'deux cents'),
  212: ('two hundred twelve', 'zweihundertzwölf', 'deux cent douze'),
  1000: ('one thousand', 'eintausend', 'mille'),
  1061: ('one thousand sixty-one', 'eintausendeinundsechzig', 'mille soixante et un'),
  2780: ('two thousand seven hundred eighty', 'zweitausendsiebenhundertachtzig', 'deux mille sept cent quatre-vingts'),
  80_000: ('eighty thousand', 'achtzigtausend', 'quatre-vingt mille'),
  101_000: ('one hundred one thousand', 'einhunderteintausend', 'cent un mille'),
  200_000: ('two hundred thousand', 'zweihunderttausend', 'deux cent mille'),
}


@pytest.mark.parametrize('number', FORMS)
def test_irregular_forms(number):
  assert tuple(spell(number) for spell in numbers.LANGUAGES) == FORMS[number]


def test_forms_are_distinct():
  for spell in numbers.LANGUAGES:
    assert len(set(map(spell, range(numbers.STOP)))) == numbers.STOP


def test_no_number_is_in_two_splits():
  targets = {split: [target for _, target in numbers.generate(split)] for split in numbers.SIZES}
  assert sum(map(len, targets.values())) == 3000
  assert len({target for split in targets for target in set(targets[split])}) == 1000
  assert sum(len(set(split)) for split in targets.values()) == 1000
  assert next(numbers.generate('test', seed=1)) != next(numbers.generate('test'))


@pytest.mark.long
def test_the_program_writes_the_same_pairs_as_text(tmp_path):
  command = [sys.executable, '-m', 'attention_jax.data.builders.numbers']
  assert 'usage: ' in subprocess.run(command, capture_output=True, text=True).stderr
  subprocess.run([*command, tmp_path / 'numbers'], check=True)
  for split in numbers.SIZES:
    sides = [
      (tmp_path / 'numbers' / f'{split}.{side}').read_text('utf-8').splitlines() for side in ('source', 'target')
    ]
    assert list(zip(*sides, strict=True)) == list(numbers.generate(split))
