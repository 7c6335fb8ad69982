"""Vocabularies: ids, round trips, determinism, storage, and errors of damaged files and invalid sizes."""

import functools
import json
import sys
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data import vocab
from attention_jax.data.text import NORMALIZATIONS
from attention_jax.data.vocab import VOCABULARIES
from attention_jax.data.word_positions import split_words
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD, UNK
from tests.data.helpers import error_message
from tests.references import make_tokenizers

TEXT = st.text(st.characters(exclude_categories=['Cs']))
LINES = ['the cat sat on the mat', 'a cat and a dog', 'the dog sat', 'schöne Grüße 漢字', 'e\u0301 👩‍👩‍👧 ع'] * 3
SPECS = {'char': 'char', 'word': 'word(min_count=1)', 'subword': 'subword(size=80)', 'unigram': 'unigram(size=34)'}
FILES = {'sentencepiece': 'lines.model', 'tokenizer': 'tokenizer.json'}  # of the kinds that read files
KINDS = [*SPECS, *FILES]


@pytest.fixture(scope='module', autouse=True)
def files(tmp_path_factory):
  """The files that FILES names, made by their own programs from LINES; their specs are added to SPECS."""
  folder = tmp_path_factory.mktemp('files')
  with (folder / FILES['sentencepiece']).open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(LINES),
      model_writer=file,
      vocab_size=80,
      model_type='bpe',
      minloglevel=2,
      character_coverage=1.0,
      normalization_rule_name='identity',
    )
  tokenizer = tokenizers.ByteLevelBPETokenizer()
  tokenizer.train_from_iterator(LINES, vocab_size=300, special_tokens=['<s>', '<pad>', '</s>', '<unk>', '<mask>'])
  tokenizer.save(str(folder / FILES['tokenizer']))
  SPECS.update({kind: f'{kind}(path={str(folder / name)!r})' for kind, name in FILES.items()})
  return folder


@pytest.fixture(params=KINDS)
def kind(request):
  return request.param


def test_every_row_has_a_case():
  assert set(KINDS) == set(VOCABULARIES)


def test_decoding_inverts_encoding_and_ids_are_those_of_tokens(kind):
  vocabulary = vocab.train(SPECS[kind], LINES)
  for line in LINES:
    ids = vocabulary.encode(line)
    assert len(ids) == len(vocabulary.tokenize(line))
    assert all(UNK < id < len(vocabulary) for id in ids)
    assert vocabulary.decode([BOS, *ids, EOS, ids[0], PAD]) == line
    assert [vocabulary.id_to_token(id) for id in ids] == vocabulary.tokenize(line)
  for text in ('<pad> <s> </s>', 'a<s></s><pad><unk>'):
    assert not {PAD, BOS, EOS} & set(vocabulary.encode(text))
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


@pytest.mark.long
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


SPACED = st.text(st.sampled_from('the catdog▁ \t\u3000\u0085Ω\n'), max_size=20)


@given(TEXT | SPACED)
def test_ids_tokens_segments_and_words_of_any_text_agree(text):
  for vocabulary in (vocab.train('char', LINES), vocab.train('word', LINES), subword_vocabulary()):
    ids = vocabulary.encode(text)
    assert not {PAD, EOS} & set(ids)
    segments = list(vocabulary.iter_segments(iter(text)))
    assert [id for segment in segments for id in vocabulary.encode(segment)] == ids
    words = vocabulary.word_ids(text)
    assert len(ids) == len(vocabulary.tokenize(text)) == len(words)
    assert all(-1 <= word < len(split_words(text)) for word in words)


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind not in FILES])
def test_a_segment_is_yielded_as_soon_as_it_is_complete(kind):
  characters = iter('the cat')
  first = next(vocab.train(SPECS[kind], LINES).iter_segments(characters))
  assert (first, ''.join(characters)) == (('t', 'he cat') if kind == 'char' else ('the', 'cat'))


@pytest.mark.parametrize('kind', FILES)
def test_lines_that_arrive_are_not_encoded_with_a_vocabulary_of_a_file(kind):
  assert error_message(vocab.train(SPECS[kind], LINES).iter_segments, 'a b') == (
    f"a line that is still arriving cannot be encoded with a vocabulary of kind '{kind}'; expected another kind"
  )


