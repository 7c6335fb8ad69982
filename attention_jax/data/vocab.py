"""Vocabularies: text <-> ids. VOCABULARIES has a row for each kind. They are made once, and stored with the run.

They are trained on the training split, or read from files of other programs: a sentencepiece model, a tokenizer.json.
`from_pretrained` reads the tokenizer of a pretrained model, and the order in which its tables must be read.
"""

import base64
import bisect
import collections
import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from etils import epath

from attention_jax.atomic import write_bytes
from attention_jax.data import word_positions
from attention_jax.data.files import read_bytes, read_json
from attention_jax.data.text import format_count
from attention_jax.errors import UserError, choose
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

  @property
  def sentencepiece_model(self) -> bytes:
    """The serialised model."""
    return self._model

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


class PretrainedVocabulary:
  """The tokens of another program, by a sentencepiece model or a tokenizer.json, with the ids of this project.

  Text is normalised as the tokenizer does. A token that the tokenizer has for PAD, BOS, EOS or UNK is UNK in a text.

  Args:
    kind: 'sentencepiece' or 'tokenizer'.
    file: the content of the file.
    tokens: the tokens of the ids from 4 on.
    hidden: ids that are left out of decoded text.
    prefix: ids that begin every encoded line; decoding leaves them out if they are BOS or hidden.
    clean: whether decoding removes the spaces before punctuation and English contractions, as `transformers` does with
      `clean_up_tokenization_spaces`.

  Raises:
    UserError: if the package tokenizers is needed and not installed.
    ValueError: if it is not such a file.
  """

  def __init__(
    self,
    kind: str,
    file: bytes,
    tokens: Sequence[str],
    hidden: Collection[int] = (),
    prefix: Sequence[int] = (),
    clean: bool = False,
  ):
    self.kind = kind
    self._content = {'tokens': list(tokens), 'hidden': sorted(hidden), 'prefix': list(prefix), 'clean': clean}
    self._file = file
    self._tokens = (*SPECIAL_TOKENS, *tokens)
    self._ids = {token: id for id, token in enumerate(tokens, len(SPECIAL_TOKENS))}
    self._hidden = frozenset(hidden)
    self._tokenizer = _TOKENIZERS[kind](file)

  @property
  def sentencepiece_model(self) -> bytes | None:
    """The serialised model; None for a tokenizer.json."""
    return self._file if self.kind == 'sentencepiece' else None

  def tokenize(self, text: str) -> list[str]:
    return [*map(self.id_to_token, self._content['prefix']), *(token.surface for token in self._split(text))]

  def word_ids(self, text: str) -> list[int]:
    """Assigns each token to the word at its start, a separator to the next word, and tokens of the prefix to none."""
    words = [*word_positions.following_words(text), -1]
    return [*(-1 for _ in self._content['prefix']), *(words[token.start] for token in self._split(text))]

  def encode(self, text: str) -> list[int]:
    code, rest = self._split_code(text)
    names = [code, *self._tokenizer.names(rest)] if code else self._tokenizer.names(rest)
    return [*self._content['prefix'], *(self._ids.get(name, UNK) for name in names)]

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    raise UserError(
      f'a line that is still arriving cannot be encoded with a vocabulary of kind {self.kind!r}; expected another kind'
    )

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    text = self._tokenizer.join([_token(self, id, copied_tokens) for id in content_ids(ids) if id not in self._hidden])
    for before, after in _CONTRACTIONS if self._content['clean'] else ():
      text = text.replace(before, after)
    return text

  def id_to_token(self, id: int) -> str:
    return self._tokens[id]

  def __len__(self) -> int:
    return len(self._tokens)

  def save(self, folder: str, side: str) -> str:
    content = {'kind': self.kind, **self._content, 'file': base64.b64encode(self._file).decode()}
    return _write(_path(self.kind, folder, side), json.dumps(content, ensure_ascii=False, indent=0).encode())

  def _split(self, text: str) -> 'list[_TokenInText]':
    code, rest = self._split_code(text)
    tokens = self._tokenizer.split(rest)
    if not code:
      return tokens
    return [_TokenInText(code, 0), *(token._replace(start=token.start + len(code)) for token in tokens)]

  def _split_code(self, text: str) -> tuple[str, str]:
    """A language code such as `>>fra<<` at the start of a line, '' unless the vocabulary has it, and what follows."""
    if not text.startswith('>>'):
      return '', text
    code, separator, rest = text.partition('<<')
    return (code + separator, rest) if code + separator in self._ids else ('', text)


