"""Results as a table for a terminal."""

from collections.abc import Mapping

from rich.table import Table

from attention_jax.training.metrics import Result


def results_table(results: Mapping[str, Mapping[str, Result]]) -> Table:
  """One row per metric, one column per split."""
  table = Table('metric', *results, 'unit', 'signature')
  names = list(dict.fromkeys(name for found in results.values() for name in found))
  for name in names:
    row = [found.get(name) for found in results.values()]
    some = next(result for result in row if result)
    values = ['' if result is None else f'{result.value:.2f}' if result.value >= 1 else f'{result.value:.4f}' for result in row]
    table.add_row(name, *values, some.unit, some.signature)
  return table
