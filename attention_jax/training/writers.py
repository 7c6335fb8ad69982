"""Writers of a run's metrics: the progress line, JSON lines and TensorBoard event files.

A writer is called with (step, record), where the record maps names such as 'train/loss' and 'validation/bleu' to
numbers or strings, and is closed once.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import rich.console
import rich.progress
from etils import epath

from attention_jax.atomic import null_as_nan, to_json, write_bytes, write_text
from attention_jax.errors import UserError, report_write_errors

Record = Mapping[str, Any]
METRICS = 'metrics'  # folder of the JSON lines
MAX_LINES = 1000  # of a part
FIRST_REPORT = 15.0  # seconds without a record after which a line reports compilation, except on a terminal
RATE = 'train/steps_per_second'
EVALUATION_PREFIX = 'validation/'

# Training metrics on the progress line and their labels, the most important first; the files hold all metrics.
PROGRESS_LABELS = {
  'train/loss': 'loss',
  'train/accuracy': 'accuracy',
  'train/tokens_per_second': 'tokens/s',
  RATE: 'steps/s',
  'train/learning_rate': 'learning rate',
  'train/compilations': 'compiled shapes',
}


class JsonLines:
  """Writer of one JSON object per record, in which null is NaN or infinite, to the folder `metrics/`.

  Objects of a bucket cannot be appended. Records are therefore written in parts, each of which appears whole: a part
  begins at the start of the run and after each checkpoint, and is named by that step. A run that is killed and
  resumed from a checkpoint repeats the records of the parts that begin there or later, which are removed.

  Args:
    folder: the run folder.
    start: the step that the run starts from.

  Raises:
    UserError: if a part cannot be written or removed.
  """

  def __init__(self, folder: epath.Path, start: int):
    self._folder = folder / METRICS
    self.begin_part(start)
    with report_write_errors(self._folder):
      for path in _parts(folder):
        if path.name >= self._path.name:
          path.unlink()

  def begin_part(self, step: int) -> None:
    """Ends the current part at a step, from which the run may be resumed."""
    self._path = self._folder / f'{step:010d}.jsonl'
    self._lines: list[str] = []

  def __call__(self, step: int, record: Record) -> None:
    if len(self._lines) == MAX_LINES:  # every record writes its part anew
      self.begin_part(step - 1)
    self._lines.append(to_json({'step': step, **record}, ensure_ascii=False) + '\n')
    with report_write_errors(self._path):
      self._folder.mkdir(exist_ok=True)
      write_text(self._path, ''.join(self._lines))

  def close(self) -> None:
    """Does nothing: every record is in its file."""


def _parts(folder: epath.PathLike) -> list[epath.Path]:
  """The files of metrics of a run, in the order of their steps."""
  folder = epath.Path(folder) / METRICS
  try:
    return sorted(path for path in folder.iterdir() if path.name.endswith('.jsonl'))
  except FileNotFoundError:
    return []
  except OSError as error:
    raise UserError(f'cannot read {folder}: {error.strerror}; expected the metrics of a run') from error


def read_metrics(folder: epath.PathLike) -> list[dict[str, Any]]:
  """Reads the metrics of a run.

  Args:
    folder: the run folder.

  Returns:
    One record per step, in the order of the steps; none if there are no files. Lines of the same step are merged: those
    of training and of evaluation.

  Raises:
    UserError: if a file cannot be read or parsed.
  """
  steps: dict[int, dict[str, Any]] = {}
  for path in _parts(folder):
    for record in _parse(path):
      steps[record['step']] = steps.get(record['step'], {}) | record
  return [steps[step] for step in sorted(steps)]


def last_step(folder: epath.PathLike) -> int | None:
  """Returns the last step of the metrics of a run; None if there are none, or if they cannot be read."""
  try:
    return max(record['step'] for record in _parse(_parts(folder)[-1]))
  except (UserError, IndexError, ValueError):
    return None


def _parse(path: epath.Path) -> list[dict[str, Any]]:
  """The record of each line of a file. Raises UserError for a line without one."""
  try:
    content = path.read_bytes()
  except OSError as error:
    raise UserError(f'cannot read {path}: {error.strerror}; expected the metrics of a run') from error
  records = []
  for number, line in enumerate(content.splitlines(), 1):
    try:
      record = json.loads(line, object_hook=null_as_nan)
      record['step'] = int(record['step'])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
      raise UserError(
        f"{path}:{number}: not a record of metrics: expected a JSON object with an integer 'step', got "
        f'{line[:60].decode(errors="replace")!r}; restore the file, or move it away'
      ) from error
    records.append(record)
  return records


class TensorBoard:
  """Writer of event files in `tensorboard/`, one for each part, see JsonLines, which opens them at their first record.

  Args:
    folder: the run folder.
    start: the step that the run starts from; later points, of an interrupted run, are hidden.
  """

  def __init__(self, folder: epath.Path, start: int):
    self._folder = folder
    self._start = start
    self._writer = None

  def begin_part(self, step: int) -> None:
    """Ends the current file."""
    self.close()
    self._start = step

  def __call__(self, step: int, record: Record) -> None:
    if self._writer is None:
      options = {'purge_step': self._start + 1, 'filename_suffix': f'.{self._start}'}
      self._writer = _import_summary_writer()(str(self._folder / 'tensorboard'), **options)
    for name, value in record.items():
      if isinstance(value, (int, float)):
        self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    """Closes the event file."""
    if self._writer:
      self._writer.close()
      self._writer = None


def _import_summary_writer() -> Callable[..., Any]:
  """tensorboardX.SummaryWriter without the packages that tensorboardX loads where they are installed, for seconds.

  None of them is needed here: torch is for its tensors, the others for logs on S3 and on Google Cloud.
  """
  hidden = [name for name in ('torch', 'boto3', 'google.cloud.storage') if name not in sys.modules]
  sys.modules.update(dict.fromkeys(hidden))  # an entry of None makes the import of that name fail
  try:
    from tensorboardX import SummaryWriter, record_writer
  finally:
    for name in hidden:
      del sys.modules[name]
  record_writer.register_writer_factory('gs', _ObjectFactory)
  return SummaryWriter


class _Object:
  """An object of a bucket for tensorboardX, which every `flush` writes anew."""

  def __init__(self, path: str):
    self._path = path
    self._content = bytearray()

  def write(self, data: bytes) -> None:
    self._content += data

  def flush(self) -> None:
    write_bytes(self._path, bytes(self._content))

  def close(self) -> None:
    self.flush()


class _ObjectFactory:
  """Opens objects for tensorboardX."""

  open = _Object

  @staticmethod
  def directory_check(path: str) -> None:
    """Does nothing: folders of a bucket exist as soon as they have an object."""


class Progress:
  """Writer of the progress line: redrawn in place on a terminal; elsewhere, and for evaluations, a line per record.

  Args:
    start: the step that the run starts from.
    stop: the last step of the run.
    activity: returns what takes time besides updates, such as 'compiling shape 3 of 7', or ''.
  """

  def __init__(self, start: int, stop: int, activity: Callable[[], str] = lambda: ''):
    self._stop = stop
    self._activity = activity
    self._console = rich.console.Console(highlight=False, force_jupyter=False)  # plain lines in a notebook too
    self._console.print(f'{"resuming" if start else "starting"} at step {start} of {stop}')
    # The time left is extrapolated from the first record on: evaluations count, the first compilation does not.
    self._progress = rich.progress.Progress(
      rich.progress.TextColumn('{task.description}'),
      console=self._console,
      disable=not self._console.is_terminal,
      speed_estimate_period=math.inf,
    )
    self._task = self._progress.add_task('compiling', total=stop, completed=start)
    self._progress.start()
    self._first_record = threading.Event()
    report = self._show_waiting if self._console.is_terminal else self._report_waiting
    threading.Thread(target=report, daemon=True).start()

  def __call__(self, step: int, record: Record) -> None:
    self._first_record.set()
    is_training = RATE in record
    labels = PROGRESS_LABELS if is_training else {name: name for name in record}
    words = [f'step {step}/{self._stop}']
    if is_training:
      self._progress.update(self._task, completed=step)
      words.append(f'left {self._time_left()}')
    words += [f'{label} {_format(record[name])}' for name, label in labels.items() if name in record]
    if is_training and (activity := self._activity()):
      words.append(activity)
    line = '  '.join(words)
    if is_training and self._console.is_terminal:
      self._progress.update(self._task, description=line)
    else:
      self._console.print(line, soft_wrap=True, markup=False)

  def close(self) -> None:
    """Ends the live display."""
    self._first_record.set()
    self._progress.stop()

  def _report_waiting(self) -> None:
    """Prints the time without a first record, most of which is compilation, at intervals that double."""
    start = time.monotonic()
    interval = FIRST_REPORT
    while not self._first_record.wait(interval):
      seconds = time.monotonic() - start
      activity = self._activity() or 'compiling the update'
      self._console.print(f'{activity}, or making the first updates, for {seconds:.0f} s')
      interval *= 2

  def _show_waiting(self) -> None:
    """Shows on a terminal, until the first record, what is being compiled."""
    while not self._first_record.wait(1.0):
      self._progress.update(self._task, description=self._activity() or 'compiling')

  def _time_left(self) -> str:
    """The time left, such as '0:01:05'; '-:--:--' at the first record."""
    return rich.progress.TimeRemainingColumn().render(self._progress.tasks[self._task]).plain


def _format(value: Any) -> str:
  if not isinstance(value, float):
    return str(value)
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
