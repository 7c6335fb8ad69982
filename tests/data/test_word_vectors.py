"""Word vectors are read for the tokens of a vocabulary, and learned from the text of a training split."""

import functools
import gzip

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.data.word_vectors import EmbeddingText, read_word_vectors, write_word_vectors
from attention_jax.errors import UserError

LINES = ['the cat sleeps', 'the dog sleeps', 'a cat eats', 'a dog eats'] * 50
VECTORS = 'cat 1 2 3\ndog 4 5e-1 -6\nbird 7 8 9\n'
WORDS = vocab.word(LINES)


@pytest.mark.parametrize('header', ['', '3 3\n', '\ufeff', '\ufeff3 3\n'])
@pytest.mark.parametrize('name', ['vectors.txt', 'vectors.txt.gz'])
def test_rows_of_known_tokens_are_those_of_the_file(header, name, tmp_path):
  data = (header + VECTORS.replace('\n', ' \n') + 'cat 0 0 0\n').encode()  # word2vec ends lines with a space
  path = tmp_path / name
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  table, num_found = read_word_vectors(str(path), WORDS)
  assert table.shape == (len(WORDS), 3) and table.dtype == np.float32 and num_found == 2
  ids = {WORDS.id_to_token(id): id for id in range(len(WORDS))}
  np.testing.assert_array_equal(table[ids['cat']], [1, 2, 3])  # the first of two lines
  np.testing.assert_array_equal(table[ids['dog']], [4, 0.5, -6])


def test_tokens_absent_from_the_file_have_random_rows_with_its_spread_and_always_the_same(tmp_path):
  tokens = [f'w{i}' for i in range(2000)]
  vocabulary = vocab.word(tokens)
  path = tmp_path / 'vectors.txt'
  path.write_text('w0 3 -3 3 -3\nw1 -3 3 -3 3\n')
  first, _ = read_word_vectors(str(path), vocabulary)
  second, _ = read_word_vectors(str(path), vocabulary)
  np.testing.assert_array_equal(first, second)
  assert first.std() == pytest.approx(3, rel=0.03) and abs(first.mean()) < 0.1


def test_tokens_may_contain_spaces(tmp_path):
  path = tmp_path / 'vectors.txt'
  path.write_text('a 1 2\n  3 4\n')
  vocabulary = vocab.char(['a a'])
  table, num_found = read_word_vectors(str(path), vocabulary)
  assert num_found == 2
  rows = {vocabulary.id_to_token(id): row.tolist() for id, row in enumerate(table)}
  assert rows['a'] == [1, 2] and rows[' '] == [3, 4]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('bird 1 2\n', 'vectors.txt: has a vector of 2 numbers for none of the 6 tokens of the vocabulary'),
    ('2 1\ncat 1 2\n', 'vectors.txt: has a vector of 1 number for none of the 6 tokens of the vocabulary'),
    ('cat 1 1e50\n', "vectors.txt:1: expected a token and 2 finite numbers, got 'cat 1 1e50'"),
    ('cat 1 2\ndog 1\n', "vectors.txt:2: expected a token and 2 finite numbers, got 'dog 1'"),
    ('cat 1 2\ndog 1 nan\n', "vectors.txt:2: expected a token and 2 finite numbers, got 'dog 1 nan'"),
    ('cat 1 2\ndog 1 x\n', "vectors.txt:2: expected a token and 2 finite numbers, got 'dog 1 x'"),
    ('', 'vectors.txt: the file is empty'),
    (f'9 {"9" * 20}\ncat 1 2\n', 'vectors.txt: has a vector of 1 number for none of the 6 tokens of the vocabulary'),
    ('cat\ndog\n', "vectors.txt:1: expected a token and its numbers with spaces between them, got 'cat'"),
    ('cat\t1\t2\n', "vectors.txt:1: expected a token and its numbers with spaces between them, got 'cat\\t1\\t2'"),
  ],
)
def test_invalid_files_are_reported(text, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'vectors.txt').write_text(text)
  with pytest.raises(UserError) as error:
    read_word_vectors('vectors.txt', WORDS)
  assert str(error.value) == message


def test_a_missing_file_is_reported(tmp_path):
  with pytest.raises(UserError, match=r'nowhere\.txt: no such file'):
    read_word_vectors(str(tmp_path / 'nowhere.txt'), WORDS)


@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_learned_vectors_reflect_the_text_and_are_reproducible(suffix, tmp_path):
  text = EmbeddingText(WORDS, lambda: [*LINES, 'unseen'])
  epochs = []
  options = {'window': 2, 'epochs': 20, 'seed': 1}
  paths = [tmp_path / f'{name}{suffix}' for name in ('first', 'second')]
  for path in paths:
    count = write_word_vectors(str(path), text, 8, **options, on_epoch=lambda: epochs.append(1))
  assert paths[0].read_bytes() == paths[1].read_bytes()
  assert len(epochs) == 40
  vectors, num_found = read_word_vectors(str(paths[0]), WORDS)
  assert count == num_found == 6
  rows = {WORDS.id_to_token(id): row / np.linalg.norm(row) for id, row in enumerate(vectors)}
  assert rows['cat'] @ rows['dog'] > rows['cat'] @ rows['the']  # cat and dog occur beside the same words


def test_no_token_of_a_long_line_is_left_out(tmp_path):
  tokens = ' '.join(LINES * 20).split()
  assert len(tokens) > 10_000  # gensim ignores the tokens of a sentence after this number
  texts = {'one_line': [' '.join(tokens)], 'two_lines': [' '.join(tokens[:10_000]), ' '.join(tokens[10_000:])]}
  for name, lines in texts.items():
    text = EmbeddingText(WORDS, functools.partial(iter, lines))
    write_word_vectors(str(tmp_path / name), text, 2, window=2, epochs=1, seed=1)
  assert (tmp_path / 'one_line').read_text() == (tmp_path / 'two_lines').read_text()


def test_a_text_without_known_tokens_is_reported(tmp_path):
  text = EmbeddingText(WORDS, lambda: ['unseen'])
  with pytest.raises(UserError, match='the training split has no token of the vocabulary'):
    write_word_vectors(str(tmp_path / 'vectors.txt'), text, 8, window=2, epochs=1, seed=0)
  assert not list(tmp_path.iterdir())
