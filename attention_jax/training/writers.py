"""Where a run's numbers go: the progress line, metrics.jsonl and TensorBoard event files.

A writer is called with (step, record) where record maps names such as 'train/loss' and 'validation/bleu' to numbers,
and is closed once.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

Record = Mapping[str, Any]
METRICS = 'metrics.jsonl'
RATE = 'train/steps_per_second'

# What the progress line shows of training, and how it calls it, the most wanted first; the files have everything.
SHOWN = {
  'train/loss': 'loss',
  'train/accuracy': 'accuracy',
  'train/tokens_per_second': 'tokens/s',
  RATE: 'steps/s',
  'train/learning_rate': 'learning rate',
  'train/compilations': 'compiled shapes',
}


class JsonLines:
  """Appends one JSON object per record to `metrics.jsonl`, each in one write.

  A run that is killed and resumed repeats the steps since its last checkpoint, so a step can occur twice; only the
  times in such lines differ (on a machine whose arithmetic is deterministic). `read_metrics` takes the last.
  """

  def __init__(self, folder: Path):
    path = folder / METRICS
    _repair(path)
    self._file = open(path, 'ab', buffering=0)  # noqa: SIM115 - closed by close()

  def __call__(self, step: int, record: Record) -> None:
    self._file.write((json.dumps({'step': step, **record}, ensure_ascii=False) + '\n').encode())

  def close(self) -> None:
    self._file.close()


def _repair(path: Path) -> None:
  """Cuts off a last line that a kill left unfinished; its step comes after the last checkpoint and is done again."""
  if path.exists():
    whole = path.read_bytes().rfind(b'\n') + 1
    if whole < path.stat().st_size:
      os.truncate(path, whole)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
  """The records of a run, one per step in order, those of one step joined; where a step was repeated, the last."""
  steps: dict[int, dict[str, Any]] = {}
  for line in (Path(folder) / METRICS).read_text('utf-8').splitlines():
    record = json.loads(line)
    steps[record['step']] = steps.get(record['step'], {}) | record
  return [steps[step] for step in sorted(steps)]


class TensorBoard:
  """Event files in `tensorboard/`; points after `start`, left by an interrupted attempt, are hidden."""

  def __init__(self, folder: Path, start: int):
    import tensorboardX  # here: it is slow to load and only a training run needs it

    self._writer = tensorboardX.SummaryWriter(str(folder / 'tensorboard'), purge_step=start + 1)

  def __call__(self, step: int, record: Record) -> None:
    for name, value in record.items():
      if isinstance(value, (int, float)):
        self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class Progress:
  """The progress line: redrawn in place on a terminal, a line per record elsewhere and for evaluations."""

  def __init__(self, start: int, stop: int):
    self._stop = stop
    self._first: tuple[int, float] | None = None
    self._console = rich.console.Console(highlight=False)
    self._console.print(f'{"going on" if start else "starting"} at step {start} of {stop}')
    self._live = None
    if self._console.is_terminal:
      self._live = rich.progress.Progress(rich.progress.TextColumn('{task.description}'), console=self._console)
      self._task = self._live.add_task('compiling', total=None)
      self._live.start()

  def __call__(self, step: int, record: Record) -> None:
    training = RATE in record
    words = [f'step {step}/{self._stop}']
    if training:
      words.append(f'left {self._left(step)}')
    shown = SHOWN.items() if training else ((name, name) for name in record)
    line = '  '.join(words + [f'{label} {_number(record[name])}' for name, label in shown if name in record])
    if self._live and training:
      self._live.update(self._task, description=line)
    else:
      self._console.print(line, soft_wrap=True, markup=False)

  def close(self) -> None:
    if self._live:
      self._live.stop()

  def _left(self, step: int) -> str:
    """By the pace since the first line, so that evaluations count and the first compilation does not."""
    now = time.monotonic()
    self._first = self._first or (step, now)
    done, began = step - self._first[0], self._first[1]
    if not done and step < self._stop:
      return '?'
    minutes, seconds = divmod(round((self._stop - step) * (now - began) / max(done, 1)), 60)
    return f'{minutes // 60}:{minutes % 60:02d}:{seconds:02d}'


def _number(value: Any) -> str:
  if not isinstance(value, float):
    return str(value)
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
