"""Writers of a run's metrics: the progress line, JSON lines, and the trackers of --trackers.

A record maps names such as 'train/loss', 'validation/bleu' and 'results/test/bleu' to numbers or strings.
"""

import contextlib
import csv
import importlib
import json
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.progress
from etils import epath
from flax.traverse_util import flatten_dict

from attention_jax.atomic import null_as_nan, to_json, write_bytes, write_text
from attention_jax.errors import UserError, choose, report_write_errors
from attention_jax.training.paths import absolute, is_in_bucket

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


class RunInfo(NamedTuple):
  """What a tracker is given of a run.

  Attributes:
    folder: the run folder.
    config: its config, plain JSON values.
    group: the name of a group of runs, such as a sweep; '' for none.
  """

  folder: epath.Path
  config: Mapping[str, Any] = {}
  group: str = ''

  @property
  def url(self) -> str:
    """The absolute path or the URL of the folder."""
    return str(absolute(self.folder))

  @property
  def name(self) -> str:
    """The last two parts of the folder: of a run of a sweep, the setting and the seed."""
    return '/'.join(self.url.split('/')[-2:])


class Writer:
  """Base class of writers. Its methods do nothing.

  A writer is opened by `fit`, and closed at its end. `experiment.train` opens it once more to write the results. A
  class in TRACKERS is called with a RunInfo.

  Attributes:
    takes_pictures: whether `picture` has an effect; pictures are drawn only then.
  """

  takes_pictures = False

  def open(self, start: int) -> None:
    """Begins to write a run, or continues with one: the records after step `start` are written, some of them again."""

  def begin_part(self, step: int) -> None:
    """Follows a checkpoint, from whose step the run may be resumed."""

  def write(self, step: int, record: Record) -> None:
    """Writes the record of an update, an evaluation or the results."""

  def picture(self, step: int, name: str, path: epath.Path) -> None:
    """Stores a picture of attention weights.

    Args:
      step: the last step of the run.
      name: a name such as 'attention/validation'.
      path: the file, a picture (.png) or a page (.html); it is removed afterwards.
    """

  def close(self) -> None:
    """Ends what `open` has begun."""


class JsonLines(Writer):
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

  def write(self, step: int, record: Record) -> None:
    if len(self._lines) == MAX_LINES:  # every record writes its part anew
      self.begin_part(step - 1)
    self._lines.append(to_json({'step': step, **record}, ensure_ascii=False) + '\n')
    with report_write_errors(self._path):
      self._folder.mkdir(exist_ok=True)
      write_text(self._path, ''.join(self._lines))


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


class TensorBoard(Writer):
  """Tracker that writes event files to `tensorboard/`, one for each part, see JsonLines, at their first record.

  In the files of a resumed run, the later points of the interrupted one are hidden.
  """

  def __init__(self, run: RunInfo):
    self._folder = run.folder
    self._writer = None

  def open(self, start: int) -> None:
    self._start = start

  def begin_part(self, step: int) -> None:
    """Ends the current file."""
    self.close()
    self._start = step

  def write(self, step: int, record: Record) -> None:
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


