"""Annotations without jaxtyping: `attend` works, and the options of every score and alignment are the same."""

import subprocess
import sys

from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import option_schema

PRINT_OPTIONS = """
import sys
sys.modules['jaxtyping'] = None  # its import fails, as if it were not installed
from tests.test_annotations import describe_options
import attention_jax as aj
import jax.numpy as jnp
print(describe_options())
print(aj.attend(jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.ones((3, 5))).context.tolist() == [[1.0] * 5] * 2)
"""


def describe_options():
  """Returns the options of every score and alignment, with their types, defaults and ranges."""
  return repr({name: option_schema(row) for table in (SCORES, ALIGNMENTS) for name, row in table.items()})


def test_options_are_the_same_and_attend_works_without_jaxtyping():
  result = subprocess.run([sys.executable, '-c', PRINT_OPTIONS], capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines() == [describe_options(), 'True']
