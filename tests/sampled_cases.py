"""Samples of large products of cases: a part of the cases always runs, and `make test-all` runs all of them."""

from collections.abc import Sequence

import pytest

# `every` -> positions that always run, and the period after which they repeat. The positions are spaced unevenly, so
# that no value of an option that alternates with period 2 or, except for 16, with period 4 is missing.
_SAMPLES = {2: ((0, 2, 5, 7), 8), 4: ((0, 5, 10, 15), 16), 8: ((0, 9, 18, 27), 32), 16: ((0, 25), 32)}


def sample_cases(cases: Sequence[tuple], every: int) -> list:
  """Marks all but one in `every` cases as `product`, which only `make test-all` runs.

  Args:
    cases: arguments of a parametrised test.
    every: 2, 4, 8 or 16.

  Returns:
    One pytest parameter set per case.
  """
  positions, period = _SAMPLES[every]
  parameters = []
  for i, case in enumerate(cases):
    marks = () if i % period in positions else (pytest.mark.product,)
    parameters.append(pytest.param(*case, marks=marks))
  return parameters
