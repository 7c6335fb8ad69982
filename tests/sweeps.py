"""Which part of a sweep always runs; `make test-all` runs the rest."""

from collections.abc import Sequence

import pytest


def every_other(cases: Sequence[tuple]) -> list:
  """The cases, half of them for `make test-all` alone."""
  return [pytest.param(*case, marks=[pytest.mark.product] * (i % 2)) for i, case in enumerate(cases)]
