"""Results as a table for a terminal, and attention weights for JSON."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from attention_jax.decoding.metrics import MetricSummary, MetricValue

if TYPE_CHECKING:  # loads scipy, which only evaluate --by needs here
  from attention_jax.sweeps.bins import BinnedMetrics
  from attention_jax.sweeps.statistics import Interval


MAX_WIDTH = 1000  # characters of a table


def round_weights(weights: np.ndarray) -> list:
  """Returns an array as nested lists of numbers with six decimal places."""
  return weights.astype(float).round(6).tolist()


def print_results(results: Mapping[str, Mapping[str, MetricValue | MetricSummary]]) -> None:
  """Prints a row per metric and a column per split, and below them the full signatures of the metrics.

  Args:
    results: split -> metric -> value; a summary of several runs is printed as mean ± standard deviation.
  """
  table = Table('metric', box=box.SIMPLE_HEAD)
  for split in results:
    table.add_column(split, justify='right')
  table.add_column('unit')
  units = {name: result.unit for metrics in results.values() for name, result in metrics.items()}
  for name, unit in units.items():
    table.add_row(name, *(_format_value(metrics.get(name)) for metrics in results.values()), unit)
  console = _print_table(table)
  for signature, names in _names_by_signature(results, list(units)).items():
    console.print(f'  {", ".join(names)}: {signature}', soft_wrap=True)


def print_bins(bins: 'BinnedMetrics') -> None:
  """Prints a row per bin with each metric and its interval."""
  table = Table(bins.by, 'rows', *(f'{name} ({bins.units[name]})' for name in bins.metrics), box=box.SIMPLE_HEAD)
  for i, bin in enumerate(bins.bins):
    intervals = [values[i] for values in bins.metrics.values()]
    table.add_row(bin.name, str(len(bin.rows)), *map(_format_interval, intervals))
  _print_table(table)


def print_heads(error_rates: np.ndarray) -> None:
  """Prints alignment error rates [L, N] in percent, a row per layer and a column per head."""
  table = Table('', box=box.SIMPLE_HEAD)
  for head in range(error_rates.shape[1]):
    table.add_column(f'H{head}', justify='right')
  for layer, rates in enumerate(error_rates):
    table.add_row(f'L{layer}', *(f'{100 * rate:.2f}' for rate in rates))
  _print_table(table)


def _format_interval(interval: 'Interval') -> str:
  """'12.50 [10.00, 15.00]'; without ends that cannot be computed, as of one row, and '' if there is no value."""
  if math.isnan(interval.value):
    return ''
  ends = '' if math.isnan(interval.low) else f' [{interval.low:.2f}, {interval.high:.2f}]'
  return f'{interval.value:.2f}{ends}'


def _print_table(table: Table) -> Console:
  """Prints a table without wrapping its cells or cutting them off; returns the console."""
  console = Console(highlight=False, markup=False)
  whole = console.measure(table, options=console.options.update(width=MAX_WIDTH))
  console.width = max(console.width, whole.maximum)
  console.print(table)
  return console


def _names_by_signature(
  results: Mapping[str, Mapping[str, MetricValue | MetricSummary]],
  order: list[str],
) -> dict[str, list[str]]:
  """Returns the metrics that share each signature, in the order of the table."""
  names: dict[str, list[str]] = {}
  for metrics in results.values():
    for name, result in metrics.items():
      group = names.setdefault(result.signature, [])
      if name not in group:
        group.append(name)
  return {signature: sorted(group, key=order.index) for signature, group in names.items()}


def _format_value(result: MetricValue | MetricSummary | None) -> str:
  if result is None:
    return ''
  digits = 2 if result.unit in ('%', 'points') else 4
  has_deviation = isinstance(result, MetricSummary) and not math.isnan(result.deviation)
  spread = f' ± {result.deviation:.{digits}f}' if has_deviation else ''
  return f'{result.value:.{digits}f}{spread}'