class _TokenInText(NamedTuple):
  """A token of a text, or the part of the text if it is unknown, and where it starts."""

  surface: str
  start: int


class _SentencepieceModel:
  """A sentencepiece model as it is. Raises ValueError if `file` is none."""

  def __init__(self, file: bytes):
    import sentencepiece

    try:
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=file or b'-')
    except RuntimeError as error:
      raise ValueError(str(error)) from error
    self.tokens = [self._processor.id_to_piece(id) for id in range(self._processor.get_piece_size())]
    self.unknown = self.tokens[self._processor.unk_id()]
    ids = (getattr(self._processor, f'{name}_id')() for name in ('pad', 'bos', 'eos', 'unk'))
    self.special = {self.tokens[id] for id in ids if id >= 0}
    self.hidden: set[str] = set()

  def names(self, text: str) -> list[str]:
    return self._processor.encode(text, out_type=str)

  def split(self, text: str) -> list[_TokenInText]:
    encoded = self._processor.encode(text, return_type='offset_mapping')
    pieces = zip(encoded['pieces'], encoded['offsets'], strict=True)
    return [_TokenInText(piece, start) for piece, (start, _) in pieces]

  def join(self, tokens: list[str]) -> str:
    text = self._processor.decode(tokens)
    return text.removeprefix('▁').replace('▁', ' ')  # '▁' remains in pieces that this model lacks


class _JsonTokenizer:
  """A tokenizer.json as it is. Raises ValueError if `file` is none, and UserError without the package tokenizers."""

  def __init__(self, file: bytes):
    try:
      import tokenizers
    except ImportError:
      raise UserError(
        "a vocabulary of kind 'tokenizer' needs the package tokenizers: pip install 'attention_jax[pretrained]'"
      ) from None
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(file.decode())
    except Exception as error:  # the library raises no other type
      raise ValueError(str(error)) from error
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self.tokens_by_id = {id: token for token, id in self._tokenizer.get_vocab().items()}
    self.tokens = [self.tokens_by_id[id] for id in sorted(self.tokens_by_id)]
    content = json.loads(file)
    self.hidden = {token['content'] for token in content['added_tokens'] if token['special']}
    unigram_id = content['model'].get('unk_id')
    self.unknown = content['model'].get('unk_token') if unigram_id is None else content['model']['vocab'][unigram_id][0]
    self.special = {*_SPECIAL_NAMES, self.unknown}

  def names(self, text: str) -> list[str]:
    return self._tokenizer.encode(text, add_special_tokens=False).tokens

  def split(self, text: str) -> list[_TokenInText]:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return [
      _TokenInText(text[start:stop] if name == self.unknown else name, start)
      for name, (start, stop) in zip(encoding.tokens, encoding.offsets, strict=True)
    ]

  def join(self, tokens: list[str]) -> str:
    return self._tokenizer.decoder.decode(tokens) if self._tokenizer.decoder else ' '.join(tokens)


_TOKENIZERS: Mapping[str, Callable[[bytes], Any]] = {'sentencepiece': _SentencepieceModel, 'tokenizer': _JsonTokenizer}
# What tokenizers call PAD, BOS, EOS and UNK.
_SPECIAL_NAMES = (*SPECIAL_TOKENS, '[PAD]', '[BOS]', '[EOS]', '[UNK]', '[CLS]', '[SEP]')
_CONTRACTIONS = [(f' {end}', end) for end in ['.', '?', '!', ',']]
_CONTRACTIONS += [(" ' ", "'"), *((f' {end}', end) for end in ["n't", "'m", "'s", "'ve", "'re"])]


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


