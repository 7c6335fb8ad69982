"""Where the time of an update goes: traces updates of a config, and sums the time of its operations by module.

The compiler names each operation after the modules and the operation of jax that it was made from. An operation that
was fused from several has the name of the last one.
"""

import dataclasses
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from attention_jax.data.pipeline import epoch_steps
from attention_jax.errors import UserError
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.costs import flop_counter
from attention_jax.systems.experiment import check_config
from attention_jax.systems.loading import load_once
from attention_jax.training.config import Training
from attention_jax.training.seeds import prepare_training

FORWARD, BACKWARD, OPTIMIZER = 'forward', 'backward', 'optimiser'
LOSS = 'loss'  # operations outside of all modules
UNNAMED = 'unnamed'  # operations that the compiler has added or renamed
MAX_STEPS = 1000  # at most, of which the most frequent shape is profiled

_NAMED = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', re.MULTILINE)
# Parts of a name that are neither a module nor an operation: transformations, control flow and local functions.
_NO_MODULE = re.compile(r'.*[(<]|(while|body|cond|closed_call|checkpoint|rematted_computation|scan|branch_\w+)$')


class Operation(NamedTuple):
  """What an instruction of a program was made from.

  Attributes:
    module: path of its module, such as ('encoder', 'layers_0', 'attention'); () outside of all modules.
    phase: FORWARD, BACKWARD, OPTIMIZER or UNNAMED.
    kind: the operation of jax, such as 'dot_general'.
  """

  module: tuple[str, ...]
  phase: str
  kind: str


@dataclasses.dataclass(frozen=True)
class UpdateProfile:
  """The time of an update and of its operations.

  Attributes:
    shape: the shape of the batch, as in `BatchSequence.shapes`.
    shape_names: what its numbers are.
    seconds: time of an update without the trace, the median.
    flop: FLOP of its matrix products, see costs.flop_counter.
    times: seconds of each operation in one traced update, summed over devices and threads.
  """

  shape: tuple[int, ...]
  shape_names: str
  seconds: float
  flop: float
  times: Mapping[Operation, float]

  def by_module(self, depth: int) -> dict[str, dict[str, float]]:
    """Returns module -> phase -> seconds, the slowest module first.

    Args:
      depth: number of names of a path after which deeper modules are counted as one.
    """
    table: dict[str, dict[str, float]] = {}
    for operation, seconds in self.times.items():
      outside = operation.phase if operation.phase in (OPTIMIZER, UNNAMED) else LOSS
      name = '.'.join(operation.module[:depth]) or outside
      row = table.setdefault(name, {})
      row[operation.phase] = row.get(operation.phase, 0.0) + seconds
    return dict(sorted(table.items(), key=lambda item: -sum(item[1].values())))

  def by_kind(self) -> dict[str, float]:
    """Returns operation of jax -> seconds, the slowest first."""
    kinds: Counter[str] = Counter()
    for operation, seconds in self.times.items():
      kinds[operation.kind] += seconds
    return dict(kinds.most_common())


