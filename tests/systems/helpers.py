"""A tiny translation task, its config, and training without output."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from attention_jax.systems import experiment
from attention_jax.systems.config import default_config

LETTERS = 'abcdefg'


class TrainedRun(NamedTuple):
  """The folder of a run, what `experiment.train` returned, and the lines that it logged."""

  folder: Path
  results: Any
  lines: list[str]


def write_pairs(folder: Path) -> Path:
  """Writes train.tsv, validation.tsv and test.tsv, whose targets are their sources in reverse."""
  folder.mkdir(parents=True, exist_ok=True)
  for offset, (split, rows) in enumerate({'train': 16, 'validation': 5, 'test': 6}.items()):
    lines = []
    for row in range(rows):
      words = [LETTERS[(offset + row * (k + 1)) % len(LETTERS)] for k in range(1 + row % 4)]
      links = ' '.join(f'{k}-{len(words) - 1 - k}' for k in range(len(words)))
      lines.append(f'{" ".join(words)}\t{" ".join(reversed(words))}\t{links}\n')
    (folder / f'{split}.tsv').write_text(''.join(lines), 'utf-8')
  return folder


def tiny_config(folder: Path, **fields: Any) -> dict[str, Any]:
  """Returns the config of a model with four features on the task of `write_pairs`.

  Args:
    folder: the folder of the tables.
    **fields: further fields, with '__' for a dot: `training__steps=2`.
  """
  config = default_config()
  config.data.task = "tsv(train='train.tsv', validation='validation.tsv', test='test.tsv')"
  config.data.folder = str(folder)
  config.data.vocabulary = 'word'
  config.data.buckets = ((5, 5),)
  config.data.batch_size = 8
  config.model.encoder = 'birnn(features=4)'
  config.model.decoder = 'bahdanau(features=4, readout=4)'
  config.model.embedding = config.model.attention.features = 4
  config.training.steps = 4
  config.training.log_every = 1
  config.training.evaluate_every = config.training.checkpoint_every = 2
  config.training.schedule = 'constant(rate=1e-2)'
  config.evaluation.metrics = ('exact_match', 'token_error_rate')
  config.evaluation.beams = 2
  config.evaluation.batch_size = 8
  config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return config.to_dict()


@contextlib.contextmanager
def two_devices() -> Iterator[None]:
  """Restricts jax to two devices, which are enough for sharding; programs compile faster than for eight."""
  devices = jax.devices()[:2]
  with pytest.MonkeyPatch.context() as patch:
    for name in ('devices', 'local_devices'):
      patch.setattr(jax, name, lambda: devices)
    yield


def train_quietly(config: dict[str, Any], folder: Path, **options: Any) -> tuple[Any, list[str]]:
  """Trains on two devices without printing progress; returns the results and the logged lines."""
  lines = []
  with two_devices(), contextlib.redirect_stdout(io.StringIO()):
    results = experiment.train(config, folder, lines.append, **options)
  return results, lines


def read_tree(folder: Path) -> dict[str, bytes]:
  """Returns the content of every file below a folder, by relative path."""
  return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
