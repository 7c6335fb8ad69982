"""Which part of a sweep always runs; `make test-all` runs the rest."""

from collections.abc import Sequence

import pytest

# every: places kept, of how many. Where options take turns by two or by four, each of them is there.
KEPT = {2: ((0, 2, 5, 7), 8), 4: ((0, 5, 10, 15), 16)}


def sample_cases(cases: Sequence[tuple], every: int) -> list:
  """The cases, all but every second or fourth of them for `make test-all` alone."""
  kept, of = KEPT[every]
  return [pytest.param(*case, marks=[pytest.mark.product] * (i % of not in kept)) for i, case in enumerate(cases)]