def profile_update(config: Mapping[str, Any], updates: int, folder: Path | None = None) -> UpdateProfile:
  """Trains on a batch of the most frequent shape, first without and then with a trace.

  Args:
    config: the config of a run.
    updates: number of updates that are timed, and then of those that are traced.
    folder: where the trace is stored, for Perfetto and XProf; None keeps none.

  Raises:
    UserError: for mistakes in the config or its data, for several seeds or processes, and if the backend does not
      trace operations.
  """
  config = fill_defaults(config, 'the config')
  check_config(config)
  if config['seeds'] != 1 or jax.process_count() != 1:
    raise UserError(
      f'a profile is that of one run in one process, got config.seeds={config["seeds"]} and {jax.process_count()} '
      'processes'
    )
  system = load_once(config, None)
  training = Training(**config['training'])
  batches = system.batches(training.seed)
  shape, batch = _most_frequent(batches)
  step, initial = prepare_training(training, system.loss, system.initializer(), system.training_mesh, training.seed)
  gradients, optimizer = step.compile_for(initial.shapes, batch)
  operations = _operations(gradients.as_text()) | _operations(optimizer.as_text(), is_optimizer=True)
  state = initial()

  def update():
    nonlocal state
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start

  update()  # allocates memory
  seconds = statistics.median(update() for _ in range(updates))
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as temporary:
    traced = folder or Path(temporary)
    with jax.profiler.trace(str(traced), create_perfetto_trace=bool(folder), profiler_options=options):
      for _ in range(updates):
        update()
    times = _sum_times(traced, operations)
  if not times:
    raise UserError(f'jax does not trace the operations of the backend {jax.default_backend()}')
  times = {operation: total / updates for operation, total in times.items()}
  return UpdateProfile(shape, batches.shape_names, seconds, flop_counter(system)(batch), times)


def _most_frequent(batches: Any) -> tuple[tuple[int, ...], Any]:
  """Returns the most frequent shape of the first steps, at most an epoch, and the first batch that has it."""
  shapes = [batches.shape(step) for step in range(min(epoch_steps(batches, MAX_STEPS), MAX_STEPS))]
  ((shape, _),) = Counter(shapes).most_common(1)
  return shape, batches[shapes.index(shape)]


def _operations(text: str, is_optimizer: bool = False) -> dict[tuple[str, str], Operation]:
  """Returns (name of the program, name of an instruction) -> its operation, from the text of a compiled program."""
  program = re.match(r'HloModule ([\w.\-]+)', text)[1]
  return {(program, name): parse_operation(path, is_optimizer) for name, path in _NAMED.findall(text)}


def parse_operation(name: str, is_optimizer: bool = False) -> Operation:
  """Returns the operation that a name of the compiler states.

  Args:
    name: 'jit(f)/transpose(jvp(Model))/encoder/encoder.run_layer/layers_0/while/body/dot_general'.
    is_optimizer: whether it is of the program of the optimiser, whose operations have no module.
  """
  *parts, kind = name.split('/')
  kind = re.sub(r'.*\(|\)', '', kind)
  if is_optimizer:
    return Operation((), OPTIMIZER, kind)
  modules: list[str] = []
  for part in parts:
    module = part.partition('.')[0]  # the scope of a method is 'module.method'
    if not _NO_MODULE.match(part) and modules[-1:] != [module]:
      modules.append(module)
  return Operation(tuple(modules), BACKWARD if 'transpose(' in name else FORWARD, kind)


def _sum_times(folder: Path, operations: Mapping[tuple[str, str], Operation]) -> Counter[Operation]:
  """Returns the seconds of each operation in the trace of a folder."""
  times: Counter[Operation] = Counter()
  for path in folder.rglob('*.xplane.pb'):
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      for line in plane.lines:
        for key, seconds in _own_times(line):
          times[operations.get(key) or Operation((), UNNAMED, re.sub(r'[.\d]+$', '', key[1]))] += seconds
  return times


def _own_times(line: Any) -> Iterator[tuple[tuple[str, str], float]]:
  """Yields the (program, instruction) of each event of a thread, and its seconds without those of events inside."""
  events = []
  for event in line.events:
    stats = dict(event.stats)
    if 'hlo_op' in stats:
      events.append((event.start_ns, -event.duration_ns, (stats.get('hlo_module', ''), stats['hlo_op'])))
  open_events: list[list[Any]] = []  # [end, own nanoseconds, key] of the events around the next one
  for start, negative, key in sorted(events):
    while open_events and open_events[-1][0] <= start:
      _, own, closed = open_events.pop()
      yield closed, own * 1e-9
    if open_events:
      open_events[-1][1] += negative
    open_events.append([start - negative, -negative, key])
  for _, own, key in open_events:
    yield key, own * 1e-9
