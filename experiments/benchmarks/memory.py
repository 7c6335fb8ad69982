"""How much memory training takes: the greatest resident size of a process that makes updates and nothing else.

`python -m experiments.benchmarks.memory SIDE NAME LONGEST` is such a process. It prints two numbers of bytes: the
greatest resident size when everything is imported, which is the same for all sides, and that at its end.
"""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from experiments.benchmarks import peers
from experiments.benchmarks.measure import BenchmarkContext, Timing
from experiments.benchmarks.systems import (
  BATCH_SIZE,
  MODELS,
  TRAINING_CASES,
  build_model,
  jax_update,
  make_batch,
  torch_update,
)

UPDATES = 3
TRAINED_BY_BOTH = [(name, longest) for name, longest in TRAINING_CASES if MODELS[name][2]]
LONGEST = ('bahdanau2015', 44)  # the last bucket of configs/multi30k.py, by which a run needs what it needs


def training_memory(bench: BenchmarkContext) -> list[Timing]:
  """Updates of Adam, each in a new process, of every model of systems.TRAINING_CASES that PyTorch has too, and of LONGEST."""
  if not peers.torch or not bench.is_torch_comparable:
    bench.log(f'memory is left out: it is that of the host, in float32, beside PyTorch ({peers.VERSION})')
    return []
  timings = []
  for name, longest in (*TRAINED_BY_BOTH, LONGEST):
    case = f'{name}, {BATCH_SIZE} x {longest} -> {longest}, a process of {UPDATES} updates'
    bench.log(f'memory of {case}')
    rounds = [{side: _process(side, name, longest) for side in SIDES} for _ in range(min(bench.repeats, 3))]
    base = np.median([found['attention_jax']['seconds'] for found in rounds])
    for side in SIDES:
      low, median, high = np.quantile([found[side]['seconds'] for found in rounds], (0.25, 0.5, 0.75))
      imports, peak = (int(np.median([found[side][key] for found in rounds])) for key in ('imports', 'peak'))
      note = f'greatest resident size {peak / 1e6:.0f} MB, {imports / 1e6:.0f} of it imports'
      timings.append(Timing('memory', case, side, median, low, high, base / median, memory=peak - imports, note=note))
  return timings


def _process(side: str, name: str, longest: int) -> dict[str, float]:
  began = time.perf_counter()
  command = [sys.executable, '-m', 'experiments.benchmarks.memory', side, name, str(longest)]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return json.loads(done.stdout.splitlines()[-1]) | {'seconds': time.perf_counter() - began}


SIDES = {
  'attention_jax': lambda name, batch: jax_update(*build_model(name), batch),
  'torch': lambda name, batch: torch_update(name, batch),
}


def peak_resident_bytes() -> int:
  """The greatest resident size of this process so far, bytes.

  Not what getrusage says, where Linux tells it: that begins with the size of the process that started this one.
  """
  status = Path('/proc/self/status')
  if status.exists():
    return 1024 * int(re.search(r'VmHWM:\s*(\d+) kB', status.read_text())[1])
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes


if __name__ == '__main__':
  imports = peak_resident_bytes()
  update = SIDES[sys.argv[1]](sys.argv[2], make_batch(int(sys.argv[3])))
  for _ in range(UPDATES):
    update.run()
  print(json.dumps({'imports': imports, 'peak': peak_resident_bytes()}))
