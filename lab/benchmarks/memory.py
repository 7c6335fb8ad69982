"""Memory of training: the peak resident size of a process that makes updates and nothing else.

`python -m lab.benchmarks.memory SIDE NAME LONGEST` is such a process: SIDE of SIDES trains NAME of
systems.MODELS on sentences of at most LONGEST tokens. It prints JSON with two peak resident sizes in bytes: `imports`,
after the imports, which are the same for all sides, and `peak`, at the end.
"""

import json
import re
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np

from lab.benchmarks import peers
from lab.benchmarks.measure import BenchmarkContext, Timing, run_module
from lab.benchmarks.systems import (
  BATCH_SIZE,
  MODELS,
  TRAINING_CASES,
  jax_update,
  make_batch,
  torch_update,
  update_array_bytes,
)

UPDATES = 3
TORCH_CASES = [(name, longest) for name, longest in TRAINING_CASES if MODELS[name][2]]
# Nearly the last bucket of configs/multi30k.py, (44, 48), which determines the memory of a run.
LONGEST_CASE = ('bahdanau2015_deep_tanh', 44)


def training_memory(bench: BenchmarkContext) -> list[Timing]:
  """Measures the peak memory and the seconds of processes that make UPDATES updates of Adam.

  The cases are those of systems.TRAINING_CASES that PyTorch has too, and LONGEST_CASE.
  """
  if not peers.is_available() or jax.default_backend() != 'cpu' or bench.dtype != 'float32':
    backend = jax.default_backend()
    bench.log(
      f'memory is left out: expected PyTorch, float32 and a CPU, got {peers.VERSION}, {bench.dtype} and a {backend}'
    )
    return []
  timings = []
  for name, longest in (*TORCH_CASES, LONGEST_CASE):
    case = f'{name}, {BATCH_SIZE} x {longest} -> {longest}, a process of {UPDATES} updates'
    bench.log(f'memory of {case}')
    rounds = [{side: _run_process(side, name, longest) for side in SIDES} for _ in range(min(bench.repeats, 3))]
    arrays = update_array_bytes(name, make_batch(longest))
    notes = {'attention_jax': f'; the arrays of its update have {arrays / 1e6:.0f} MB'}
    first_median = np.median([results['attention_jax']['seconds'] for results in rounds])
    for side in SIDES:
      results = [round_results[side] for round_results in rounds]
      low, median, high = np.quantile([result['seconds'] for result in results], (0.25, 0.5, 0.75))
      imports = int(np.median([result['imports'] for result in results]))
      peak = int(np.median([result['peak'] for result in results]))
      note = f'peak resident size {peak / 1e6:.0f} MB, {imports / 1e6:.0f} of it imports' + notes.get(side, '')
      speed = first_median / median
      timings.append(Timing('memory', case, side, median, low, high, speed, memory=peak - imports, note=note))
  return timings


def _run_process(side: str, name: str, longest: int) -> dict[str, float]:
  """Returns 'imports' and 'peak' in bytes, and 'seconds'."""
  start = time.perf_counter()
  results = run_module('lab.benchmarks.memory', side, name, str(longest))
  return results | {'seconds': time.perf_counter() - start}


SIDES = {
  'attention_jax': jax_update,
  'torch': torch_update,
}


def peak_resident_bytes() -> int:
  """Returns the peak resident size of this process, bytes.

  On Linux getrusage would include the size of the parent process, so /proc is read instead.
  """
  status = Path('/proc/self/status')
  if status.exists():
    return 1024 * int(re.search(r'VmHWM:\s*(\d+) kB', status.read_text())[1])
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes


if __name__ == '__main__':
  imports = peak_resident_bytes()
  side, name, longest = sys.argv[1:]
  update = SIDES[side](name, make_batch(int(longest)))
  for _ in range(UPDATES):
    update.run_and_wait()
  print(json.dumps({'imports': imports, 'peak': peak_resident_bytes()}))
