"""Vocabularies: ids, round trips, determinism, storage, and errors of damaged files and invalid sizes."""

import functools
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data import vocab
from attention_jax.data.text import NORMALIZATIONS
from attention_jax.data.vocab import VOCABULARIES
from attention_jax.data.word_positions import split_words
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD, UNK
from tests.data.helpers import error_message

TEXT = st.text(st.characters(exclude_categories=['Cs']))
LINES = ['the cat sat on the mat', 'a cat and a dog', 'the dog sat', 'schöne Grüße 漢字', 'e\u0301 👩‍👩‍👧 ع'] * 3
SPECS = {'char': 'char', 'word': 'word(min_count=1)', 'subword': 'subword(size=80)', 'unigram': 'unigram(size=34)'}


@pytest.fixture(params=SPECS)
def kind(request):
  return request.param


def test_every_row_has_a_case():
  assert set(SPECS) == set(VOCABULARIES)


def test_decoding_inverts_encoding_and_ids_are_those_of_tokens(kind):
  vocabulary = vocab.train(SPECS[kind], LINES)
  for line in LINES:
    ids = vocabulary.encode(line)
    assert len(ids) == len(vocabulary.tokenize(line))
    assert all(UNK < id < len(vocabulary) for id in ids)
    assert vocabulary.decode([BOS, *ids, EOS, ids[0], PAD]) == line
    assert [vocabulary.id_to_token(id) for id in ids] == vocabulary.tokenize(line)
  assert not {PAD, BOS, EOS} & set(vocabulary.encode('<pad> <s> </s>'))
  assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
  assert [vocabulary.id_to_token(id) for id in range(4)] == ['<pad>', '<s>', '</s>', '<unk>']


def test_training_is_deterministic_and_storage_is_lossless(kind, tmp_path):
  first, second = (vocab.train(SPECS[kind], iter(LINES)) for _ in range(2))
  assert vocab.load_stored(SPECS[kind], str(tmp_path), 'source') is None
  path = Path(first.save(str(tmp_path), 'source'))
  second_path = Path(second.save(str(tmp_path / 'new'), 'source'))
  assert (path.name, path.read_bytes()) == (second_path.name, second_path.read_bytes())
  assert list((tmp_path / 'new').iterdir()) == [second_path]
  third = vocab.load_stored(SPECS[kind], str(tmp_path), 'source')
  assert [third.id_to_token(id) for id in range(len(third))] == [first.id_to_token(id) for id in range(len(first))]
  assert kind == first.kind == third.kind
  assert [third.encode(line) for line in LINES] == [first.encode(line) for line in LINES]


@given(TEXT, TEXT)
def test_characters_round_trip_any_text(text, other):
  vocabulary = vocab.train('char', [text])
  assert vocabulary.decode(vocabulary.encode(text)) == text
  expected = ''.join(c if c in text else '\ufffd' for c in other)
  assert vocabulary.decode(vocabulary.encode(other)) == expected
  assert len(vocabulary.encode(other)) == len(other)


@given(TEXT.filter(str.strip))
def test_words_round_trip_up_to_white_space(text):
  vocabulary = vocab.train('word', [text])
  assert vocabulary.decode(vocabulary.encode(text)) == ' '.join(text.split())


@given(TEXT)
def test_subwords_have_one_id_per_token(text):
  vocabulary = subword_vocabulary()
  assert len(vocabulary.encode(text)) == len(vocabulary.tokenize(text))
  assert PAD not in vocabulary.encode(text) and EOS not in vocabulary.encode(text)


SPACED = st.text(st.sampled_from('the catdog▁ \t\u3000\u0085Ω\n'), max_size=20)


@given(TEXT | SPACED)
def test_segments_have_the_ids_of_the_line(text):
  for vocabulary in (vocab.train('char', LINES), vocab.train('word', LINES), subword_vocabulary()):
    segments = list(vocabulary.iter_segments(iter(text)))
    assert [id for segment in segments for id in vocabulary.encode(segment)] == vocabulary.encode(text)


def test_a_segment_is_yielded_as_soon_as_it_is_complete(kind):
  characters = iter('the cat')
  first = next(vocab.train(SPECS[kind], LINES).iter_segments(characters))
  assert (first, ''.join(characters)) == (('t', 'he cat') if kind == 'char' else ('the', 'cat'))


@pytest.mark.parametrize(
  ('text', 'chars', 'pieces'),
  [
    ('the  dog ', [0, 0, 0, -1, -1, 1, 1, 1, -1], [('▁the', 0), ('▁dog', 1)]),
    ('  schöne 漢字 Ω', [-1, -1, *[0] * 6, -1, 1, 1, -1, 2], [('▁schöne', 0), ('▁漢字', 1), ('▁', 2), ('Ω', 2)]),
    ('ع\u3000cat ', [0, 0, 0, 0, 0, -1], [('▁ع', 0), ('\u3000', 0), ('c', 0), ('at', 0)]),
    (
      '▁the cat▁a',
      [0] * 4 + [-1] + [1] * 5,
      [('▁', 0), ('▁the', 0), ('▁cat', 1), ('▁a', 1)],
    ),  # a ▁ of the text is not a space
    ('', [], []),
    (' ', [-1], []),
  ],
)
def test_word_ids_number_the_word_of_each_token(text, chars, pieces):
  assert vocab.train('char', LINES).word_ids(text) == chars
  assert list(zip(subword_vocabulary().tokenize(text), subword_vocabulary().word_ids(text), strict=True)) == pieces
  words = split_words(text)
  assert vocab.train('word', LINES).word_ids(text) == [i for i, word in enumerate(words) for _ in word.split()]


