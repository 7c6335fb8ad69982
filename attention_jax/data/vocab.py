"""Vocabularies: text <-> ids. VOCABULARIES has a row for each kind. They are trained once, and stored with the run."""

import bisect
import collections
import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Annotated, Any, NamedTuple, Protocol

from etils import epath

from attention_jax.atomic import write_bytes
from attention_jax.data import word_positions
from attention_jax.data.text import format_count
from attention_jax.errors import UserError
from attention_jax.specs import Count, Range, Size, bind
from attention_jax.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, content_ids

_UNTRAINABLE = '▅'  # U+2585, which stands for unknown characters in sentencepiece: it skips lines that contain it
_MAX_LINE = 4096  # characters of a training line: sentencepiece skips long lines, and takes long for them
_BYTE = '<0x00>'  # one of 256 pieces of a vocabulary with byte fallback
_Coverage = Annotated[float, Range(0.98, 1)]  # as sentencepiece requires


class Vocabulary(Protocol):
  """Interface of a vocabulary. Ids 0 to 3 are PAD, BOS, EOS and UNK.

  Attributes:
    kind: a key of VOCABULARIES.
  """

  kind: str

  def tokenize(self, text: str) -> list[str]:
    """Returns the tokens of a line."""

  def word_ids(self, text: str) -> list[int]:
    """Returns for each token of a line the index of its word in `split_words(text)`; -1 for a token of no word."""

  def encode(self, text: str) -> list[int]:
    """Returns one id per token; neither BOS nor EOS is added."""

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    """Yields segments of an arriving line, each as soon as its ids are certain.

    The ids of the segments, concatenated, are those of the line.
    """

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    """Returns the text up to the first EOS, without PAD and BOS.

    Args:
      ids: the ids.
      copied_tokens: the token of each id from len(self) on.
    """

  def id_to_token(self, id: int) -> str:
    """Returns the token of an id."""

  def __len__(self) -> int: ...

  def save(self, folder: str, side: str) -> str:
    """Stores the vocabulary of `side` ('source', 'target', 'shared') and returns the path."""


class ListedVocabulary:
  """A list of tokens: 'char' (Unicode code points) or 'word' (split at white space)."""

  def __init__(self, kind: str, tokens: Sequence[str]):
    self.kind = kind
    self._tokens = (*SPECIAL_TOKENS, *tokens)
    self._ids = {token: id for id, token in enumerate(tokens, len(SPECIAL_TOKENS))}

  def tokenize(self, text: str) -> list[str]:
    return list(text) if self.kind == 'char' else text.split()

  def word_ids(self, text: str) -> list[int]:
    if self.kind == 'char':
      return word_positions.words_of_characters(text)
    return [i for i, word in enumerate(word_positions.split_words(text)) for _ in self.tokenize(word)]

  def encode(self, text: str) -> list[int]:
    return [self._ids.get(token, UNK) for token in self.tokenize(text)]

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    if self.kind == 'char':
      return iter(characters)
    return word_positions.iter_segments(characters, lambda _, character: character.isspace())

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    # The replacement character keeps one character per token.
    unknown = SPECIAL_TOKENS[UNK] if self.kind == 'word' else '\N{REPLACEMENT CHARACTER}'
    tokens = (unknown if id == UNK else _token(self, id, copied_tokens) for id in content_ids(ids))
    return (' ' if self.kind == 'word' else '').join(tokens)

  def id_to_token(self, id: int) -> str:
    return self._tokens[id]

  def __len__(self) -> int:
    return len(self._tokens)

  def save(self, folder: str, side: str) -> str:
    content = {'kind': self.kind, 'tokens': self._tokens[len(SPECIAL_TOKENS) :]}
    return _write(_path(self.kind, folder, side), json.dumps(content, ensure_ascii=False, indent=0).encode())


class SubwordVocabulary:
  """A sentencepiece model, 'subword' or 'unigram'.

  Characters are not normalised: decoding restores a text that the pieces cover. Leading, trailing and repeated spaces
  are lost, and a '▁' of the text becomes a space.
  """

  def __init__(self, kind: str, model: bytes):
    """Loads a serialised model of kind 'subword' or 'unigram'."""
    import sentencepiece

    self.kind = kind
    self._model = model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

  def tokenize(self, text: str) -> list[str]:
    return self._processor.encode(text, out_type=str)

  def word_ids(self, text: str) -> list[int]:
    """Assigns each piece to the word at its start; a separator belongs to the next word.

    The words are found by the offsets of the pieces: counting '▁' would fail for a text that itself contains '▁'.
    """
    words = [*word_positions.following_words(text), -1]
    return [words[start] for start, _ in self._processor.encode(text, return_type='offset_mapping')['offsets']]

  def encode(self, text: str) -> list[int]:
    return self._processor.encode(text)

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    """Yields words, as no piece extends over a space. A space after a '▁' of the text ends no segment."""
    return word_positions.iter_segments(
      characters, lambda segment, character: character == ' ' and not segment.rstrip(' ').endswith('▁')
    )

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    return self._processor.decode([_token(self, id, copied_tokens) for id in content_ids(ids)])

  def id_to_token(self, id: int) -> str:
    return self._processor.id_to_piece(int(id))

  def __len__(self) -> int:
    return self._processor.get_piece_size()

  def save(self, folder: str, side: str) -> str:
    return _write(_path(self.kind, folder, side), self._model)