@pytest.mark.parametrize(
  ('text', 'chars', 'pieces'),
  [
    ('the  dog ', [0, 0, 0, -1, -1, 1, 1, 1, -1], [('▁the', 0), ('▁dog', 1)]),
    ('  schöne 漢字 Ω', [-1, -1, *[0] * 6, -1, 1, 1, -1, 2], [('▁schöne', 0), ('▁漢字', 1), ('▁', 2), ('Ω', 2)]),
    ('ع\u3000cat ', [0, 0, 0, 0, 0, -1], [('▁ع', 0), ('\u3000', 0), ('c', 0), ('at', 0)]),
    # a ▁ of the text is not a space
    ('▁the cat▁a', [0] * 4 + [-1] + [1] * 5, [('▁', 0), ('▁the', 0), ('▁cat', 1), ('▁a', 1)]),
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
    ('subword(size=9, coverage=0.97)', 'option coverage must be at least 0.98 and at most 1, got 0.97'),
    ('unigram(size=9, max_lines=-1)', "vocabulary 'unigram': option max_lines must be at least 0, got -1"),
    ('words', "unknown vocabulary 'words' (did you mean 'word'?); expected one of: char, sentencepiece, subword, toke"),
    ('word(mincount=2)', "unknown option of vocabulary 'word': 'mincount' (did you mean 'min_count'?); expected one"),
    ('char(size=2)', "vocabulary 'char' has no options, got 'size'"),
    ('word(', "cannot parse vocabulary 'word(' (did you mean 'word'?); expected 'name' or 'name(option=literal, ...)'"),
    ('word(min_count=0)', "vocabulary 'word': option min_count must be at least 1, got 0"),
    ("subword(size='8k')", "vocabulary 'subword': option size must be a whole number, got '8k'"),
    ("subword(size=20, symbols=('a b',))", "subword(size=20): symbols must be texts without white space, got 'a b'"),
    ('word(min_count=9)', 'vocabulary word(min_count=9): no word of the training split occurs that often'),
    ('tokenizer', "vocabulary 'tokenizer' needs path; its options: path"),
  ],
)
def test_invalid_specs_are_reported(spec, message):
  assert message in error_message(vocab.train, spec, ['a few words'])


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


@pytest.mark.long
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


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'tokenizer'])  # that one has all bytes
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


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """Folders of tokenizers as `transformers` stores them, and its answers: see make_tokenizers.py."""
  folder = tmp_path_factory.mktemp('references')
  with tarfile.open(make_tokenizers.ARCHIVE) as archive:
    archive.extractall(folder, filter='data')
  return folder


PRETRAINED = ['bart', 'bert', 'marian', 'mbart', 't5']


@pytest.mark.long
@pytest.mark.parametrize('name', PRETRAINED)
def test_pretrained_vocabularies_tokenize_and_decode_as_transformers(name, folders, tmp_path):
  source, target, rows = vocab.from_pretrained(str(folders / name))
  lines = json.loads((folders / 'lines.json').read_text('utf-8'))
  expected = json.loads((folders / name / 'answers.json').read_text())
  assert len(lines) == len(expected) == 1000
  target.save(str(tmp_path), 'target')
  target = vocab.load_stored(f"{target.kind}(path='')", str(tmp_path), 'target')
  for line, answer in zip(lines, expected, strict=True):
    ids = [np.array([*vocabulary.encode(line), EOS]) for vocabulary in (source, target)]
    assert make_tokenizers.digest(*(rows[row] for row in ids), target.decode(ids[1])) == answer, line
    assert len(source.tokenize(line)) == len(source.word_ids(line)) == len(ids[0]) - 1


@pytest.mark.long
@pytest.mark.parametrize('path', ['marian/source.spm', 't5/spiece.model'])
def test_existing_sentencepiece_models_keep_their_pieces(path, folders):
  vocabulary = vocab.train(f'sentencepiece(path={str(folders / path)!r})', [])
  processor = sentencepiece.SentencePieceProcessor(model_file=str(folders / path))
  for line in json.loads((folders / 'lines.json').read_text('utf-8')):
    ids = processor.encode(line)
    assert vocabulary.tokenize(line) == processor.encode(line, out_type=str)
    assert [id == UNK for id in vocabulary.encode(line)] == [id == processor.unk_id() for id in ids]
    assert vocabulary.decode(vocabulary.encode(line)) == processor.decode(ids)
  special = {processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()} - {-1}
  assert len(vocabulary) == len(processor) - len(special) + 4


@pytest.mark.long
@pytest.mark.parametrize('name', ['bart', 'bert'])
def test_existing_tokenizers_keep_their_tokens(name, folders):
  path = str(folders / name / 'tokenizer.json')
  vocabulary, tokenizer = vocab.train(f'tokenizer(path={path!r})', []), tokenizers.Tokenizer.from_file(path)
  tokenizer.no_padding()
  tokenizer.no_truncation()
  for line in json.loads((folders / 'lines.json').read_text('utf-8')):
    encoding = tokenizer.encode(line, add_special_tokens=False)
    ids = vocabulary.encode(line)
    assert ['[UNK]' if id == UNK else vocabulary.id_to_token(id) for id in ids] == encoding.tokens
    assert vocabulary.decode(ids) == tokenizer.decode(encoding.ids)


