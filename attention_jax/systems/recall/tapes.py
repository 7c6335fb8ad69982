"""Pictures of an external memory: inputs, targets and outputs of an episode, and where its heads wrote and read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.analysis import picture_page
from attention_jax.analysis.picture_files import select_by_suffix
from attention_jax.atomic import write_atomic
from attention_jax.errors import report_write_errors

MIN_WEIGHT = 0.3  # all slots whose weight reaches this at some step are drawn
COLOURS = ('#1c7ed6', 'white', 'black')  # of negative values, of 0, and of positive values
LINE_COLOUR = '#e8590c'  # of the line before the answer


class MemoryTape(NamedTuple):
  """One episode of T steps.

  Attributes:
    inputs: [N, I], the inputs of the first N steps.
    targets: [A, O], the target bits of the last A steps.
    probabilities: [A, O], the predicted probability of each bit.
    heads: weights [T, H, S] of H heads over S slots, by the kind of heads; kinds with H = 0 are not drawn.
    answer_start: number of steps before the answer, T - A.
    title: heading of the episode's column in a picture, or the name of its example on a page.
  """

  inputs: np.ndarray
  targets: np.ndarray
  probabilities: np.ndarray
  heads: Mapping[str, np.ndarray]
  answer_start: int
  title: str = ''

  @property
  def num_steps(self) -> int:
    """Number of steps of the episode, T."""
    return self.answer_start + len(self.targets)


class Panel(NamedTuple):
  """A heat map of an episode: inputs, targets, predictions, or the weights of a head.

  Attributes:
    title: line above the panel.
    picture: [rows, steps].
    row_numbers: label of each row.
  """

  title: str
  picture: np.ndarray
  row_numbers: np.ndarray


def write(items: Sequence[MemoryTape], path: str | Path) -> None:
  """Writes a page with a slider over steps, or a picture.

  A picture has a column for each episode; steps run from left to right, as in Graves et al. 2014, figure 6.

  Raises:
    UserError: for a path that ends neither with .html nor with .png, or cannot be written.
  """
  write_items = select_by_suffix(path, {'.html': _write_page, '.png': _write_picture})
  with report_write_errors(path):
    write_items(items, path)


def _write_page(items: Sequence[MemoryTape], path: str | Path) -> None:
  picture_page.write_page(list(map(_to_example, items)), path, 'Memories: where the heads wrote and read at each step')


def _to_example(item: MemoryTape) -> picture_page.SteppedExample:
  """The example of a page: a table for each panel."""
  kinds = {'input': item.answer_start, 'answer': len(item.targets)}
  return picture_page.SteppedExample(
    name=item.title,
    steps=[f'{kind} {number + 1}' for kind, count in kinds.items() for number in range(count)],
    tables=[picture_page.StepTable(p.title, list(map(str, p.row_numbers)), p.picture) for p in _panels(item)],
  )


def _write_picture(items: Sequence[MemoryTape], path: str | Path) -> None:
  from matplotlib.figure import Figure

  columns = [_panels(item) for item in items]
  rows = max(map(len, columns))
  max_value = max(1.0, *(float(np.abs(panel.picture).max(initial=0)) for column in columns for panel in column))
  widths = [max(3.5, 0.09 * item.num_steps) for item in items]
  heights = [_row_height(columns, row) for row in range(rows)]
  figure = Figure(figsize=(sum(widths), sum(heights) + 0.35 * rows), layout='constrained')
  figure.get_layout_engine().set(wspace=0.05, hspace=0.03)
  ratios = {'width_ratios': widths, 'height_ratios': heights}
  grid = figure.subplots(rows, len(items), squeeze=False, gridspec_kw=ratios)
  for axes in grid.flat:
    axes.axis('off')
  for number, (item, column) in enumerate(zip(items, columns, strict=True)):
    for axes, panel in zip(grid[:, number], column, strict=False):
      _draw(axes, panel, item.answer_start, max_value)
    first_title = column[0].title
    title = f'{item.title}\n{first_title}' if item.title else first_title
    grid[0, number].set_title(title, fontsize=9, loc='left', parse_math=False)
  with write_atomic(path) as temporary:
    figure.savefig(temporary, format='png', dpi=110)


def _row_height(columns: Sequence[Sequence[Panel]], row: int) -> float:
  """Inches of a row of panels, by the largest picture in it."""
  return max(0.9, 0.09 * max(column[row].picture.shape[0] for column in columns if row < len(column)))


def _panels(item: MemoryTape) -> list[Panel]:
  """The panels of an episode, from top to bottom, with a column for each step."""

  def pad_before(x):
    return np.pad(x, ((item.answer_start, 0), (0, 0)))

  pictures = {
    'inputs': np.pad(item.inputs, ((0, item.num_steps - len(item.inputs)), (0, 0))).T,
    'targets': pad_before(item.targets).T,
    'predictions': pad_before(item.probabilities).T,
  }
  panels = [Panel(title, picture, np.arange(len(picture))) for title, picture in pictures.items()]
  for kind, weights in item.heads.items():
    num_heads = weights.shape[1]
    for head in range(num_heads):
      head_weights = weights[:, head].T
      slots = smallest_arc(head_weights.max(1) >= MIN_WEIGHT)
      suffix = f' of head {head + 1}' if num_heads > 1 else ''
      title = f'{kind} weights{suffix}, slots {slots[0]} to {slots[-1]}'
      panels.append(Panel(title, head_weights[slots], slots))
  return panels


def smallest_arc(used: np.ndarray) -> np.ndarray:
  """Returns the shortest run of slots of a ring that contains all used slots, or all slots if none is used.

  Args:
    used: bool [S].

  Returns:
    Slot numbers in the order of the ring.
  """
  size = len(used)
  used_slots = np.flatnonzero(used)
  if not len(used_slots):
    return np.arange(size)
  gaps = np.diff(used_slots, append=used_slots[0] + size)  # distance from each used slot to the next
  # The last of equal gaps, so that the run does not wrap around if it need not.
  widest = len(gaps) - 1 - int(gaps[::-1].argmax())
  first = used_slots[(widest + 1) % len(used_slots)]
  return (first + np.arange(size - gaps[widest] + 1)) % size


def _draw(axes, panel: Panel, answer_start: int, max_value: float) -> None:
  """Draws 0 white, `max_value` black and negative values blue, with a vertical line before the answer."""
  from matplotlib.colors import LinearSegmentedColormap
  from matplotlib.ticker import FuncFormatter, MaxNLocator

  rows = panel.row_numbers

  def format_row(y, _):
    return str(rows[round(y)]) if 0 <= y <= len(rows) - 1 else ''

  axes.axis('on')
  colours = LinearSegmentedColormap.from_list('signed', list(COLOURS))
  axes.imshow(panel.picture, cmap=colours, vmin=-max_value, vmax=max_value, aspect='auto', interpolation='nearest')
  axes.axvline(answer_start - 0.5, color=LINE_COLOUR, linewidth=0.8)
  axes.set_title(panel.title, fontsize=9, loc='left', parse_math=False)
  axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
  axes.yaxis.set_major_formatter(FuncFormatter(format_row))
  axes.tick_params(labelsize=7)
