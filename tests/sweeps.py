"""Which part of a sweep always runs; `make test-all` runs the rest."""

from collections.abc import Sequence

import pytest

KEPT = (0, 2, 5, 7)  # of eight: where options take turns by two or by four, each of them is there


def every_other(cases: Sequence[tuple]) -> list:
  """The cases, half of them for `make test-all` alone."""
  return [pytest.param(*case, marks=[pytest.mark.product] * (i % 8 not in KEPT)) for i, case in enumerate(cases)]