def sentencepiece_file(lines: Iterable[str], *, path: str) -> PretrainedVocabulary:
  """An existing sentencepiece model, whatever the ids of its special pieces are.

  Args:
    lines: not used.
    path: the model, from the current folder on.

  Raises:
    UserError: if the file cannot be read, or is not a sentencepiece model.
  """
  return _read_vocabulary('sentencepiece', path)


def tokenizer_file(lines: Iterable[str], *, path: str) -> PretrainedVocabulary:
  """An existing tokenizer.json of Hugging Face's tokenizers; it needs that package.

  Args:
    lines: not used.
    path: the file, from the current folder on.

  Raises:
    UserError: if the file cannot be read or is not a tokenizer.json, and without the package.
  """
  return _read_vocabulary('tokenizer', path)


def _read_vocabulary(kind: str, path: str) -> PretrainedVocabulary:
  tokenizer = _open_tokenizer(kind, path)
  tokens = [token for token in tokenizer.tokens if token not in tokenizer.special]
  hidden = [id for id, token in enumerate(tokens, len(SPECIAL_TOKENS)) if token in tokenizer.hidden]
  hidden += [UNK] if tokenizer.unknown in tokenizer.hidden else []
  return PretrainedVocabulary(kind, read_bytes(path), tokens, hidden)


def _open_tokenizer(kind: str, path: str) -> Any:
  file = read_bytes(path)
  try:
    return _TOKENIZERS[kind](file)
  except UserError:  # also a ValueError
    raise
  except ValueError as error:
    expected = {'sentencepiece': 'a sentencepiece model', 'tokenizer': "a tokenizer.json of Hugging Face's tokenizers"}
    raise UserError(f'{path}: not {expected[kind]} ({" ".join(str(error).split())[:200]})') from None


class _PretrainedTokenizer(NamedTuple):
  """The tokenizer of a pretrained model.

  Attributes:
    kind: 'sentencepiece' or 'tokenizer'.
    files: paths of the tokenizers of the source and of the target.
    tokens: the token of each row of the embedding table that has one.
    hidden: tokens that decoding leaves out, besides UNK and the rows without a token.
    special: names of PAD, EOS and UNK.
    prefix: token at the start of every line.
    start: token that starts the output of the decoder; '' for the `decoder_start_token_id` of the model.
    cleans: whether `transformers` regards `clean_up_tokenization_spaces`.
  """

  kind: str
  files: Sequence[str]
  tokens: Mapping[int, str]
  hidden: Collection[str] = ()
  special: tuple[str, str, str] = ('<pad>', '</s>', '<unk>')
  prefix: str = ''
  start: str = ''
  cleans: bool = True


