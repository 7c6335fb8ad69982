"""Vocabularies: text <-> integer ids. One row each in VOCABULARIES; a run stores its own and never trains it again."""

import collections
import io
import itertools
import json
import math
import os
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from attention_jax.data.subword_sampling import bpe_dropout, unigram_sampling
from attention_jax.errors import UserError
from attention_jax.specs import bind
from attention_jax.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

_CUTS = {'subword': bpe_dropout, 'unigram': unigram_sampling}
_PIECED = re.compile('▁?[^▁]+|▁')  # words as pieces have them: none reaches over the beginning of another


class Vocabulary(Protocol):
  """What the rest of the package knows of a vocabulary. Ids 0 to 3 are PAD, BOS, EOS and UNK in each.

  Attributes:
    kind: its name in VOCABULARIES.
    sample: (line, seed) -> ids as of `encode`, of a way to cut the line that is drawn; None where there is but one.
  """

  kind: str
  sample: Callable[[str, int], list[int]] | None

  def tokenize(self, text: str) -> list[str]:
    """The tokens of a line: what stands on the axes of a heatmap."""

  def word_ids(self, text: str) -> list[int]:
    """For each token of a line the word, as str.split counts them, that it is part of; -1 for one that is of none."""

  def encode(self, text: str) -> list[int]:
    """One id per token; neither BOS nor EOS is added."""

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    """A line that still arrives in parts, each as soon as its ids are certain; together they are those of the line."""

  def decode(self, ids: Iterable[int], more: Sequence[str] = ()) -> str:
    """The text up to the first EOS, without PAD and BOS. `more`: the tokens that ids from len(self) on stand for."""

  def id_to_token(self, id: int) -> str:
    """How one id is written."""

  def __len__(self) -> int: ...

  def save(self, folder: str, side: str) -> str:
    """Writes itself as the vocabulary of `side` ('source', 'target', 'shared') and returns the path."""


class Listed:
  """A vocabulary of listed tokens, 'char' (Unicode code points) or 'word' (split at spaces)."""

  sample = None

  def __init__(self, kind: str, tokens: Sequence[str]):
    self.kind, self._pieces = kind, (*SPECIAL_TOKENS, *tokens)
    self._ids = {token: id for id, token in enumerate(tokens, len(SPECIAL_TOKENS))}

  def tokenize(self, text: str) -> list[str]:
    return list(text) if self.kind == 'char' else text.split()

  def word_ids(self, text: str) -> list[int]:
    return _WORDS[self.kind](text)

  def encode(self, text: str) -> list[int]:
    find = self._ids.get
    return [find(token, UNK) for token in self.tokenize(text)]

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    return _PARTS[self.kind](characters)

  def decode(self, ids: Iterable[int], more: Sequence[str] = ()) -> str:
    unknown = (
      SPECIAL_TOKENS[UNK] if self.kind == 'word' else '\N{REPLACEMENT CHARACTER}'
    )  # still one character per token
    pieces = (unknown if id == UNK else _piece(self, id, more) for id in _content(ids))
    return (' ' if self.kind == 'word' else '').join(pieces)

  def id_to_token(self, id: int) -> str:
    return self._pieces[id]

  def __len__(self) -> int:
    return len(self._pieces)

  def save(self, folder: str, side: str) -> str:
    content = {'kind': self.kind, 'tokens': self._pieces[len(SPECIAL_TOKENS) :]}
    return _write(_path(self.kind, folder, side), json.dumps(content, ensure_ascii=False, indent=0).encode())


class Subword:
  """A sentencepiece model, 'subword' or 'unigram'. The text is not normalised: what is decoded is what was written.

  Args: sampling, by which `sample` cuts lines, see `subword` and `unigram`; 0 for always the same.
  """

  def __init__(self, kind: str, model: bytes, sampling: float = 0.0):
    import sentencepiece

    self.kind, self._model = kind, model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.sample = None
    if sampling:
      self._ids = {self.id_to_token(id): id for id in range(len(SPECIAL_TOKENS), len(self))}
      scores = {piece: self._processor.get_score(id) for piece, id in self._ids.items()}
      self._cut, self.sample = _CUTS[kind](scores, sampling), self._sample

  def _sample(self, text: str, seed: int) -> list[int]:
    pieces, draws = self.tokenize(text), random.Random(seed)
    if not self._ids.keys() >= set(pieces):  # characters that no piece has
      return self.encode(text)
    words = _PIECED.findall(''.join(pieces))
    return [self._ids[part] for word in words for part in self._cut(word, draws)]

  def tokenize(self, text: str) -> list[str]:
    return self._processor.encode(text, out_type=str)

  def word_ids(self, text: str) -> list[int]:
    """By where each piece begins, as '▁' may stand in the text itself. Spaces belong to the word that comes next."""
    words = [*_next_words(text), -1]
    return [words[begin] for begin, _ in self._processor.encode(text, return_type='offset_mapping')['offsets']]

  def encode(self, text: str) -> list[int]:
    return self._processor.encode(text)

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    """Words: no piece reaches over a space. Only spaces after a '▁' of the text itself stay with what follows them."""
    return _runs(characters, lambda run, character: character == ' ' and not run.rstrip(' ').endswith('▁'))

  def decode(self, ids: Iterable[int], more: Sequence[str] = ()) -> str:
    return self._processor.decode([_piece(self, id, more) for id in _content(ids)])

  def id_to_token(self, id: int) -> str:
    return self._processor.id_to_piece(int(id))

  def __len__(self) -> int:
    return self._processor.get_piece_size()

  def save(self, folder: str, side: str) -> str:
    return _write(_path(self.kind, folder, side), self._model)