# The rows of PAD, BOS, EOS, UNK and the first other token: BOS is what starts the decoder, and repeats another row.
@pytest.mark.parametrize(
  ('name', 'first', 'size', 'next_token'),
  [
    ('bart', [1, 2, 2, 3, 0], 1204, '<s>'),
    ('bert', [0, 2, 3, 1, 4], 1200, '[MASK]'),
    ('marian', [2098, 2098, 0, 1, 2], 2100, '!'),
    ('mbart', [1, 1620, 2, 3, 0], 1627, '<s>'),
    ('t5', [0, 0, 1, 2, 3], 1729, '▁'),
  ],
)
def test_rows_of_pretrained_tables(name, first, size, next_token, folders):
  source, target, rows = vocab.from_pretrained(str(folders / name))
  num_rows = json.loads((folders / name / 'config.json').read_text())['vocab_size']
  assert rows[:5].tolist() == first and sorted({*rows.tolist()}) == list(range(num_rows))
  assert len(source) == len(target) == len(rows) == size
  assert source.id_to_token(4) == next_token
  assert [target.id_to_token(id) for id in range(4)] == ['<pad>', '<s>', '</s>', '<unk>']
  assert target.decode(range(size - 3, size)) == '' or name in ('bert', 'marian')  # rows without text


def test_words_of_pretrained_tokens(folders):
  marian, bart, t5 = (vocab.from_pretrained(str(folders / name))[0] for name in ('marian', 'bart', 't5'))
  text = '>>fra<<it 汉x'
  assert marian.tokenize(text) == ['>>fra<<', '▁it', '▁', '汉', 'x'] and marian.word_ids(text) == [0, 0, 1, 1, 1]
  assert [id == UNK for id in marian.encode(text)] == [False, False, False, True, False]
  assert bart.tokenize('a b') == ['<s>', 'a', 'Ġb'] and bart.word_ids('a b') == [-1, 0, 1]
  assert t5.decode([4, UNK, len(t5), len(t5) - 1], ['▁copied']) == 'copied'


def test_invalid_files_are_reported(files, tmp_path, monkeypatch):
  for kind, expected in {'sentencepiece': 'a sentencepiece model', 'tokenizer': 'a tokenizer.json'}.items():
    path = tmp_path / FILES[kind]
    assert error_message(vocab.train, f'{kind}(path={str(path)!r})', []).startswith(f'{path}: no such file')
    for content in (b'', b'{}', (files / FILES[kind]).read_bytes()[:99]):
      path.write_bytes(content)
      message = error_message(vocab.train, f'{kind}(path={str(path)!r})', [])
      assert message.startswith(f'{path}: not {expected}')
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  assert error_message(vocab.train, SPECS['tokenizer'], []) == (
    "a vocabulary of kind 'tokenizer' needs the package tokenizers: pip install 'attention_jax[pretrained]'"
  )


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('t5', {'config.json': None}, '{0}/config.json: no such file'),
    ('t5', {'config.json': '{'}, '{0}/config.json: invalid JSON (Expecting property name'),
    ('t5', {'config.json': '[]'}, "{0}/config.json: expected a JSON object, got '[]'"),
    ('t5', {'config.json': '{"model_type": "t4"}'}, "unknown model_type of {0}/config.json: 't4' (did you mean 't5'?)"),
    ('t5', {'config.json': '{"model_type": "t5"}'}, '{0}/config.json: vocab_size must be a whole number, got None'),
    (
      't5',
      {'config.json': '{"model_type": "t5", "vocab_size": 9}'},
      'but the tokenizer in this folder has ids up to 1',
    ),
    ('t5', {'generation_config.json': None}, 'decoder_start_token_id must be a whole number from 0 to 1727, got None'),
    ('t5', {'spiece.model': None}, '{0}/spiece.model: no such file'),
    ('t5', {'spiece.model': 'text'}, '{0}/spiece.model: not a sentencepiece model ('),
    ('marian', {'target.spm': None}, '{0}/target.spm: no such file'),
    ('marian', {'vocab.json': '{"a": "b"}'}, '{0}/vocab.json: expected an object with the id of each token'),
    ('marian', {'vocab.json': '{"</s>": 0}'}, '{0}: the tokenizer has no token <pad> and no <unk>'),
    ('marian', {'tokenizer_config.json': '{"separate_vocabs": true}'}, '{0}: a Marian model with separate vocabularie'),
    ('mbart', {'config.json': '{"model_type": "mbart", "vocab_size": 1700}'}, '{0}: vocab_size is 1700, expected the'),
    ('bart', {'tokenizer.json': None}, '{0}/tokenizer.json: no such file'),
    ('bert', {'tokenizer.json': '{}'}, "{0}/tokenizer.json: not a tokenizer.json of Hugging Face's tokenizers ("),
  ],
)
def test_invalid_folders_are_reported(name, changes, message, folders, tmp_path):
  for path in (folders / name).iterdir():
    (tmp_path / path.name).symlink_to(path)
  for file, content in changes.items():
    (tmp_path / file).unlink()
    if content is not None:
      (tmp_path / file).write_text(content)
  assert message.format(tmp_path) in error_message(vocab.from_pretrained, str(tmp_path))
