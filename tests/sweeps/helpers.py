"""Sweeps whose runs are made up: a training program without jax, and run folders with chosen results."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.sweeps.ledger import FINISHED, PLANNED, Ledger, Unit, open_ledger, planned_event
from attention_jax.sweeps.report import ReportOptions
from attention_jax.sweeps.resolve import Base, Resolved, resolve
from attention_jax.sweeps.space import Setting, grid
from attention_jax.systems.config import default_config, to_dict

FAKE_TRAIN = (sys.executable, str(Path(__file__).with_name('fake_train.py')))
PATH = 'configs/made_up.py:preset'

SETTINGS = grid(
  {'model.attention.score': ['dot', 'general'], 'model.attention.alignment': ['softmax', 'local_p(width=10)']}
)
NO_ROWS = ReportOptions(compares_rows=False)


def base_config(**fields: Any) -> dict[str, Any]:
  """Returns a translation config whose model is traced quickly; fields with '__' for a dot."""
  config = default_config()
  config.model.encoder = 'embedded'
  config.model.decoder = 'luong(rnn="simple", features=256)'
  config.training.steps = 100
  config.training.schedule = 'cosine(peak=1e-3)'
  config.training.select = 'exact_match'
  config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return config.to_dict()


def tiny_data(folder: Path) -> dict[str, Any]:
  """Returns fields of `base_config` with the data of `write_pairs`."""
  return {
    'data__task': "tsv(train='train.tsv', validation='validation.tsv', test='test.tsv')",
    'data__folder': str(folder),
    'data__vocabulary': 'word',
    'data__buckets': ((5, 5),),
  }


def make_base(**fields: Any) -> Base:
  """Returns a base whose presets all have the config of `base_config`."""
  return Base(PATH, {}, lambda path: base_config(**fields))


def write_run(folder: Path, config: Mapping[str, Any], results: Mapping[str, Mapping[str, float]], **more: Any) -> Path:
  """Writes the folder of a finished run.

  Args:
    folder: the folder.
    config: its config.
    results: split -> metric -> value.
    **more: further fields of results.json, and `curve`: values of validation/exact_match.
  """
  curve = more.pop('curve', [1.0, 2.0, 3.0])
  entries = {
    split: {name: {'value': value, 'unit': '%', 'signature': name} for name, value in metrics.items()}
    for split, metrics in results.items()
  }
  (folder / 'metrics').mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(config))
  record = {'step': 100, 'parameters': 1234, 'commit': 'abc', **more, 'results': entries}
  (folder / 'results.json').write_text(json.dumps(record))
  lines = []
  for i, value in enumerate(curve, 1):
    lines.append({'step': 10 * i, 'train/loss': 1 / i, 'train/steps_per_second': 5.0})
    lines.append({'step': 10 * i, 'validation/exact_match': value})
  (folder / 'metrics' / '0000000000.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  return folder


def make_sweep(folder: Path, settings: Sequence[Setting], seeds: int = 3, base: Base | None = None) -> list[Resolved]:
  """Writes a finished sweep with made-up results, which differ between settings and seeds."""
  base = base or make_base()
  resolved = [resolve(base, setting) for setting in settings]
  rng = np.random.default_rng(0)
  with open_ledger(folder) as ledger:
    for index, setting in enumerate(resolved):
      for seed in range(seeds):
        add_run(ledger, setting, seed, 80 + 4 * index + rng.normal(), 20 - index + rng.normal())
  return resolved


def add_run(ledger: Ledger, setting: Resolved, seed: int, exact_match: float, error_rate: float, **others: float):
  """Adds a finished run to a sweep; `others` are more of its metrics."""
  unit_folder = f'{setting.id}/seed_{seed}'
  unit = Unit(unit_folder, setting.id, dict(setting.setting), setting.path, setting.overrides, (seed,), unit_folder)
  training = dataclasses.replace(setting.config.training, seed=seed)
  config = to_dict(dataclasses.replace(setting.config, training=training))
  metrics = {'loss': 0.5, 'exact_match': exact_match, 'alignment_error_rate': error_rate, 'entropy': 1.0}
  curve = list(np.linspace(10, exact_match, 5))
  write_run(ledger.folder / unit_folder, config, {'test': metrics | others}, curve=curve)
  ledger.append(PLANNED, **planned_event(unit))
  ledger.append(FINISHED, unit=unit.id, seconds=12.0)