@given(st.text(st.sampled_from('abcdogthe \N{WHITE SMILING FACE}漢é')))
def test_tokens_with_one_word_id_spell_the_word(text):
  words = subword_vocabulary().word_ids(text)
  assert len(words) == len(subword_vocabulary().tokenize(text)) and words == sorted(words)
  for vocabulary, space in ((subword_vocabulary(), '▁'), (vocab.train('char', LINES), '')):
    spelled = [''] * len(text.split())
    for token, word in zip(vocabulary.tokenize(text), vocabulary.word_ids(text), strict=True):
      if word >= 0:
        spelled[word] += token.removeprefix(space)
    assert spelled == text.split()


@given(TEXT)
def test_word_ids_are_in_range(text):
  for vocabulary in (subword_vocabulary(), vocab.train('char', LINES), vocab.train('word', LINES)):
    words = vocabulary.word_ids(text)
    assert len(words) == len(vocabulary.encode(text))
    assert all(-1 <= word < len(split_words(text)) for word in words)


@functools.cache
def subword_vocabulary():
  return vocab.train(SPECS['subword'], LINES)


@given(st.lists(st.text('abc ', min_size=1), min_size=1))
def test_characters_are_sorted_by_count_then_code_point(lines):
  vocabulary = vocab.train('char', lines)
  text = ''.join(lines)
  pieces = [vocabulary.id_to_token(id) for id in range(4, len(vocabulary))]
  assert pieces == sorted(set(text), key=lambda c: (-text.count(c), c))


def test_rare_words_are_unknown():
  vocabulary = vocab.train('word(min_count=2)', ['a a b'])
  assert vocabulary.encode('a b c') == [4, UNK, UNK]
  assert vocabulary.decode([4, UNK]) == 'a <unk>'


@pytest.mark.parametrize('kind', ['subword', 'unigram'])
def test_coverage_and_max_lines_leave_rare_characters_unknown(kind):
  words = ['the cat sat on the mat', 'a cat and a dog', 'the dog sat']
  lines = [*words * 9, 'Ω']
  complete = vocab.train(f'{kind}(size=19)', lines)
  common = vocab.train(f'{kind}(size=19, coverage=0.98)', lines)
  assert UNK not in complete.encode('Ω') and UNK in common.encode('Ω') and UNK not in common.encode('cat')
  lines = [line for word in words * 3 for line in (word, 'x', 'y', 'z')]
  every_fourth = vocab.train(f'{kind}(size=19, max_lines=9)', lines)
  assert UNK in every_fourth.encode('x') and UNK not in every_fourth.encode('cat')


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (
      'subword(size=9, coverage=0.97)',
      "vocabulary 'subword': option coverage must be at least 0.98 and at most 1, got 0.97",
    ),
    ('unigram(size=9, max_lines=-1)', "vocabulary 'unigram': option max_lines must be at least 0, got -1"),
    ('words', "unknown vocabulary 'words' (did you mean 'word'?); expected one of: char, subword, unigram, word"),
    (
      'word(mincount=2)',
      "unknown option of vocabulary 'word': 'mincount' (did you mean 'min_count'?); expected one of: min_count",
    ),
    ('char(size=2)', "vocabulary 'char' has no options, got 'size'"),
    ('word(', "cannot parse vocabulary 'word(' (did you mean 'word'?); expected 'name' or 'name(option=literal, ...)'"),
    ('word(min_count=0)', "vocabulary 'word': option min_count must be at least 1, got 0"),
    ("subword(size='8k')", "vocabulary 'subword': option size must be a whole number, got '8k'"),
    (
      "subword(size=20, symbols=('a b',))",
      "vocabulary subword(size=20): symbols must be texts without white space, got 'a b'",
    ),
    ('word(min_count=9)', 'vocabulary word(min_count=9): no word of the training split occurs that often'),
  ],
)
def test_invalid_specs_are_reported(spec, message):
  assert error_message(vocab.train, spec, ['a few words']) == message


def test_subword_sizes_that_do_not_fit_are_reported(capfd):
  reasons = {8000: 'Vocabulary size too high', 7: 'Vocabulary size is smaller than required_chars'}
  for size, reason in reasons.items():
    message = error_message(vocab.train, f'subword(size={size})', LINES)
    assert message.startswith(f'vocabulary subword(size={size}) does not fit the training split: {reason}')
  assert capfd.readouterr() == ('', '')


