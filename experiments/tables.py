"""Results as a table for a terminal, and weights as JSON has them."""

from collections.abc import Mapping

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from attention_jax.inference.metrics import MetricSummary, MetricValue


def round_weights(weights: np.ndarray) -> list:
  """Numbers with six places behind the point."""
  return weights.astype(float).round(6).tolist()


def print_results(results: Mapping[str, Mapping[str, MetricValue | MetricSummary]]) -> None:
  """One row per metric and one column per split; below them, whole, the signatures of what was computed.

  Of several runs: mean ± standard deviation.
  """
  console = Console(highlight=False)
  table = Table('metric', box=box.SIMPLE_HEAD)
  for split in results:
    table.add_column(split, justify='right')
  table.add_column('unit')
  rows = {name: result for found in results.values() for name, result in found.items()}
  for name, some in rows.items():
    table.add_row(name, *(_value(found.get(name)) for found in results.values()), some.unit)
  console.print(table)
  for signature in dict.fromkeys(result.signature for found in results.values() for result in found.values()):
    names = [n for n in rows if any(n in found and found[n].signature == signature for found in results.values())]
    console.print(f'  {", ".join(names)}: {signature}', soft_wrap=True, markup=False)


def _value(result: MetricValue | MetricSummary | None) -> str:
  if result is None:
    return ''
  digits = 2 if result.unit in ('%', 'points') else 4
  spread = f' ± {result.deviation:.{digits}f}' if isinstance(result, MetricSummary) else ''
  return f'{result.value:.{digits}f}{spread}'