class Csv(Writer):
  """Tracker that writes `metrics.csv`, with a row (step, metric, value) for each value. Every start writes it anew."""

  def __init__(self, run: RunInfo):
    if is_in_bucket(run.folder):
      raise UserError(f'--trackers=csv: {run.folder} is in a bucket, whose files cannot be appended to')
    self._folder = run.folder

  def open(self, start: int) -> None:
    with report_write_errors(path := self._folder / 'metrics.csv'):
      self._file = open(path, 'w', newline='', encoding='utf-8')  # noqa: SIM115 - until `close`
    csv.writer(self._file).writerow(('step', 'metric', 'value'))
    for record in read_metrics(self._folder):
      self.write(record.pop('step'), record)

  def write(self, step: int, record: Record) -> None:
    csv.writer(self._file).writerows((step, name, value) for name, value in record.items())
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class WandB(Writer):
  """Tracker for Weights & Biases, set up by its own environment variables: WANDB_PROJECT, WANDB_MODE=offline.

  The step is a metric of its own, the horizontal axis. A resumed run repeats points, with equal values.
  """

  takes_pictures = True

  def __init__(self, run: RunInfo):
    self._info = run
    self._wandb = _import_package('wandb')

  def open(self, start: int) -> None:
    info = self._info
    with _report_errors('wandb'):
      self._run = self._wandb.init(
        id=_stored_id(info, 'wandb', lambda: secrets.token_hex(4)),
        resume='allow',
        reinit='create_new',  # the runs of several seeds are open at the same time
        name=info.name,
        group=info.group or None,
        config={**info.config, 'folder': info.url},
        settings=self._wandb.Settings(console='off'),
      )
      self._run.define_metric('*', step_metric='step')

  def write(self, step: int, record: Record) -> None:
    self._run.log({**record, 'step': step})

  def picture(self, step: int, name: str, path: epath.Path) -> None:
    kind = self._wandb.Html if path.suffix == '.html' else self._wandb.Image
    self.write(step, {name: kind(str(path))})

  def close(self) -> None:
    self._run.finish()


class MLflow(Writer):
  """Tracker for MLflow, set up by its own environment variables: MLFLOW_TRACKING_URI.

  A group of runs is an experiment. A resumed run repeats points, with equal values.
  """

  takes_pictures = True

  def __init__(self, run: RunInfo):
    self._info = run
    self._mlflow = _import_package('mlflow')

  def open(self, start: int) -> None:
    with _report_errors('mlflow'):
      self._client = self._mlflow.MlflowClient()
      self._id = _stored_id(self._info, 'mlflow', self._create_run)
      self._client.update_run(self._id, status='RUNNING')

  def _create_run(self) -> str:
    info = self._info
    experiment = self._mlflow.set_experiment(info.group or 'attention_jax')
    tags = {'folder': info.url}
    run_id = self._client.create_run(experiment.experiment_id, run_name=info.name, tags=tags).info.run_id
    for name, value in flatten_dict(dict(info.config), sep='.').items():
      self._client.log_param(run_id, name, value)
    return run_id

  def write(self, step: int, record: Record) -> None:
    now = int(time.time() * 1000)
    make_metric = self._mlflow.entities.Metric
    numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
    self._client.log_batch(self._id, metrics=[make_metric(name, value, now, step) for name, value in numbers.items()])

  def picture(self, step: int, name: str, path: epath.Path) -> None:
    self._client.log_artifact(self._id, str(path), name)

  def close(self) -> None:
    self._client.set_terminated(self._id)


def _import_package(name: str) -> Any:
  """Imports the package of a tracker. Raises UserError if it is not installed."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise UserError(f'--trackers={name} needs a package: pip install "attention_jax[{name}]"') from error


@contextlib.contextmanager
def _report_errors(name: str) -> Iterator[None]:
  """Turns an error of a tracker's package, such as of a missing account or server, into a UserError."""
  try:
    yield
  except Exception as error:  # packages raise errors of their own kinds
    raise UserError(f'--trackers={name}: {" ".join(str(error).split())}') from error


def _stored_id(run: RunInfo, name: str, make: Callable[[], str]) -> str:
  """Returns the id that a tracker has for a run, which is made at its first start and stored in its folder."""
  path = run.folder / f'{name}.id'
  if not path.exists():
    write_text(path, make())
  return path.read_text()


DEFAULT_TRACKERS = ('tensorboard',)
TRACKERS: dict[str, Callable[[RunInfo], Writer]] = {
  'csv': Csv,
  'mlflow': MLflow,
  'tensorboard': TensorBoard,
  'wandb': WandB,
}


def make_trackers(names: Sequence[str], run: RunInfo) -> list[Writer]:
  """Returns the trackers of a run.

  Args:
    names: keys of TRACKERS.
    run: the run.

  Raises:
    UserError: for an unknown name, a package that is not installed, and a folder that the tracker cannot write to.
  """
  return [TRACKERS[choose(name, TRACKERS, 'tracker')](run) for name in dict.fromkeys(names)]


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
