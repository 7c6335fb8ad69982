"""The jaxtyping annotations of the pure functions hold for every score and alignment.

`python -m tests.functional.test_annotations` traces every pair and its gradient with the annotations of every call
enforced. It prints how many pairs it traced, and the error that a wrong dtype raises.
"""

from tests.annotations import enforce_annotations

if __name__ == '__main__':  # before the first import of the package
  enforce_annotations()

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import attention_jax as aj
from attention_jax.functional.dense import softmax
from attention_jax.functional.table import lookup
from tests.functional.alignment_cases import CORE_PAIRS
from tests.functional.cases import S
from tests.functional.helpers import loss, make_problem


@pytest.mark.long
def test_every_row_is_traced_with_annotations_enforced():
  command = [sys.executable, '-m', 'tests.functional.test_annotations']
  result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  assert result.stdout.split() == [str(len(CORE_PAIRS)), 'TypeCheckError']


def trace(score: str, alignment: str, deterministic: bool) -> None:
  """Traces attention and its gradient, without compiling them."""
  problem = jax.eval_shape(lambda: make_problem(score, alignment, batch=(2,)))
  mask = aj.padding_mask(jnp.asarray([S, 2]), S)[:, None]

  def run(problem):
    return loss(score, alignment, problem, mask, deterministic=deterministic, rng=jax.random.key(0))

  for function in (run, jax.grad(run, has_aux=True)):
    jax.eval_shape(function, problem)


def describe_wrong_dtype() -> str:
  """Returns the type of the error for scores that are integers."""
  try:
    softmax(jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
  except jaxtyping.TypeCheckError as error:
    return type(error).__name__
  return 'none'


if __name__ == '__main__':
  for score, alignment in CORE_PAIRS:
    differs_at_test = lookup(alignment, aj.ALIGNMENTS, 'alignment').at_test is not None
    for deterministic in (True, False) if differs_at_test else (False,):
      trace(score, alignment, deterministic)
  print(len(CORE_PAIRS), describe_wrong_dtype())
