"""Training whose embeddings start from word vectors in files: config.initial_vectors."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.data.files import iter_raw_lines
from attention_jax.data.word_vectors import EmbeddingText, read_word_vectors
from attention_jax.errors import UserError
from attention_jax.modules.weights import flatten_names
from attention_jax.systems.base import Config, Log, SupportsWordVectors, System
from attention_jax.systems.initial_run import INITIAL_FILE, read_stored_initial

TABLE = '.table.embedding'  # the array of a modules.embedding.Embedding


def embedding_tables(system: System, params: Any) -> dict[str, EmbeddingText]:
  """Returns the embedding tables of a system by the name of their module, source before target.

  Args:
    system: a system.
    params: the parameters of its model, or their shapes. A model that shares its embeddings has one table.

  Raises:
    UserError: if the model has no such table.
  """
  tables = system.embedding_tables() if isinstance(system, SupportsWordVectors) else {}
  names = flatten_names(params)
  in_model = {name: table for name, table in tables.items() if name + TABLE in names}
  if not in_model:
    raise UserError(
      f'the model of system {system.config["system"]!r} has no embeddings that can start from word vectors'
    )
  return in_model


def check_initial_vectors(config: Config, folder: Path) -> None:
  """Checks that the files of config.initial_vectors can be read, unless the field is empty.

  The files are not checked if the run folder has stored the vectors already.

  Args:
    config: the whole config of the run.
    folder: the run folder, which need not exist.

  Raises:
    UserError: for a file that cannot be read, and for a field that consists of commas and spaces, and names no file.
  """
  if not config['initial_vectors'] or (folder / INITIAL_FILE).exists():
    return
  paths = list(filter(None, _parse_paths(config)))
  if not paths:
    raise UserError(f'config.initial_vectors={config["initial_vectors"]!r} names no file; expected at least one')
  for path in paths:
    next(iter_raw_lines(path))


def read_initial_vectors(
  config: Config, system: System, folder: Path, params: Any, log: Log
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
  if not config['initial_vectors']:
    return None
  if stored := read_stored_initial(folder):
    return stored
  tables = embedding_tables(system, params)
  paths = _parse_paths(config)
  if len(paths) > len(tables):
    raise UserError(
      f'config.initial_vectors={config["initial_vectors"]!r} names {len(paths)} files; expected at most one '
      f'for each of {", ".join(tables)}'
    )
  arrays = {}
  for path, (name, table) in zip(paths, tables.items(), strict=False):
    if path:
      arrays[name + TABLE], num_known = read_word_vectors(path, table.vocabulary)
      log(f'{path}: vectors of {num_known} of {len(table.vocabulary)} tokens for {name}')
  return arrays


def _parse_paths(config: Config) -> list[str]:
  """The files of config.initial_vectors; '' for embeddings that start from random vectors."""
  paths = config['initial_vectors']
  return [paths] if os.path.exists(os.path.expanduser(paths)) else [path.strip() for path in paths.split(',')]
