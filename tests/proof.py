"""Digests of short training runs, by which two commits can be compared bit for bit on one machine.

  python -m tests.proof OUTPUT.json --data=FOLDER
  python -m tests.proof --compare A.json B.json

The first command trains each of RUNS in the current directory, the root of a checkout, and writes the SHA-256 digests
of the final parameters, of the metrics during training and of the results after it. FOLDER has the subfolders imdb,
with train.jsonl.gz and dev.jsonl.gz (configs/imdb.py), and mnist, with mnist.npz (configs/mnist.py). The second command
prints what differs and exits with status 1 if anything does. Only the command line, the configs and the run folders are
used: for a checkout without this file, `python PATH/tests/proof.py OUTPUT.json --data=FOLDER` is run in its root.
"""

import argparse
import collections
import concurrent.futures
import datetime
import gzip
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEPS = 60  # up to 3e70cfb9, runs of at most 50 steps are compiled with few optimisations
JOBS = 2  # runs at a time
COSTS = ('_per_second', 'seconds', 'compilations')  # ends of names of metrics that are no results
MONTHS = ('Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec')


class Run(NamedTuple):
  """A run.

  Attributes:
    config: file of configs/ and preset.
    fields: the fields of the config that differ, besides those of all runs.
    data: name of its data, a key of WRITERS; '' for data that the program generates.
  """

  config: str
  fields: Mapping[str, Any] = {}
  data: str = ''


def _dates(preset: str, **fields: Any) -> Run:
  """A run on the pairs of `write_dates`; fields with '__' for a dot."""
  fixed = {
    'data.task': "tsv(train='train.tsv', validation='dev.tsv', test='test.tsv', level='char')",
    'data.buckets': '((24, 11),)',
    'evaluation.beams': 1,
  }
  return Run(f'dates.py:{preset}', fixed | {name.replace('__', '.'): value for name, value in fields.items()}, 'dates')


RUNS = {  # the longest one is the first
  'shapes_hard': Run('shapes.py:xu2015_hard', {'evaluation.beams': 1}),
  'bahdanau': _dates('bahdanau2015_deep_tanh', evaluation__beams=3),
  'luong_two_seeds': _dates('luong2015_birnn_local_p', seeds=2),
  'transformer': _dates('transformer2017'),
  'gnmt_bfloat16': _dates('gnmt2016', model__dtype='bfloat16'),
  'convolutional': _dates('gehring2017'),
  'latent': _dates('wu2018_hard'),
  'mocha': _dates('chiu2018'),
  'reviews': Run('imdb.py:yang2016', {'data.buckets': '((32, 32),)'}, 'imdb'),
  'glimpses': Run('mnist.py:mnih2014', {'data.task': 'npz(validation=200)', 'evaluation.samples': 2}, 'mnist'),
  'recall': Run('recall.py:graves2014'),
}
FIELDS = {
  'training.steps': STEPS,
  'training.log_every': 10,
  'training.evaluate_every': 0,
  'training.checkpoint_every': 0,
  'data.batch_size': 8,
}


def write_dates(data: Path, folder: Path) -> None:
  """Writes pairs of a date in one of three notations and the date in ISO 8601, with the links of equal fields."""
  rng = random.Random(0)
  for split, rows in (('train', 400), ('dev', 40), ('test', 40)):
    lines = []
    for _ in range(rows):
      date = datetime.date.fromordinal(rng.randrange(700_000, 740_000))
      year, month, day = date.isoformat().split('-')
      fields = {'Y': year, 'm': month, 'd': day, 'B': MONTHS[date.month - 1]}
      source = ''
      links = []
      for part in rng.choice(('d.m.Y', 'B d, Y', 'Y/m/d')):
        start = {'Y': 0, 'm': 5, 'd': 8}.get(part)
        text = fields.get(part, part)
        if start is not None:
          links += [f'{len(source) + i}-{start + i}' for i in range(len(text))]
        source += text
      lines.append(f'{source}\t{date.isoformat()}\t{" ".join(links)}\n')
    (folder / f'{split}.tsv').write_text(''.join(lines), 'utf-8')


