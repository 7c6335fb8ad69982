"""The jaxtyping annotations of the pure functions hold for every score and alignment."""

import subprocess
import sys
from pathlib import Path

from tests.functional.alignment_cases import CORE_PAIRS


def test_every_row_is_traced_with_annotations_enforced():
  command = [sys.executable, '-m', 'tests.functional.trace_annotated']
  result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  assert result.stdout.split() == [str(len(CORE_PAIRS)), 'TypeCheckError']