def from_pretrained(folder: str) -> tuple[PretrainedVocabulary, PretrainedVocabulary, np.ndarray]:
  """Reads the vocabularies of a model that `transformers` stored.

  Ids 0 to 3 are PAD, BOS, EOS and UNK as in every vocabulary, BOS being what starts the output of the decoder; the
  other tokens follow in their order. `encode` gives the ids of the tokenizer without what it adds to a line, except
  a token at the start of a line: `<s>` of BART, in sources and targets, and `[CLS]` of BERT. EOS is appended when data
  are encoded, as for all vocabularies. Nothing else is added:

  - T5: the task, such as `translate English to German: `, is part of the text.
  - Marian: a language code such as `>>fra<<` at the start of a text is one token.
  - mBART: the codes of languages are tokens that no text contains. The model was trained on sources with the code of
    their language after EOS; BOS is the code of the target language if that is its `decoder_start_token_id`.

  `decode` gives the text of the tokenizer's `decode(ids, skip_special_tokens=True)`.

  Args:
    folder: holds config.json and, by its `model_type`, source.spm, target.spm and vocab.json (marian), spiece.model
      (t5), sentencepiece.bpe.model (mbart) or tokenizer.json (bart, bert).

  Returns:
    The source vocabulary, the target vocabulary, and the row of the tables of the model [V] of each of their ids.
    BOS and PAD may be the same row.

  Raises:
    UserError: for a file that is missing or invalid, or that does not fit the others; for another `model_type`; for a
      Marian model whose source and target have different tables.
  """
  config_path = os.path.join(folder, 'config.json')
  config = read_json(config_path)
  read = _PRETRAINED[choose(str(config.get('model_type')), _PRETRAINED, f'model_type of {config_path}:')]
  size = config.get('vocab_size')
  if not isinstance(size, int):
    raise UserError(f'{config_path}: vocab_size must be a whole number, got {size!r}')
  settings = read_json(os.path.join(folder, 'tokenizer_config.json'), is_optional=True)
  model = read(folder, size, settings)
  if max(model.tokens) >= size:
    raise UserError(
      f'{config_path}: vocab_size is {size}, but the tokenizer in this folder has ids up to {max(model.tokens)}; '
      'expected the files of one model'
    )
  names = [model.tokens.get(row, f'<row {row}>') for row in range(size)]
  rows = {name: row for row, name in enumerate(names)}
  if missing := [name for name in (*model.special, model.prefix, model.start) if name and name not in rows]:
    raise UserError(f'{folder}: the tokenizer has no token {" and no ".join(missing)}')
  pad, eos, unk = (rows[name] for name in model.special)
  first = [pad, rows[model.start] if model.start else _decoder_start(folder, config, size), eos, unk]
  ids = first + [row for row in range(size) if row not in first]
  tokens = [names[row] for row in ids[len(first) :]]
  hidden = [id for id, row in enumerate(ids) if row not in model.tokens or names[row] in model.hidden]
  prefix = [ids.index(rows[model.prefix])] if model.prefix else []
  clean = bool(settings.get('clean_up_tokenization_spaces')) and model.cleans
  source, target = (
    PretrainedVocabulary(model.kind, read_bytes(path), tokens, {UNK, *hidden}, prefix, clean) for path in model.files
  )
  return source, target, np.array(ids, np.int32)


def _marian(folder: str, size: int, settings: Mapping[str, Any]) -> _PretrainedTokenizer:
  if settings.get('separate_vocabs'):
    raise UserError(f'{folder}: a Marian model with separate vocabularies; expected one vocab.json for both sides')
  path = os.path.join(folder, 'vocab.json')
  tokens = {id: token for token, id in read_json(path).items()}
  if not tokens or not all(isinstance(id, int) for id in tokens):
    raise UserError(f'{path}: expected an object with the id of each token')
  files = [os.path.join(folder, name) for name in ('source.spm', 'target.spm')]
  for file in files:
    _open_tokenizer('sentencepiece', file)
  return _PretrainedTokenizer('sentencepiece', files, tokens)


def _t5(folder: str, size: int, settings: Mapping[str, Any]) -> _PretrainedTokenizer:
  path = os.path.join(folder, 'spiece.model')
  pieces = _open_tokenizer('sentencepiece', path).tokens
  extra = [f'<extra_id_{i}>' for i in reversed(range(settings.get('extra_ids', 100)))]
  return _PretrainedTokenizer('sentencepiece', [path, path], dict(enumerate([*pieces, *extra])), hidden=extra)


def _mbart(folder: str, size: int, settings: Mapping[str, Any]) -> _PretrainedTokenizer:
  path = os.path.join(folder, 'sentencepiece.bpe.model')
  pieces = _open_tokenizer('sentencepiece', path).tokens
  num_codes = size - len(pieces) - 2
  if num_codes not in (25, 52):
    raise UserError(
      f'{folder}: vocab_size is {size}, expected the {len(pieces)} pieces of sentencepiece.bpe.model with 25 or 52 '
      'language codes and 2 other tokens'
    )
  special = ['<s>', '<pad>', '</s>', '<unk>']
  added = [*_MBART_CODES.split()[:num_codes], '<mask>']
  tokens = dict(enumerate([*special, *pieces[3:], *added]))
  return _PretrainedTokenizer('sentencepiece', [path, path], tokens, hidden=[*special, *added])