class NormalizedVocabulary:
  """A vocabulary that reads every line in a Unicode normal form.

  Args:
    vocabulary: a vocabulary of normalised text; both have the same file.
    normalize: a function of text.NORMALIZATIONS.
  """

  def __init__(self, vocabulary: Vocabulary, normalize: Callable[[str], str]):
    self._vocabulary = vocabulary
    self._normalize = normalize
    self.kind = vocabulary.kind

  def tokenize(self, text: str) -> list[str]:
    return self._vocabulary.tokenize(self._normalize(text))

  def word_ids(self, text: str) -> list[int]:
    return self._vocabulary.word_ids(self._normalize(text))

  def encode(self, text: str) -> list[int]:
    return self._vocabulary.encode(self._normalize(text))

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    raise UserError("a line that is still arriving cannot be normalised; expected config.data.normalization='none'")

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    return self._vocabulary.decode(ids, copied_tokens)

  def id_to_token(self, id: int) -> str:
    return self._vocabulary.id_to_token(id)

  def __len__(self) -> int:
    return len(self._vocabulary)

  def save(self, folder: str, side: str) -> str:
    return self._vocabulary.save(folder, side)


def char(lines: Iterable[str]) -> ListedVocabulary:
  """Every character (Unicode code point) of the lines, most frequent first, ties in code point order."""
  return ListedVocabulary('char', _frequent_tokens(lines, list, 1))


def word(lines: Iterable[str], *, min_count: Size = 1) -> ListedVocabulary:
  """The words that occur at least `min_count` times, most frequent first, ties in code point order.

  Raises:
    UserError: if there are none.
  """
  words = _frequent_tokens(lines, str.split, min_count)
  if not words:
    raise UserError(f'vocabulary word(min_count={min_count}): no word of the training split occurs that often')
  return ListedVocabulary('word', words)


def subword(
  lines: Iterable[str],
  *,
  size: Size = 8000,
  min_count: Count = 0,
  coverage: _Coverage = 1.0,
  max_lines: Count = 0,
  byte_fallback: bool = False,
  symbols: tuple[str, ...] = (),
) -> SubwordVocabulary:
  """Byte-pair encoding by sentencepiece (Sennrich et al. 2016; Kudo and Richardson 2018).

  Args:
    lines: the lines of the training split.
    size: number of pieces in all, special tokens included.
    min_count: if positive, `size` is the largest number of pieces, and merging ends before the first piece that the
      lines contain less often. Frequent pieces help on few lines (Gowda and May 2020).
    coverage: the share of the characters of the text that pieces cover, the most frequent characters first; from 0.98.
    max_lines: maximum number of lines to train on, evenly spaced; 0 for all.
    byte_fallback: whether characters that no piece covers are tokens of their UTF-8 bytes, 256 of the pieces, instead
      of unknown.
    symbols: texts without spaces that always are one token, such as `('<2de>', '<2fr>')`.

  Raises:
    UserError: if the lines have fewer pieces than `size` and `min_count` is 0, or too many distinct characters for
      `size`; for a symbol that cannot be a token.
  """
  train_model = functools.partial(
    _train_sentencepiece, 'bpe', f'subword(size={size})', coverage, max_lines, byte_fallback, symbols
  )
  if not min_count:
    return SubwordVocabulary('subword', train_model(lines, size))
  lines = list(lines)
  vocabulary = SubwordVocabulary('subword', train_model(lines, size, is_limit=True))
  # Merges follow the special pieces, the most frequent first; single characters come last.
  first_merge = len(SPECIAL_TOKENS) + 256 * byte_fallback + len(symbols)
  merges = [piece for id in range(first_merge, len(vocabulary)) if len(piece := vocabulary.id_to_token(id)) > 1]
  text = '▁'.join(['', *(line.replace(' ', '▁') for line in lines)])
  num_frequent = bisect.bisect_left(merges, True, key=lambda piece: text.count(piece) < min_count)
  size = len(vocabulary) - len(merges) + num_frequent
  return SubwordVocabulary('subword', train_model(lines, size, is_limit=True))


