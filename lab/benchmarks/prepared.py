"""Data sets on disk: the rate of preparation, the time from the command to the first batch, and the rate of reading.

`python -m lab.benchmarks.prepared STEP FIELDS START` runs one of STEPS in a process of its own. FIELDS are
fields of the config as JSON, and an argument of the step: `output`, a folder, or `batches`, a number. START is the
value of time.monotonic() when the command was started. The process prints its measurements as JSON, or the `error` of
a mistake in the data or the fields.
"""

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.data.pipeline import stream
from attention_jax.data.preparing import prepare
from attention_jax.data.text import read_parallel
from attention_jax.errors import UserError
from attention_jax.systems.config import RunConfig, parse_config
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.digests import compute_digests
from experiments.config_files import load_config
from lab.benchmarks.measure import BenchmarkContext, Timing, run_module
from lab.benchmarks.memory import peak_resident_bytes

CONFIG = 'configs/wmt14.py:transformer2017_base'
VOCABULARY = 'subword(size=8000, max_lines=200000)'
BATCHES = 500
LANGUAGES = ('en', 'de')


def prepared(bench: BenchmarkContext) -> Iterator[Timing]:
  """Prepares `bench.pairs` pairs made of Multi30k, and reads BATCHES batches of them, each time in a new process."""
  case = f'{bench.pairs:,} pairs'
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    bench.log(f'prepared: writing {case}')
    write_pairs(Path(bench.data_root, 'multi30k'), folder, bench.pairs)
    on_disk = folder / 'prepared'
    bench.log('prepared: preparation')
    files = tuple(f'train.{language}' for language in LANGUAGES)
    fields = {'data.task': f'text(train={files})', 'data.folder': str(folder), 'data.vocabulary': VOCABULARY}
    results = _run_process('prepare', fields | {'output': str(on_disk)})
    size = sum(path.stat().st_size for path in on_disk.iterdir())
    note = f'{results["cpu"]:.0f} s of CPU time, {size / 1e6:.0f} MB on disk, {_describe_peak(results)}'
    yield _timing(case, 'preparation, with the vocabulary', [results['seconds']], bench.pairs, 'pairs', note)
    bench.log('prepared: batches')
    fields = {'data.task': 'prepared', 'data.folder': str(on_disk), 'data.vocabulary': VOCABULARY}
    rounds = [_run_process('read', fields | {'batches': BATCHES}) for _ in range(min(bench.repeats, 3))]
  yield _timing(case, 'command to first batch', [results['first'] for results in rounds])
  tokens = rounds[0]['tokens']
  seconds = [results['seconds'] for results in rounds]
  note = f'{tokens / np.median(seconds):,.0f} target tokens/s, {_describe_peak(rounds[0])}'
  yield _timing(case, f'{BATCHES} batches', seconds, BATCHES, 'batches', note)


def write_pairs(source: Path, folder: Path, pairs: int) -> None:
  """Writes pairs that repeat those of Multi30k; about half are joined to a second, random pair.

  A word of each sentence is replaced by a random word of the language.

  Args:
    source: the folder with train.en and train.de.
    folder: where files of the same names are written.
    pairs: number of pairs.

  Raises:
    UserError: as `read_parallel` does.
  """
  rng = random.Random(0)
  corpus = read_parallel(*(str(source / f'train.{language}') for language in LANGUAGES))
  sides = [[line.split() for line in lines] for lines in (corpus.source, corpus.target)]
  words = [list(itertools.chain.from_iterable(side)) for side in sides]
  rows = len(sides[0])
  with (
    open(folder / f'train.{LANGUAGES[0]}', 'w', encoding='utf-8') as first,
    open(folder / f'train.{LANGUAGES[1]}', 'w', encoding='utf-8') as second,
  ):
    for pair in range(pairs):
      parts = [pair % rows, rng.randrange(rows)][: rng.randint(1, 2)]
      for side, all_words, file in zip(sides, words, (first, second), strict=True):
        sentence = [word for part in parts for word in side[part]]
        sentence[rng.randrange(len(sentence))] = rng.choice(all_words)
        file.write(' '.join(sentence) + '\n')


def _run_process(step: str, fields: Mapping[str, Any]) -> dict[str, float]:
  return run_module('lab.benchmarks.prepared', step, json.dumps(fields), str(time.monotonic()))


def _timing(case: str, side: str, seconds: list[float], amount: float = 0, unit: str = '', note: str = '') -> Timing:
  low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
  return Timing('prepared', case, side, median, low, high, 1.0, amount, unit, note=note)


def _describe_peak(results: Mapping[str, float]) -> str:
  return f'peak resident size {results["peak"] / 1e6:.0f} MB'


def _prepare(fields: dict[str, Any], start: float) -> dict[str, float]:
  """Prepares a data set as experiments/prepare.py does; returns the seconds since `start`, and those of CPU time."""
  output = fields.pop('output')
  prepare(_config(fields).data, output, lambda line: print(line, file=sys.stderr))
  return {'seconds': time.monotonic() - start, 'cpu': time.process_time()}


def _read(fields: dict[str, Any], start: float) -> dict[str, float]:
  """Reads batches as experiments/train.py does, without training.

  Returns:
    The seconds from `start` to the first batch, the seconds of all batches after it, and their target tokens.
  """
  count = fields.pop('batches')
  config = _config(fields)
  system = SYSTEMS[config.system].load(config, None)
  compute_digests(system.arrays)
  batches = stream(system.batches(config.training.seed), 0, count + 1)
  next(batches)
  first = time.monotonic()
  tokens = sum(int(batch.target_mask.sum()) for batch in batches)
  return {'first': first - start, 'seconds': time.monotonic() - first, 'tokens': tokens}


def _config(fields: Mapping[str, Any]) -> RunConfig:
  config = load_config(CONFIG)
  config.update_from_flattened_dict(fields)
  return parse_config(config)


STEPS = {'prepare': _prepare, 'read': _read}


if __name__ == '__main__':
  try:
    results = STEPS[sys.argv[1]](json.loads(sys.argv[2]), float(sys.argv[3]))
  except UserError as error:
    results = {'error': str(error)}
  print(json.dumps(results | {'peak': peak_resident_bytes()}))
