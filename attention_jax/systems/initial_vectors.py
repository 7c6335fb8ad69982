"""Training whose embeddings start from word vectors in files: config.initial_vectors."""

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from attention_jax.data.files import iter_raw_lines, read_arrays
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import flatten_names
from attention_jax.systems.base import Log, SupportsWordVectors, System
from attention_jax.systems.config import RunConfig
from attention_jax.systems.initial_run import INITIAL_FILE, read_stored_initial
from attention_jax.tokens import SPECIAL_TOKENS

TABLE = '.table.embedding'  # the array of a modules.embedding.Embedding
SHOWN_CHARACTERS = 60  # of a wrong line, in its error message


def embedding_tables(system: System, params: Any) -> dict[str, Vocabulary]:
  """Returns the vocabulary of each embedding table of a system by the name of its module, source before target.

  Args:
    system: a system.
    params: the parameters of its model, or their shapes. A model that shares its embeddings has one table.

  Raises:
    UserError: if the model has no such table.
  """
  tables = system.embedding_tables() if isinstance(system, SupportsWordVectors) else {}
  names = flatten_names(params)
  in_model = {name: vocabulary for name, vocabulary in tables.items() if name + TABLE in names}
  if not in_model:
    raise UserError(f'the model of system {system.config.system!r} has no embeddings that can start from word vectors')
  return in_model


def check_initial_vectors(config: RunConfig, folder: epath.Path) -> None:
  """Checks that the files of config.initial_vectors can be read, unless the field is empty.

  The files are not checked if the run folder has stored the vectors already.

  Args:
    config: the whole config of the run.
    folder: the run folder, which need not exist.

  Raises:
    UserError: for a file that cannot be read, and for a field that consists of commas and spaces, and names no file.
  """
  if not config.initial_vectors or (folder / INITIAL_FILE).exists():
    return
  paths = list(filter(None, _parse_paths(config)))
  if not paths:
    raise UserError(f'config.initial_vectors={config.initial_vectors!r} names no file; expected at least one')
  for path in paths:
    next(iter_raw_lines(path))


def read_initial_vectors(
  config: RunConfig, system: System, folder: epath.Path, params: Any, log: Log
) -> Mapping[str, np.ndarray] | None:
  """Returns the embeddings that a run starts from: those stored in its folder, or those of config.initial_vectors.

  Args:
    config: the whole config of the run.
    system: the system of the run.
    folder: the run folder, which need not exist.
    params: the parameters of the model, or their shapes.
    log: called with the number of tokens of the vocabulary that each file contains.

  Returns:
    Arrays by the name of their parameters; None if config.initial_vectors is empty.

  Raises:
    UserError: as `read_stored_initial`, `embedding_tables` and `read_word_vectors`, and for more files than tables.
  """
  if not config.initial_vectors:
    return None
  if stored := read_stored_initial(folder):
    return stored
  tables = embedding_tables(system, params)
  paths = _parse_paths(config)
  if len(paths) > len(tables):
    raise UserError(
      f'config.initial_vectors={config.initial_vectors!r} names {len(paths)} files; expected at most one '
      f'for each of {", ".join(tables)}'
    )
  arrays = {}
  for path, (name, vocabulary) in zip(paths, tables.items(), strict=False):
    if path:
      arrays[name + TABLE], num_known = read_word_vectors(path, vocabulary)
      log(f'{path}: vectors of {num_known} of {len(vocabulary)} tokens for {name}')
  return arrays


def _parse_paths(config: RunConfig) -> list[str]:
  """The files of config.initial_vectors; '' for embeddings that start from random vectors."""
  paths = config.initial_vectors
  return [paths] if os.path.exists(os.path.expanduser(paths)) else [path.strip() for path in paths.split(',')]


def read_word_vectors(path: str, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
  """Reads the vectors of a vocabulary's tokens. If the file has a token more than once, the first vector is used.

  Args:
    path: an .npz file with the arrays tokens [N] and vectors [N, F]; or a text file, plain or .gz, as word2vec, GloVe
      and fastText write it: a token and F > 1 numbers per line, separated by single spaces. Its first line may have the
      numbers of tokens and of features instead.
    vocabulary: a vocabulary of V tokens.

  Returns:
    The vectors [V, F] float32, and the number of the vocabulary's tokens that the file contains. Special tokens, and
    tokens that it does not contain, have random vectors from a fixed seed: normally distributed, with mean 0 and the
    standard deviation of the numbers of the tokens that it contains.

  Raises:
    UserError: for a file that cannot be read or contains none of the tokens, and for the vector of one of the tokens if
      it does not have F finite numbers.
  """
  ids = {vocabulary.id_to_token(id): id for id in range(len(SPECIAL_TOKENS), len(vocabulary))}
  vectors = {}
  for token, vector in (_npz_vectors if path.endswith('.npz') else _text_vectors)(path, ids):
    if not np.all(np.abs(vector) <= np.finfo(np.float32).max):
      raise UserError(f'{path}: the vector of {token!r} must consist of finite numbers of float32')
    vectors.setdefault(ids[token], vector)
  if not vectors:
    raise UserError(
      f'{path}: has a vector for none of the {len(ids)} tokens of the vocabulary; expected lines of a token and its '
      'numbers, separated by single spaces, or an .npz file'
    )
  file_vectors = np.stack(list(vectors.values())).astype(np.float32)
  size = len(vocabulary), file_vectors.shape[1]
  table = np.random.default_rng(0).normal(0, file_vectors.std(), size).astype(np.float32)
  table[list(vectors)] = file_vectors
  return table, len(vectors)


def _npz_vectors(path: str, tokens: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tokens among `tokens` that an .npz file contains, and their vectors."""
  arrays = read_arrays(path)
  names, vectors = (arrays.get(name, np.zeros(())) for name in ('tokens', 'vectors'))
  if vectors.ndim != 2 or vectors.dtype.kind != 'f' or names.shape != vectors.shape[:1]:
    raise UserError(f'{path}: expected the arrays tokens [N] and vectors [N, F] of floating-point numbers')
  yield from ((token, vector) for token, vector in zip(names.tolist(), vectors, strict=True) if token in tokens)


def _text_vectors(path: str, tokens: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tokens among `tokens` that a text file contains, and their vectors."""
  features = 0
  for number, line in enumerate(iter_raw_lines(path), 1):
    text = line.decode(errors='surrogateescape').rstrip(' ')
    if number == 1 and text.count(' ') == 1:
      continue
    features = features or text.count(' ')
    token, *numbers = text.rsplit(' ', features)  # from the right, as a token may contain spaces
    if token in tokens:
      try:
        vector = np.array([float(number) for number in numbers])
      except ValueError:
        vector = np.zeros(0)
      if not len(vector) == features > 0:
        raise UserError(
          f'{path}:{number}: expected a token and {features} numbers, separated by single spaces, got '
          f'{text[:SHOWN_CHARACTERS]!r}'
        )
      yield token, vector
