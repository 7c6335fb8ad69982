"""Texts -> sentences of tokens, by the rules that spaCy has for a language; what was split is remembered on disk."""

import gzip
import hashlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from html import unescape

from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError

TAG = re.compile(r'<[^<>]*>')
LARGE = 1_000_000  # characters, from which on what was split is remembered


def split(texts: Sequence[str], *, language: str = 'en', whole: bool = False, html: bool = False) -> list[list[str]]:
  """For each text its sentences, in lower case, with single spaces between tokens. A blank text has none.

  Args:
    language: a code that spaCy has rules for, such as 'en'.
    whole: whether a text is left one sentence, whatever is in it.
    html: whether texts have tags and entities such as '<br />' and '&amp;'; tags end a word.

  Raises: UserError for a language that spaCy does not have.
  """
  import spacy

  options = [spacy.__version__, language, whole, html]
  if sum(map(len, texts)) < LARGE:
    return _split(texts, *options[1:])
  key = hashlib.sha256(json.dumps(options).encode())
  for text in texts:
    key.update(text.encode('utf-8', 'surrogatepass') + b'\0')
  path = os.path.join(cache_folder('sentences'), f'{key.hexdigest()[:32]}.json.gz')
  if (found := _stored(path)) is None:
    found = _split(texts, *options[1:])
    _store(path, found)
  return found


def _split(texts: Sequence[str], language: str, whole: bool, html: bool) -> list[list[str]]:
  import spacy

  try:
    pipeline = spacy.blank(language)
  except ImportError as error:
    raise UserError(f'spaCy has no language {language!r}; possible: a code such as en, de, fr or zh') from error
  pipeline.max_length = max(map(len, texts), default=0) + 1  # a limit for parsers, which are not used
  if not whole:
    pipeline.add_pipe('sentencizer')
  read = (lambda text: unescape(TAG.sub(' ', text))) if html else str
  found = []
  for document in pipeline.pipe(map(read, texts), batch_size=256):
    sentences = [document] if whole else document.sents
    lines = (' '.join(token.lower_ for token in sentence if not token.is_space) for sentence in sentences)
    found.append([line for line in lines if line])
  return found


def _stored(path: str) -> list[list[str]] | None:
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as file:
      return json.load(file)
  except (OSError, EOFError, ValueError):  # not there, or not whole: it is made again
    return None


def _store(path: str, found: list[list[str]]) -> None:
  partial = f'{path}.{uuid.uuid4().hex}.part'
  try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with gzip.open(partial, 'wt', encoding='utf-8', compresslevel=1) as file:
      json.dump(found, file, ensure_ascii=False)
    os.replace(partial, path)
  except OSError:
    pass  # nothing is lost but the time to do it again
