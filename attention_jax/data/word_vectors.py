"""Word vectors in text files, as word2vec, GloVe and fastText write them: initial values of embeddings.

Every line has a token and its numbers, separated by single spaces. A first line with two integers, the number of tokens
and of their features, is optional.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.atomic import write_bytes
from attention_jax.data.files import iter_raw_lines
from attention_jax.data.text import format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.tokens import SPECIAL_TOKENS

SHOWN_CHARACTERS = 60  # of a wrong line, in its error message
MAX_DIGITS = 9  # of a number in a first line; a longer one belongs to a vector


class EmbeddingText(NamedTuple):
  """The vocabulary of an embedding, and its training text.

  Attributes:
    vocabulary: the vocabulary, with a token for each row.
    lines: returns the text of the training split, as the lines that the vocabulary tokenises.
  """

  vocabulary: Vocabulary
  lines: Callable[[], Iterable[str]]


def read_word_vectors(path: str, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
  """Reads the vectors of a vocabulary's tokens. If a token has several lines, the first one is used.

  Args:
    path: a text file of vectors of F numbers, plain or .gz, on a disk or behind a URL.
    vocabulary: a vocabulary of V tokens.

  Returns:
    The vectors [V, F] float32, and the number of the vocabulary's tokens that the file contains. Special tokens, and
    tokens that it does not contain, have random vectors from a fixed seed: normally distributed, with mean 0 and the
    standard deviation of the numbers of the tokens that it contains.

  Raises:
    UserError: for a file that cannot be read or contains none of the tokens, for a first line without spaces, and for
      the first line of one of the tokens if it does not have F finite numbers.
  """
  ids = {token.encode(): id for id, token in _tokens(vocabulary)}
  vectors = {}
  features = 0
  for number, line in enumerate(iter_raw_lines(path), 1):
    if number == 1 and _is_header(line):
      features = int(line.split()[1])
      continue
    features = features or line.rstrip(b' ').count(b' ')
    if not features:
      raise UserError(
        f'{path}:{number}: expected a token and its numbers with spaces between them, got {_quote_beginning(line)}'
      )
    token, *numbers = line.rstrip(b' ').rsplit(b' ', features)  # from the right, as a token may contain spaces
    id = ids.get(token)
    if id is not None and id not in vectors:
      vector = _parse_vector(numbers, features)
      if vector is None:
        raise UserError(
          f'{path}:{number}: expected a token and {features} finite numbers, got {_quote_beginning(line)}'
        )
      vectors[id] = vector
  if not vectors:
    size = f'a vector of {format_count(features, "number")}'  # that of a header may be wrong
    raise UserError(f'{path}: has {size} for none of the {len(ids)} tokens of the vocabulary')
  file_vectors = np.stack(list(vectors.values()))
  table = np.random.default_rng(0).normal(0, file_vectors.std(), (len(vocabulary), features)).astype(np.float32)
  table[list(vectors)] = file_vectors
  return table, len(vectors)


def write_word_vectors(
  path: str,
  text: EmbeddingText,
  features: int,
  *,
  window: int,
  epochs: int,
  seed: int,
  on_epoch: Callable[[], None] = lambda: None,
) -> int:
  """Learns word vectors from the training split and writes them: skip-gram with five negative samples, by gensim.

  Mikolov et al. 2013, "Distributed representations of words and phrases and their compositionality", equation 4.
  Frequent words are left out at random (section 2.3): gensim keeps a word of frequency f with probability
  √(t/f) + t/f, t = 1e-4. One thread computes, so that the same arguments give the same vectors.

  Args:
    path: the file to write; one that ends with .gz is compressed.
    text: the text, and the vocabulary of the embedding. Tokens outside of the vocabulary are removed from the text.
    features: F, size of the vectors.
    window: largest distance of two words that predict each other.
    epochs: passes over the text.
    seed: seed of the initial vectors and of all samples.
    on_epoch: called after each pass.

  Returns:
    The number of tokens with a vector.

  Raises:
    UserError: if the text has no token of the vocabulary.
  """
  from gensim.models import Word2Vec
  from gensim.models.callbacks import CallbackAny2Vec
  from gensim.models.word2vec import MAX_WORDS_IN_BATCH

  class ReportedEpochs(CallbackAny2Vec):
    def on_epoch_end(self, model: Word2Vec) -> None:
      on_epoch()

  tokens = {token for _, token in _tokens(text.vocabulary)}
  lines = ([token for token in text.vocabulary.tokenize(line) if token in tokens] for line in text.lines())
  # gensim ignores the tokens of a list beyond MAX_WORDS_IN_BATCH.
  limit = MAX_WORDS_IN_BATCH
  sentences = [line[start : start + limit] for line in lines for start in range(0, len(line), limit)]
  if not sentences:
    raise UserError('the training split has no token of the vocabulary')
  model = Word2Vec(
    sentences,
    vector_size=features,
    window=window,
    min_count=1,
    sg=1,
    negative=5,
    sample=1e-4,
    epochs=epochs,
    seed=seed,
    workers=1,
    callbacks=[ReportedEpochs()],
  )
  rows = [f'{len(model.wv)} {features}\n']
  rows += [f'{token} {" ".join(map(str, model.wv[token]))}\n' for token in model.wv.index_to_key]
  data = ''.join(rows).encode()
  write_bytes(path, gzip.compress(data, mtime=0) if path.endswith('.gz') else data)
  return len(model.wv)


def _tokens(vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
  """Every id and token, without special tokens."""
  return ((id, vocabulary.id_to_token(id)) for id in range(len(SPECIAL_TOKENS), len(vocabulary)))


def _is_header(line: bytes) -> bool:
  fields = line.split()
  return len(fields) == 2 and all(field.isdigit() and len(field) <= MAX_DIGITS for field in fields)


def _quote_beginning(line: bytes) -> str:
  """The beginning of a line, for an error message."""
  return repr(line.decode(errors='replace')[:SHOWN_CHARACTERS])


def _parse_vector(numbers: Sequence[bytes], features: int) -> np.ndarray | None:
  """The numbers of a line; None unless there are `features` finite numbers."""
  try:
    with np.errstate(over='ignore'):
      vector = np.array([float(number) for number in numbers], np.float32)
  except ValueError:
    return None
  return vector if len(vector) == features and np.isfinite(vector).all() else None
