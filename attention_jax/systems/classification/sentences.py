"""Splits texts into sentences of tokens by spaCy's rules for a language; results for large data are cached on disk."""

import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
from collections.abc import Sequence
from html import unescape
from typing import Any

from attention_jax.atomic import write_atomic
from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError

TAG = re.compile(r'<[^<>]*>')
MIN_CACHED_CHARACTERS = 1_000_000  # results of smaller data are not cached


def split(texts: Sequence[str], *, language: str = 'en', whole: bool = False, html: bool = False) -> list[list[str]]:
  """Returns the sentences of each text, in lower case, with single spaces between tokens. A blank text has none.

  Args:
    texts: the texts.
    language: a language code of spaCy, such as 'en'.
    whole: whether each text is kept as one sentence.
    html: whether texts contain tags and entities such as '<br />' and '&amp;'; tags end a word.

  Raises:
    UserError: for a language that spaCy does not support, or whose tokenizer needs a package that is not installed.
  """
  import spacy

  if sum(map(len, texts)) < MIN_CACHED_CHARACTERS:
    return _split(texts, language, whole, html)
  key = hashlib.sha256(json.dumps([spacy.__version__, language, whole, html]).encode())
  for text in texts:
    key.update(text.encode('utf-8', 'surrogatepass') + b'\0')
  path = os.path.join(cache_folder('sentences'), f'{key.hexdigest()[:32]}.json.gz')
  result = _load_cached(path)
  if result is None:
    result = _split(texts, language, whole, html)
    _store_cached(path, result)
  return result


@functools.cache  # documents are also split in chunks
def _pipeline(language: str, whole: bool) -> Any:
  import spacy

  try:
    spacy.util.get_lang_class(language)
  except ImportError as error:
    raise UserError(f'unknown language {language!r} of spaCy; expected a code such as en, de, fr or zh') from error
  try:
    pipeline = spacy.blank(language)
  except ImportError as error:
    raise UserError(f'language {language!r} of spaCy needs a package that is not installed: {error}') from error
  if not whole:
    pipeline.add_pipe('sentencizer')
  return pipeline


def _split(texts: Sequence[str], language: str, whole: bool, html: bool) -> list[list[str]]:
  pipeline = _pipeline(language, whole)
  pipeline.max_length = max(map(len, texts), default=0) + 1  # a limit for parsers, which are not used
  if html:
    texts = [unescape(TAG.sub(' ', text)) for text in texts]
  result = []
  for document in pipeline.pipe(texts, batch_size=256):
    sentences = [document] if whole else document.sents
    lines = (' '.join(token.lower_ for token in sentence if not token.is_space) for sentence in sentences)
    result.append([line for line in lines if line])
  return result


def _load_cached(path: str) -> list[list[str]] | None:
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as file:
      return json.load(file)
  except (OSError, EOFError, ValueError):  # missing or damaged
    return None


def _store_cached(path: str, result: list[list[str]]) -> None:
  with contextlib.suppress(OSError):  # without the cache, the texts are split again next time
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with write_atomic(path) as temporary, gzip.open(temporary, 'wt', encoding='utf-8', compresslevel=1) as file:
      json.dump(result, file, ensure_ascii=False)