def _tokenizer_json(**options: Any) -> Callable[..., _PretrainedTokenizer]:
  def read(folder: str, size: int, settings: Mapping[str, Any]) -> _PretrainedTokenizer:
    path = os.path.join(folder, 'tokenizer.json')
    tokenizer = _open_tokenizer('tokenizer', path)
    return _PretrainedTokenizer('tokenizer', [path, path], tokenizer.tokens_by_id, hidden=tokenizer.hidden, **options)

  return read


def _decoder_start(folder: str, config: Mapping[str, Any], size: int) -> int:
  """The id that starts the output of the decoder, which newer versions of transformers store in another file."""
  generation = read_json(os.path.join(folder, 'generation_config.json'), is_optional=True)
  name = 'decoder_start_token_id'
  start = generation.get(name) if config.get(name) is None else config[name]
  if not isinstance(start, int) or start not in range(size):
    raise UserError(
      f'{os.path.join(folder, "config.json")}: {name} must be a whole number from 0 to {size - 1}, got {start!r}'
    )
  return start


_PRETRAINED: Mapping[str, Callable[[str, int, Mapping[str, Any]], _PretrainedTokenizer]] = {
  'bart': _tokenizer_json(prefix='<s>', cleans=False),
  'bert': _tokenizer_json(special=('[PAD]', '[SEP]', '[UNK]'), prefix='[CLS]', start='[CLS]'),
  'marian': _marian,
  'mbart': _mbart,
  't5': _t5,
}
# In the order of their ids: the first 25 of mBART, all 52 of mBART-50.
_MBART_CODES = (
  'ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX '
  'ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN '
  'pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI'
)


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
    is_read: whether it is read from a file, the same for both sides, in place of training.
  """

  train: Callable[..., Vocabulary]
  restore: Callable[[bytes], Vocabulary]
  suffix: str
  is_read: bool = False

  @property
  def origin(self) -> str:
    """What `train` makes it from, for the report of a run."""
    return 'read from its file' if self.is_read else 'made from the training split'


def _restore_listed(kind: str) -> Callable[[bytes], ListedVocabulary]:
  return lambda data: ListedVocabulary(kind, _parse_stored(kind, data)['tokens'])


def _restore_pretrained(kind: str) -> Callable[[bytes], PretrainedVocabulary]:
  def restore(data: bytes) -> PretrainedVocabulary:
    content = _parse_stored(kind, data)
    return PretrainedVocabulary(**(content | {'file': base64.b64decode(content['file'])}))

  return restore


def _parse_stored(kind: str, data: bytes) -> dict[str, Any]:
  content = json.loads(data)
  tokens = content['tokens']
  if content['kind'] != kind:
    raise ValueError(f'it is of kind {content["kind"]!r}')
  if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
    raise TypeError('its tokens are not a list of strings')
  if len(set(tokens)) < len(tokens):
    raise ValueError('it contains a token twice')
  return content


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
  'sentencepiece': VocabularyKind(
    sentencepiece_file, _restore_pretrained('sentencepiece'), 'sentencepiece.json', is_read=True
  ),
  'tokenizer': VocabularyKind(tokenizer_file, _restore_pretrained('tokenizer'), 'tokenizer.json', is_read=True),
}


def parse_kind(spec: str) -> str:
  """Returns the kind of a spec: `word(min_count=2)` -> `word`.

  Raises:
    UserError: for anything but a spec of VOCABULARIES.
  """
  return _bind(spec)[0]


def train(spec: str, lines: Iterable[str]) -> Vocabulary:
  """Returns the vocabulary `spec`, trained on the lines of the training split or read from its file.

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
  except UserError:
    raise
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
  return (train(spec, lines), VOCABULARIES[parse_kind(spec)].origin) if stored is None else (stored, 'stored')


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
