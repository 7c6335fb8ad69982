"""Uses peers.py and checkpoints in one of several processes, and prints the results.

With `seeds` it trains the runs of test_seeds.py instead.

python -m tests.training.agree FOLDER [seeds]
"""

import contextlib
import itertools
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention_jax.errors import UserError
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.config import Training
from attention_jax.training.interrupts import StopSignals
from attention_jax.training.peers import check_agreement, copy_from_first, exchange, fail_together, map_batches
from attention_jax.training.run import TrainedRun
from attention_jax.training.state import TrainState
from tests.training.test_seeds import fit_all


def report(name: str, use) -> None:
  """Prints the result or the UserError of a function."""
  try:
    print(f'{name}: {use()}')
  except UserError as error:
    print(f'{name}: UserError {error}')


def fail(message: str) -> None:
  with fail_together():
    if message:
      raise UserError(message)


def make_arrays(batch: int) -> dict[str, np.ndarray]:
  """Returns arrays of several dtypes and ranks, whose sizes depend on the batch."""
  return {
    'scalar': np.float32(batch / 3),
    'flags': np.arange(batch) > 1,
    'cube': np.full((batch, 2, 3), batch, np.int8),
  }


def use_peers(folder: Path) -> None:
  index = jax.process_index()
  report('exchange', lambda: exchange('größer' * index))
  report('nobody', lambda: fail(''))
  report('second', lambda: fail('no file' * index))
  report('both', lambda: fail('no config'))
  report('same', lambda: check_agreement({'a': '1', 'b': '2'}))
  report('different', lambda: check_agreement({'a': '1', 'b': str(index), 'c': str(index)}))
  report('absent', lambda: check_agreement({'a': 'x' * 100} if index else {}))
  computed = []
  for batch, outputs in map_batches(lambda i: computed.append(i) or make_arrays(i), range(5)):
    jax.tree.map(np.testing.assert_array_equal, outputs, make_arrays(batch))
    print(f'batch {batch}: {[array.dtype.name for array in jax.tree.leaves(outputs)]}')
  report('computed', lambda: computed)
  process_folder = folder / str(index)
  process_folder.mkdir()
  if index == 0:
    (process_folder / 'words').write_text('eins\nzwei\n')
    (process_folder / 'empty').touch()
  copy_from_first(process_folder)
  report('checkpoint', lambda: save_and_restore(folder))
  report('evaluated', lambda: evaluate(folder, 100 / 3 + index))
  report('signal', lambda: stop_while_starting(index))


def evaluate(folder: Path, value: float) -> float:
  """Returns the value by which both processes select, where `value` is that of this process."""
  run = TrainedRun(folder / 'evaluated', Training(select='exact_match'), '', 'max', print)
  run._checkpoints.save = lambda *arguments: None
  run.evaluate(
    1, TrainState(np.array(1, np.int32), {}, (), (), {}), lambda state, watch: {'exact_match': value}, StopSignals()
  )
  return run.best.value


def stop_while_starting(index: int) -> str:
  """Sends a signal to process 1 before the first update of a resumed run; returns the update at which it stops."""
  if index == 1:
    signal.raise_signal(signal.SIGTERM)
  time.sleep(2)  # until jax has reported the signal to both processes
  with StopSignals() as signals:
    for step in itertools.count(1001):
      if reason := signals.reason():
        return f'{reason} at step {step}'
      assert step < 1100, 'the signal was ignored'
      time.sleep(0.05)


def save_and_restore(folder: Path) -> list[float]:
  """Saves a state sharded over processes in one folder, and restores it; returns the values of this process."""
  layout = NamedSharding(Mesh(np.array(jax.devices()), 'x'), PartitionSpec('x'))
  values = np.arange(len(jax.devices()), dtype=np.float32)
  array = jax.make_array_from_callback(values.shape, layout, lambda index: values[index])
  state = TrainState(np.array(3, np.int32), {'kernel': array}, (), (), {})
  with contextlib.closing(Checkpoints(folder / 'saved')) as checkpoints:
    checkpoints.save(state, {'best': 1.5})
  with contextlib.closing(Checkpoints(folder / 'saved')) as checkpoints:
    restored, host = checkpoints.resume(lambda: state)
  assert host == {'best': 1.5} and int(restored.step) == 3
  return [float(shard.data[0]) for shard in restored.params['kernel'].addressable_shards]


if __name__ == '__main__':
  jax.distributed.initialize()
  folder, *parts = sys.argv[1:]
  if 'seeds' in parts:
    report('seeds', lambda: [r.reason for r in fit_all(Path(folder), steps=4, accumulate=1, average=0.0)])
  else:
    use_peers(Path(folder))
