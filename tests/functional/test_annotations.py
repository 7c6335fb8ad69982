"""The jaxtyping annotations of the pure functions hold for every score and alignment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.alignment_cases import CORE_PAIRS


@pytest.mark.parametrize('options', [(), pytest.param(('gradients',), marks=pytest.mark.long)], ids=str)
def test_every_row_is_traced_with_annotations_enforced(options):
  command = [sys.executable, '-m', 'tests.functional.trace_annotated', *options]
  result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  assert result.stdout.split() == [str(len(CORE_PAIRS)), 'TypeCheckError']