def char(lines: Iterable[str]) -> Listed:
  """Every character (Unicode code point) of the lines, most frequent first, ties in code point order."""
  return Listed('char', _frequent(lines, list, 1))


def word(lines: Iterable[str], *, min_count: int = 1) -> Listed:
  """The words seen at least `min_count` times, most frequent first, ties in code point order."""
  _option('min_count', min_count, min_count >= 1, 'a whole number of at least 1')
  words = _frequent(lines, str.split, min_count)
  if not words:
    raise UserError(f'vocabulary word(min_count={min_count}): no word of the training split occurs that often')
  return Listed('word', words)


def subword(
  lines: Iterable[str], *, size: int = 8000, dropout: float = 0.0, coverage: float = 1.0, max_lines: int = 0
) -> Subword:
  """Byte-pair encoding by sentencepiece (Sennrich et al. 2016; Kudo and Richardson 2018), `size` pieces in all.

  With `dropout` training lines are cut anew in each epoch, each merge left out with this probability. `coverage` is the
  share of the characters that pieces know, the most frequent ones; `max_lines` how many lines are looked at, evenly
  spaced, 0 for all.

  Raises: UserError when the lines have fewer pieces than `size`, or more characters.
  """
  _option('dropout', dropout, 0 <= dropout < 1, 'a number from 0 to below 1')
  model = _sentencepiece('bpe', f'subword(size={size})', lines, size, coverage, max_lines)
  return Subword('subword', model, dropout)


def unigram(
  lines: Iterable[str], *, size: int = 8000, sampling: float = 0.0, coverage: float = 1.0, max_lines: int = 0
) -> Subword:
  """The pieces of a unigram language model by sentencepiece (Kudo 2018), `size` in all.

  With `sampling`, α of the paper's section 3.2, training lines are cut anew in each epoch, each way x of cutting one
  with probability P(x)^α / Σ P^α over all ways: the smaller, the more alike they are. `coverage` and `max_lines` as of
  `subword`.

  Raises: UserError when the lines have fewer pieces than `size`, or more characters.
  """
  _option('sampling', sampling, 0 <= sampling < math.inf, 'a number of 0 or more')
  model = _sentencepiece('unigram', f'unigram(size={size})', lines, size, coverage, max_lines)
  return Subword('unigram', model, sampling)


