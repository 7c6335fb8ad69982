"""A program that traces every score and alignment with the annotations of every call enforced; see test_annotations.py.

Prints how many pairs it traced, and the error that a wrong dtype raises.

python -m tests.functional.trace_annotated [gradients]
"""

from tests.annotations import enforce_annotations

enforce_annotations()

import sys  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxtyping  # noqa: E402

import attention_jax as aj  # noqa: E402
from attention_jax.functional.dense import softmax  # noqa: E402
from attention_jax.functional.table import lookup  # noqa: E402
from tests.functional.alignment_cases import CORE_PAIRS  # noqa: E402
from tests.functional.cases import S  # noqa: E402
from tests.functional.helpers import loss, make_problem  # noqa: E402


def trace(score: str, alignment: str, deterministic: bool, with_gradient: bool) -> None:
  """Traces attention, or also its gradient, without compiling it."""
  problem = jax.eval_shape(lambda: make_problem(score, alignment, batch=(2,)))
  mask = aj.padding_mask(jnp.asarray([S, 2]), S)[:, None]

  def run(problem):
    return loss(score, alignment, problem, mask, deterministic=deterministic, rng=jax.random.key(0))

  jax.eval_shape(jax.grad(run, has_aux=True) if with_gradient else run, problem)


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
      trace(score, alignment, deterministic, with_gradient='gradients' in sys.argv[1:])
  print(len(CORE_PAIRS), describe_wrong_dtype())