def write_reviews(data: Path, folder: Path) -> None:
  """Writes some of the reviews of each split."""
  for split, rows in (('train', 400), ('dev', 64)):
    name = f'{split}.jsonl.gz'
    with gzip.open(data / 'imdb' / name, 'rb') as file:
      lines = file.readlines()
    with gzip.open(folder / name, 'wb') as file:
      file.writelines(lines[:: len(lines) // rows][:rows])


def write_digits(data: Path, folder: Path) -> None:
  """Writes the first pictures of each split."""
  with np.load(data / 'mnist' / 'mnist.npz') as arrays:
    sizes = {name: 1200 if name.endswith('train') else 200 for name in arrays}
    np.savez(folder / 'mnist.npz', **{name: arrays[name][:size] for name, size in sizes.items()})


# Data of a Run -> writes it from the folder of --data into another one.
WRITERS: Mapping[str, Callable[[Path, Path], None]] = {
  'dates': write_dates,
  'imdb': write_reviews,
  'mnist': write_digits,
}


def train(run: Run, data: Path, workdir: Path) -> None:
  """Trains a run in a new process.

  Args:
    run: the run.
    data: the folder with a subfolder for each of WRITERS.
    workdir: its run folder.

  Raises:
    RuntimeError: with its output, if it fails.
  """
  fields = FIELDS | ({'data.folder': data / run.data} if run.data else {}) | run.fields
  command = [sys.executable, '-m', 'experiments.train', f'--config=configs/{run.config}', f'--workdir={workdir}']
  command += [f'--config.{name}={value}' for name, value in fields.items()]
  result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if result.returncode:
    raise RuntimeError(f'{" ".join(command)} exited with status {result.returncode}:\n{result.stdout}')


def digest_run(workdir: Path) -> dict[str, str]:
  """Returns the digests of a run folder, or of each of its seeds, by name."""
  digests = {}
  for folder in sorted(workdir.glob('seed_*')) or [workdir]:
    prefix = f'{folder.name}/' if folder != workdir else ''
    arrays = read_parameters(folder)
    digests[f'{prefix}params'] = _digest(*(part for path in arrays for part in (path.encode(), arrays[path])))
    digests |= {f'{prefix}params/{path}': _digest(array) for path, array in arrays.items()}
    digests |= {f'{prefix}{name}': _digest(repr(value).encode()) for name, value in read_values(folder).items()}
  return digests


def _digest(*parts: bytes | np.ndarray) -> str:
  digest = hashlib.sha256()
  for part in parts:
    if isinstance(part, np.ndarray):
      digest.update(f'{part.dtype} {part.shape}'.encode())
    digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
  return digest.hexdigest()


def read_parameters(folder: Path) -> dict[str, np.ndarray]:
  """Returns the parameters of the last checkpoint by path, sorted."""
  import jax
  import orbax.checkpoint as ocp

  last = max((folder / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  checkpointer = ocp.PyTreeCheckpointer()
  arrays = {}
  for item in sorted(path.parent for path in last.glob('*/_METADATA')):
    tree = ocp.PyTreeCheckpointHandler().metadata(item).tree
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    restored = checkpointer.restore(item, restore_args=restore_args)
    for path, array in jax.tree_util.tree_leaves_with_path(restored.get('params', {})):
      arrays['/'.join(str(key.key) for key in path)] = array
  if not arrays:
    raise RuntimeError(f'{last} has no parameters')
  return dict(sorted(arrays.items()))


def read_values(folder: Path) -> dict[str, Any]:
  """Returns [step, value] of each metric of training and validation, without COSTS, and each value of results.json."""
  values: dict[str, Any] = collections.defaultdict(list)
  files = sorted((folder / 'metrics').glob('*.jsonl')) or [folder / 'metrics.jsonl']  # of earlier commits
  for line in ''.join(path.read_text('utf-8') for path in files).splitlines():
    record = json.loads(line)
    for name, value in record.items():
      if name != 'step' and not name.endswith(COSTS):
        values[f'metrics/{name}'].append([record['step'], value])
  results = json.loads((folder / 'results.json').read_text('utf-8'))['results']
  for split, metrics in results.items():
    values |= {f'results/{split}/{name}': entry['value'] for name, entry in metrics.items()}
  return values


def write_digests(output: Path, data: Path) -> None:
  """Trains all runs and writes their digests.

  Args:
    output: the file.
    data: the folder of the data.
  """
  with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
    root = Path(temporary)
    for name, write in WRITERS.items():
      folder = root / 'data' / name
      folder.mkdir(parents=True)
      write(data, folder)

    def train_named(name: str) -> None:
      start = time.monotonic()
      train(RUNS[name], root / 'data', root / name)
      print(f'{name}: {time.monotonic() - start:.0f} s', flush=True)

    list(pool.map(train_named, RUNS))  # raises what a run raised
    digests = {name: digest_run(root / name) for name in RUNS}
  output.write_text(json.dumps(digests, indent=1) + '\n', 'utf-8')
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  print(f'written to {output}; CPU time of the runs: {usage.ru_utime + usage.ru_stime:.0f} s')


def differences(first: Path, second: Path) -> list[str]:
  """Returns a line for each digest that differs, or that only one of two files has."""
  a, b = (
    {
      f'{run}: {name}': digest
      for run, entry in json.loads(path.read_text('utf-8')).items()
      for name, digest in entry.items()
    }
    for path in (first, second)
  )
  lines = [f'{name} differs' for name in a if name in b and a[name] != b[name]]
  lines += [f'{name} is only in {first}' for name in a if name not in b]
  return lines + [f'{name} is only in {second}' for name in b if name not in a]


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes digests, or compares two files of them; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('output', nargs='?', type=Path, help='the file of digests to write')
  parser.add_argument('--data', type=Path, help='the folder of the data sets')
  parser.add_argument('--compare', nargs=2, type=Path, metavar=('A', 'B'), help='two files of digests')
  options = parser.parse_args(arguments)
  os.environ['JAX_PLATFORMS'] = 'cpu'  # of the runs, and of orbax in this process
  if options.compare:
    lines = differences(*options.compare)
    print('\n'.join(lines) or 'no differences')
    return 1 if lines else 0
  if options.output is None or options.data is None:
    parser.error('expected OUTPUT.json and --data=FOLDER, or --compare A.json B.json')
  write_digests(options.output, options.data)
  return 0


if __name__ == '__main__':
  sys.exit(main())