def _sentencepiece(
  algorithm: str, spec: str, lines: Iterable[str], size: int, coverage: float, max_lines: int
) -> bytes:
  """A trained model. Raises: UserError naming the spec."""
  import sentencepiece

  _option('size', size, size >= 1, 'a whole number of at least 1')
  _option('coverage', coverage, 0 < coverage <= 1, 'a number above 0, 1 at most')
  _option('max_lines', max_lines, max_lines >= 0, 'a whole number of 0 or more')
  if max_lines:
    lines = list(lines)
    lines = lines[:: -(-len(lines) // max_lines) or 1]
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines),
      model_writer=model,
      vocab_size=size,
      model_type=algorithm,
      pad_id=PAD,
      bos_id=BOS,
      eos_id=EOS,
      unk_id=UNK,
      pad_piece=SPECIAL_TOKENS[PAD],
      unk_surface=SPECIAL_TOKENS[UNK],
      character_coverage=coverage,
      normalization_rule_name='identity',
      max_sentence_length=1 << 20,
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = str(error).rpartition('] ')[2].strip() or str(error)
    raise UserError(f'vocabulary {spec} does not fit the training split: {reason}') from None
  return model.getvalue()


class Kind(NamedTuple):
  """A row of VOCABULARIES: lines -> a vocabulary, the stored bytes and its options -> the same vocabulary, the stored
  file's suffix, and the option by which training lines are cut anew in each epoch."""

  train: Callable[..., Vocabulary]
  restore: Callable[..., Vocabulary]
  suffix: str
  sampling_option: str = ''


def _restore_listed(kind: str) -> Callable[..., Listed]:
  def restore(data: bytes, **options: Any) -> Listed:
    content = json.loads(data)
    tokens = content['tokens']
    if content['kind'] != kind:
      raise ValueError(f'it is of kind {content["kind"]!r}')
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
      raise TypeError('its tokens are not a list of strings')
    if len(set(tokens)) < len(tokens):
      raise ValueError('it holds a token twice')
    return Listed(kind, tokens)

  return restore


def _restore_subword(kind: str, sampling_option: str) -> Callable[..., Subword]:
  def restore(data: bytes, **options: Any) -> Subword:
    vocabulary = Subword(kind, data, options.get(sampling_option, 0.0))
    if not data or [vocabulary.id_to_token(id) for id in range(len(SPECIAL_TOKENS))] != list(SPECIAL_TOKENS):
      raise ValueError('not a model of this package')
    return vocabulary

  return restore


VOCABULARIES = {
  'char': Kind(char, _restore_listed('char'), 'json'),
  'word': Kind(word, _restore_listed('word'), 'json'),
  'subword': Kind(subword, _restore_subword('subword', 'dropout'), 'model', 'dropout'),
  'unigram': Kind(unigram, _restore_subword('unigram', 'sampling'), 'unigram.model', 'sampling'),
}


def parse_kind(spec: str) -> str:
  """`word(min_count=2)` -> `word`. Raises UserError for what is not in VOCABULARIES, unknown options included."""
  return _bind(spec)[0]


def sampling_option(spec: str) -> str:
  """The option of `spec` by which training lines are cut anew in each epoch; '' where they are not."""
  name, _, options = _bind(spec)
  option = VOCABULARIES[name].sampling_option
  return option if options.get(option) else ''


def train(spec: str, lines: Iterable[str]) -> Vocabulary:
  """The vocabulary that `spec` names, from the lines of the training split."""
  _, fn, options = _bind(spec)
  return fn(lines, **options)


def load_stored(spec: str, folder: str, side: str) -> Vocabulary | None:
  """The vocabulary of `side` that a run stored in its folder; None when there is none.

  Raises: UserError when the file is damaged or holds a vocabulary of another kind.
  """
  name, _, options = _bind(spec)
  path = _path(name, folder, side)
  try:
    with open(path, 'rb') as file:
      return VOCABULARIES[name].restore(file.read(), **options)
  except FileNotFoundError:
    return None
  except OSError as error:
    raise UserError(f'{path}: cannot be read ({error.strerror})') from None
  except (ValueError, LookupError, TypeError, RuntimeError) as error:
    reason = ' '.join(str(error).split())
    raise UserError(f"{path}: not a stored vocabulary of kind '{name}', or damaged ({reason})") from None


def same_entries(one: Vocabulary, other: Vocabulary) -> bool:
  """Whether two vocabularies have the same entries."""
  return len(one) == len(other) and all(one.id_to_token(id) == other.id_to_token(id) for id in range(len(one)))


def _bind(spec: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
  return bind(spec, {name: row.train for name, row in VOCABULARIES.items()}, 'vocabulary')


def _frequent(lines: Iterable[str], split: Callable[[str], list[str]], min_count: int) -> list[str]:
  counts: collections.Counter[str] = collections.Counter()
  for line in lines:
    counts.update(split(line))
  return sorted((token for token, n in counts.items() if n >= min_count), key=lambda token: (-counts[token], token))


def _next_words(text: str) -> list[int]:
  """For each character the word that it is in or, of white space, that comes next; -1 where none does."""
  found, words = [], 0
  for before, character in itertools.pairwise(f' {text}'):
    words += before.isspace() and not character.isspace()
    found.append(words - (not character.isspace()))
  return [-1 if word == words else word for word in found]


def _words_of_characters(text: str) -> list[int]:
  return [-1 if character.isspace() else word for character, word in zip(text, _next_words(text), strict=True)]


def _runs(characters: Iterable[str], ends: Callable[[str, str], bool]) -> Iterator[str]:
  """The runs of characters between those where ends(run so far, character), which belong to none."""
  run = ''
  for character in characters:
    if not ends(run, character):
      run += character
    elif run:
      yield run
      run = ''
  if run:
    yield run


_PARTS = {'char': iter, 'word': lambda characters: _runs(characters, lambda _, character: character.isspace())}
_WORDS = {'char': _words_of_characters, 'word': lambda text: list(range(len(text.split())))}  # of listed tokens


def _piece(vocabulary: Vocabulary, id: int, more: Sequence[str]) -> str:
  return more[id - len(vocabulary)] if id >= len(vocabulary) else vocabulary.id_to_token(id)


def _content(ids: Iterable[int]) -> list[int]:
  content = []
  for id in map(int, ids):
    if id == EOS:
      break
    if id not in (PAD, BOS):
      content.append(id)
  return content


def _option(option: str, value: float, good: bool, possible: str) -> None:
  if not good:
    raise UserError(f'vocabulary option {option} is {possible}, got {value!r}')


def _path(name: str, folder: str, side: str) -> str:
  return os.path.join(folder, f'vocabulary.{side}.{VOCABULARIES[name].suffix}')


def _write(path: str, data: bytes) -> str:
  """Writes a file whole or not at all: a run may be killed at any moment, and several processes may write the same."""
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  partial = f'{path}.{uuid.uuid4().hex}'
  with open(partial, 'wb') as file:
    file.write(data)
  os.replace(partial, path)
  return path