def unigram(
  lines: Iterable[str],
  *,
  size: Size = 8000,
  coverage: _Coverage = 1.0,
  max_lines: Count = 0,
  byte_fallback: bool = False,
  symbols: tuple[str, ...] = (),
) -> SubwordVocabulary:
  """The pieces of a unigram language model by sentencepiece (Kudo 2018).

  Args:
    lines: the lines of the training split.
    size: number of pieces in all, special tokens included.
    coverage: see `subword`.
    max_lines, byte_fallback, symbols: see `subword`.

  Raises:
    UserError: as `subword`.
  """
  spec = f'unigram(size={size})'
  model = _train_sentencepiece('unigram', spec, coverage, max_lines, byte_fallback, symbols, lines, size)
  return SubwordVocabulary('unigram', model)


def _train_sentencepiece(
  algorithm: str,
  spec: str,
  coverage: float,
  max_lines: int,
  byte_fallback: bool,
  symbols: Sequence[str],
  lines: Iterable[str],
  size: int,
  is_limit: bool = False,
) -> bytes:
  """A trained model of `size` pieces, or of at most as many. Raises UserError, which names the spec."""
  import sentencepiece

  if max_lines:
    lines = lines if isinstance(lines, Sized) else list(lines)
    stride = -(-len(lines) // max_lines) or 1
    lines = itertools.islice(lines, 0, None, stride)
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=_trainable_lines(lines),
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
      max_sentence_length=4 * _MAX_LINE,  # bytes
      byte_fallback=byte_fallback,
      user_defined_symbols=list(symbols),
      hard_vocab_limit=not is_limit,
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = str(error).rpartition('] ')[2].strip() or str(error)
    raise UserError(f'vocabulary {spec} does not fit the training split: {reason}') from None
  tokenize = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode
  if invalid := [symbol for symbol in symbols if symbol not in tokenize(symbol, out_type=str)]:
    raise UserError(f'vocabulary {spec}: symbols must be texts without white space, got {invalid[0]!r}')
  return model.getvalue()


def _trainable_lines(lines: Iterable[str]) -> Iterator[str]:
  """Yields all lines as sentencepiece accepts them: long ones are cut, and _UNTRAINABLE becomes a space."""
  for line in lines:
    for start in range(0, len(line), _MAX_LINE):
      yield line[start : start + _MAX_LINE].replace(_UNTRAINABLE, ' ')


class VocabularyKind(NamedTuple):
  """A row of VOCABULARIES.

  Attributes:
    train: (lines, options) -> a vocabulary.
    restore: stored bytes -> the same vocabulary.
    suffix: suffix of the stored file.
  """

  train: Callable[..., Vocabulary]
  restore: Callable[[bytes], Vocabulary]
  suffix: str


def _restore_listed(kind: str) -> Callable[[bytes], ListedVocabulary]:
  def restore(data: bytes) -> ListedVocabulary:
    content = json.loads(data)
    tokens = content['tokens']
    if content['kind'] != kind:
      raise ValueError(f'it is of kind {content["kind"]!r}')
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
      raise TypeError('its tokens are not a list of strings')
    if len(set(tokens)) < len(tokens):
      raise ValueError('it contains a token twice')
    return ListedVocabulary(kind, tokens)

  return restore


def _restore_subword(kind: str) -> Callable[[bytes], SubwordVocabulary]:
  def restore(data: bytes) -> SubwordVocabulary:
    vocabulary = SubwordVocabulary(kind, data)
    if not data or [vocabulary.id_to_token(id) for id in range(len(SPECIAL_TOKENS))] != list(SPECIAL_TOKENS):
      raise ValueError('not a model of this package')
    return vocabulary

  return restore


VOCABULARIES = {
  'char': VocabularyKind(char, _restore_listed('char'), 'json'),
  'word': VocabularyKind(word, _restore_listed('word'), 'json'),
  'subword': VocabularyKind(subword, _restore_subword('subword'), 'model'),
  'unigram': VocabularyKind(unigram, _restore_subword('unigram'), 'unigram.model'),
}


def parse_kind(spec: str) -> str:
  """Returns the kind of a spec: `word(min_count=2)` -> `word`.

  Raises:
    UserError: for anything but a spec of VOCABULARIES.
  """
  return _bind(spec)[0]


def train(spec: str, lines: Iterable[str]) -> Vocabulary:
  """Returns the vocabulary `spec`, trained on the lines of the training split.

  Raises:
    UserError: for anything but a spec of VOCABULARIES, and as the function of its kind does.
  """
  _, fn, options = _bind(spec)
  return fn(lines, **options)


def load_stored(spec: str, folder: str, side: str) -> Vocabulary | None:
  """Returns the vocabulary of `side` from its file in a folder; None if there is no file for this kind.

  Args:
    spec: a spec of VOCABULARIES.
    folder: the run folder, or the folder of a prepared data set.
    side: 'source', 'target' or 'shared'.

  Raises:
    UserError: for anything but a spec of VOCABULARIES, and if the file cannot be read, is damaged or contains a
      vocabulary of another kind.
  """
  name = parse_kind(spec)
  path = _path(name, folder, side)
  try:
    return VOCABULARIES[name].restore(epath.Path(path).read_bytes())
  except FileNotFoundError:
    return None
  except OSError as error:
    raise UserError(f'{path}: cannot be read ({error.strerror})') from None
  except (ValueError, LookupError, TypeError, RuntimeError) as error:
    reason = ' '.join(str(error).split())[:200]
    raise UserError(f"{path}: not a stored vocabulary of kind '{name}', or damaged ({reason})") from None


def load_or_train(
  spec: str, side: str, lines: Iterable[str], run_folder: str | None, prepared_folder: str | None
) -> tuple[Vocabulary, str]:
  """Returns the vocabulary of a side, and where it comes from.

  Args:
    spec: a spec of VOCABULARIES.
    side: 'source', 'target' or 'shared'.
    lines: the lines of the training split, which are read if no folder has the vocabulary.
    run_folder: the run folder, whose vocabulary comes first; None for a new run.
    prepared_folder: the folder of a prepared data set; None for other data.

  Raises:
    UserError: if both folders have vocabularies that differ, and as `load_stored` and `train` do.
  """
  folders = (run_folder, prepared_folder)
  of_run, prepared = (load_stored(spec, folder, side) if folder else None for folder in folders)
  if of_run is not None and prepared is not None and not same_entries(of_run, prepared):
    raise UserError(
      f'{prepared_folder} was prepared with another {side} vocabulary than that of this run or of its initial run; '
      'set config.data.task to the task that this folder was prepared from'
    )
  stored = prepared if of_run is None else of_run
  return (train(spec, lines), 'made from the training split') if stored is None else (stored, 'stored')


def same_entries(one: Vocabulary, other: Vocabulary) -> bool:
  """Returns whether two vocabularies have the same entries, in the same order."""
  return len(one) == len(other) and all(one.id_to_token(id) == other.id_to_token(id) for id in range(len(one)))


def _bind(spec: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
  return bind(spec, {name: row.train for name, row in VOCABULARIES.items()}, 'vocabulary')


def _frequent_tokens(lines: Iterable[str], split: Callable[[str], list[str]], min_count: int) -> list[str]:
  counts: collections.Counter[str] = collections.Counter()
  for line in lines:
    counts.update(split(line))
  return sorted((token for token, n in counts.items() if n >= min_count), key=lambda token: (-counts[token], token))


def has_byte_fallback(vocabulary: Vocabulary) -> bool:
  """Returns whether a vocabulary has the pieces of byte fallback."""
  return _BYTE in _entries(vocabulary)


def unknown_characters(vocabulary: Vocabulary, lines: Iterable[str]) -> list[str]:
  """Returns the characters of lines that no token of a vocabulary contains, in code point order."""
  if has_byte_fallback(vocabulary):
    return []
  tokens = itertools.chain.from_iterable(map(vocabulary.tokenize, lines))
  return sorted({*itertools.chain.from_iterable(tokens)}.difference(*_entries(vocabulary)))


def format_characters(characters: Sequence[str], shown: int = 5) -> str:
  """Returns the number of characters and the first of them: `7 characters that the vocabulary lacks: 'a', ...`."""
  listed = ', '.join([*map(repr, characters[:shown]), *(['...'] if len(characters) > shown else [])])
  return f'{format_count(len(characters), "character")} that the source vocabulary lacks: {listed}'


def _entries(vocabulary: Vocabulary) -> list[str]:
  """The tokens of a vocabulary without the special ones."""
  return [vocabulary.id_to_token(id) for id in range(len(SPECIAL_TOKENS), len(vocabulary))]


def _token(vocabulary: Vocabulary, id: int, copied_tokens: Sequence[str]) -> str:
  return copied_tokens[id - len(vocabulary)] if id >= len(vocabulary) else vocabulary.id_to_token(id)


def _path(name: str, folder: str, side: str) -> str:
  return os.path.join(folder, f'vocabulary.{side}.{VOCABULARIES[name].suffix}')


def _write(path: str, data: bytes) -> str:
  epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
  write_bytes(path, data)
  return path
