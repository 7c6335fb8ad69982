"""Trains a tiny run of each SYSTEM in one of several processes, and records each file that the process writes.

  python -m tests.experiments.train_every_system OUTPUT PAIRS SYSTEM ...

PAIRS is the folder of a task of tables. The run of each system has a folder below OUTPUT. Without the variables of a
cluster in its environment, the process trains alone.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from attention_jax.systems import experiment
from attention_jax.systems.captioning import shapes
from attention_jax.systems.classification import entailment
from experiments.config_files import load_config

FEW_ROWS = {'train': 32, 'validation': 8, 'test': 8, 'unseen': 8}  # for tasks that are generated
TRAINING = {
  'training.steps': 2,
  'training.log_every': 1,
  'training.evaluate_every': 0,
  'training.checkpoint_every': 0,
  'training.optimizer': 'sgd',
  'training.schedule': 'constant(rate=1e-2)',
  'data.batch_size': 8,
  'evaluation.batch_size': 4,  # two batches of a split, one for each process
}
RECURRENT = {
  'model.encoder': 'birnn(features=4)',
  'model.embedding': 4,
  'model.dropout': 0.0,
  'model.attention.features': 4,
}
CONFIGS = {
  'translation': (
    'nettalk.py:bahdanau2015_deep_tanh',
    RECURRENT
    | {
      'data.task': "tsv(train='train.tsv', validation='dev.tsv', test='test.tsv')",
      'data.buckets': ((5, 5),),
      'model.decoder': 'bahdanau(features=4, readout=4)',
      'evaluation.beams': 1,
    },
  ),
  'classification': ('entailment.py:yang2016', RECURRENT),
  'captioning': (
    'shapes.py:xu2015_soft',
    RECURRENT
    | {
      'model.encoder': 'grid(features=4, halvings=4)',
      'model.decoder': 'bahdanau(rnn="gru", features=4, readout=4, gate=True)',
      'evaluation.beams': 1,
    },
  ),
  'glimpsing': (
    'digits.py:mnih2014',
    {
      'model.features': 8,
      'model.hidden': 4,
      'model.glimpses': 2,
      'model.samples': 1,
      'evaluation.samples': 1,
      'evaluation.batch_size': 128,
    },
  ),
  'recall': (
    'recall.py:graves2014',
    {
      'data.task': 'copy(bits=2, longest=3, beyond=5)',
      'model.cell': 'turing(features=4, slots=4, width=2)',
      'evaluation.batch_size': 128,
    },
  ),
}


class Write(NamedTuple):
  """A write of a file.

  Attributes:
    path: the file that was opened for writing, or replaced by a rename.
    source: the file that was renamed onto it; '' if it was opened.
  """

  path: str
  source: str = ''


def record_writes(folder: Path) -> list[Write]:
  """Returns a list to which every later write of Python code below `folder` is appended.

  Writes of native libraries, such as the arrays of checkpoints, are not recorded.
  """
  writes: list[Write] = []
  write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND

  def hook(event: str, args: tuple[Any, ...]) -> None:
    if event == 'os.rename':
      source, path = (Path(os.fsdecode(name)) for name in args[:2])
      if path.is_relative_to(folder):
        writes.append(Write(str(path), str(source)))
    elif event == 'open' and isinstance(args[0], str | bytes | os.PathLike):
      path = Path(os.fsdecode(args[0]))
      mode = args[1]
      flags = args[2]
      is_write = any(letter in mode for letter in 'wax+') if mode else (flags or 0) & write_flags
      if is_write and path.is_relative_to(folder):
        writes.append(Write(str(path)))

  sys.addaudithook(hook)
  return writes


def shrink_tasks(patch: pytest.MonkeyPatch) -> None:
  """Bounds the rows of generated tasks."""
  for builder in (entailment, shapes):
    patch.setattr(builder, 'SIZES', FEW_ROWS)


def configs(pairs: Path, systems: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields each of the systems with its config."""
  for system in systems:
    path, fields = CONFIGS[system]
    config = load_config(f'configs/{path}')
    if system == 'translation':
      config.data.folder = str(pairs)
    config.update_from_flattened_dict(TRAINING | fields)
    yield system, config.to_dict()


def main(output: Path, pairs: Path, *systems: str) -> None:
  shrink_tasks(pytest.MonkeyPatch())
  writes = record_writes(output)
  if 'SLURM_PROCID' in os.environ:
    jax.distributed.initialize()
  for system, config in configs(pairs, systems):
    start = len(writes)
    lines: list[str] = []
    results = experiment.train(config, output / system, lines.append)
    record = {
      'process': jax.process_index(),
      'results': {
        split: {name: result._asdict() for name, result in metrics.items()} for split, metrics in results.items()
      },
      'lines': lines,
      'writes': writes[start:],
    }
    (output / f'{system}.{jax.process_index()}.json').write_text(json.dumps(record), 'utf-8')


if __name__ == '__main__':
  main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