def test_a_minimal_count_limits_the_subwords_to_those_that_the_lines_bear():
  frequent, rare = ['the cat sat'] * 9, ['a dog']
  vocabulary = vocab.train('subword(size=8000, min_count=9)', iter([*frequent, *rare]))
  assert vocabulary.tokenize('the cat sat') == ['▁the', '▁cat', '▁sat']
  assert vocabulary.tokenize('dog') == ['▁', 'd', 'o', 'g']
  assert len(vocab.train('subword(size=8000, min_count=1)', [*frequent, *rare])) > len(vocabulary)
  assert len(vocab.train('subword(size=18, min_count=1)', [*frequent, *rare])) == 18
  characters = vocab.train('subword(size=8000, min_count=100)', LINES)
  assert len(characters) == 4 + len({'▁', *''.join(LINES)} - {' '})
  spec = "subword(size=8000, min_count=9, byte_fallback=True, symbols=('<2de>',))"
  assert vocab.train(spec, frequent).tokenize('<2de> the cat') == ['▁', '<2de>', '▁the', '▁cat']


def test_damaged_files_are_reported(kind, tmp_path, capfd):
  path = Path(vocab.train(SPECS[kind], LINES).save(str(tmp_path), 'target'))
  data = path.read_bytes()
  for damaged in (b'', data[: len(data) // 2], b'\xff\xfe garbage'):
    path.write_bytes(damaged)
    message = error_message(vocab.load_stored, SPECS[kind], str(tmp_path), 'target')
    assert message.startswith(f"{path}: not a stored vocabulary of kind '{kind}', or damaged (")
  assert capfd.readouterr().err == ''


def test_other_json_and_other_kinds_are_reported(tmp_path):
  for content in ('[]', '{}', '{"kind": "word", "tokens": "ab"}', '{"kind": "word", "tokens": ["a", "a"]}'):
    (tmp_path / 'vocabulary.source.json').write_text(content)
    message = error_message(vocab.load_stored, 'word', str(tmp_path), 'source')
    assert "not a stored vocabulary of kind 'word', or damaged" in message
  vocab.train('char', LINES).save(str(tmp_path), 'source')
  message = error_message(vocab.load_stored, 'word', str(tmp_path), 'source')
  assert message.endswith("kind 'word', or damaged (it is of kind 'char')")


@pytest.mark.parametrize('kind', ['subword', 'unigram'])
@pytest.mark.parametrize('line', ['zebra ñandú 漢字 ▅', 'zebra ñandú 漢字 ' + 'x ' * 2**19])
def test_lines_that_sentencepiece_would_skip_are_learned_from(kind, line):
  vocabulary = vocab.train(f'{kind}(size=39)', [*LINES, line])
  assert UNK not in vocabulary.encode('zebra ñandú 漢字')


@pytest.mark.parametrize('spec', ['subword(size=330', 'unigram(size=288'])
def test_bytes_and_symbols_are_whole_tokens(spec, tmp_path):
  spec += ", byte_fallback=True, symbols=('<2de>', 'a,b'))"
  vocab.train(spec, LINES).save(str(tmp_path), 'source')
  vocabulary = vocab.load_stored(spec, str(tmp_path), 'source')
  text = '<2de> the dog<2de>a,b Ω'
  assert vocabulary.decode(vocabulary.encode(text)) == text and UNK not in vocabulary.encode(text)
  assert vocabulary.tokenize('Ω')[1:] == ['<0xCE>', '<0xA9>'] and vocabulary.word_ids('the Ω')[-3:] == [1, 1, 1]
  tokens = vocabulary.tokenize(text)
  assert tokens.count('<2de>') == 2 and tokens.count('a,b') == 1
  assert vocab.unknown_characters(vocabulary, [text]) == []


def test_unknown_characters_are_those_that_no_token_contains(kind):
  vocabulary = vocab.train(SPECS[kind], LINES)
  assert vocab.unknown_characters(vocabulary, LINES) == []
  unknown = vocab.unknown_characters(vocabulary, ['the Дд 😀', 'д'])
  assert unknown == ['Д', 'д', '😀']
  assert vocab.format_characters(unknown, shown=2) == ("3 characters that the source vocabulary lacks: 'Д', 'д', ...")


def test_a_normalized_vocabulary_reads_decomposed_text(kind):
  plain = vocab.train(SPECS[kind], LINES)
  vocabulary = vocab.NormalizedVocabulary(plain, NORMALIZATIONS['NFC'])
  composed, decomposed = 'schöne Grüße', unicodedata.normalize('NFD', 'schöne Grüße')
  assert vocabulary.encode(decomposed) == plain.encode(composed) != plain.encode(decomposed)
  assert vocabulary.tokenize(decomposed) == plain.tokenize(composed)
  assert vocabulary.word_ids(decomposed) == plain.word_ids(composed)
  assert vocabulary.decode(vocabulary.encode(decomposed)) == composed
  with pytest.raises(UserError, match='still arriving cannot be normalised'):
    vocabulary.iter_segments('ab')
