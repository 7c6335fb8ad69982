"""Writers of a run's metrics: the progress line, metrics.jsonl and TensorBoard event files.

A writer is called with (step, record), where the record maps names such as 'train/loss' and 'validation/bleu' to
numbers or strings, and is closed once.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

from attention_jax.atomic import null_as_nan, to_json, write_all, write_bytes
from attention_jax.errors import UserError, report_write_errors

Record = Mapping[str, Any]
METRICS_FILE = 'metrics.jsonl'
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
  """Writer that appends one JSON object per record to `metrics.jsonl`, each in one write; null is NaN or infinite.

  Records of steps after `start` are removed first: a run that is killed and resumed repeats these steps.

  Args:
    folder: the run folder.
    start: the step that the run starts from.
    awaits_evaluation: whether the evaluation of that step is made again, and its record removed.

  Raises:
    UserError: if the file cannot be written, and when it is opened, if it cannot be read or parsed.
  """

  def __init__(self, folder: Path, start: int, awaits_evaluation: bool = False):
    path = folder / METRICS_FILE
    with report_write_errors(path):
      _remove_later_records(path, start, awaits_evaluation)
      self._file = open(path, 'ab', buffering=0)  # noqa: SIM115 - closed by close()

  def __call__(self, step: int, record: Record) -> None:
    with report_write_errors(self._file.name):
      write_all(self._file, (to_json({'step': step, **record}, ensure_ascii=False) + '\n').encode())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _remove_later_records(path: Path, start: int, awaits_evaluation: bool) -> None:
  """Keeps the records before the next one; an unfinished last line of a killed run belongs to a later step."""

  def is_earlier(record: Record) -> bool:
    is_repeated = awaits_evaluation and any(name.startswith(EVALUATION_PREFIX) for name in record)
    return record['step'] < start + (not is_repeated)

  content = _read(path)
  whole_lines = content[: content.rfind(b'\n') + 1]
  lines = whole_lines.splitlines(keepends=True)
  records = _parse(path, whole_lines)
  earlier = b''.join(line for line, record in zip(lines, records, strict=True) if is_earlier(record))
  if earlier != content:
    write_bytes(path, earlier)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
  """Reads `metrics.jsonl`.

  Args:
    folder: the run folder.

  Returns:
    One record per step, in the order of the steps; none if there is no file. Lines of the same step are merged: those
    of training and of evaluation.

  Raises:
    UserError: if the file cannot be read or parsed.
  """
  path = Path(folder) / METRICS_FILE
  steps: dict[int, dict[str, Any]] = {}
  for record in _parse(path, _read(path)):
    steps[record['step']] = steps.get(record['step'], {}) | record
  return [steps[step] for step in sorted(steps)]


def _read(path: Path) -> bytes:
  """The content of the file; empty if there is none. Raises UserError if it cannot be read."""
  try:
    return path.read_bytes()
  except FileNotFoundError:
    return b''
  except OSError as error:
    raise UserError(f'cannot read {path}: {error.strerror}; expected the metrics of a run') from error


def _parse(path: Path, content: bytes) -> list[dict[str, Any]]:
  """The record of each line. Raises UserError for a line without one."""
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
  """Writer of event files in `tensorboard/`, which opens them at the first record.

  Args:
    folder: the run folder.
    start: the step that the run starts from; later points, of an interrupted run, are hidden.
  """

  def __init__(self, folder: Path, start: int):
    self._folder = folder
    self._start = start
    self._writer = None

  def __call__(self, step: int, record: Record) -> None:
    if self._writer is None:
      summary_writer = _import_summary_writer()
      self._writer = summary_writer(str(self._folder / 'tensorboard'), purge_step=self._start + 1)
    for name, value in record.items():
      if isinstance(value, (int, float)):
        self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    """Closes the event files."""
    if self._writer:
      self._writer.close()


def _import_summary_writer() -> Callable[..., Any]:
  """tensorboardX.SummaryWriter without the packages that tensorboardX loads where they are installed, for seconds.

  None of them is needed here: torch is for its tensors, the others for logs on S3 and on Google Cloud.
  """
  hidden = [name for name in ('torch', 'boto3', 'google.cloud.storage') if name not in sys.modules]
  sys.modules.update(dict.fromkeys(hidden))  # an entry of None makes the import of that name fail
  try:
    from tensorboardX import SummaryWriter
  finally:
    for name in hidden:
      del sys.modules[name]
  return SummaryWriter


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
    self._console = rich.console.Console(highlight=False)
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
