"""The error for second derivatives of implementations whose custom gradient cannot be differentiated."""

from collections.abc import Callable

import jax

from attention_jax.errors import UserError


def first_order(implementation: str, forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
  """Returns the functions of a jax.custom_vjp such that differentiating them raises UserError.

  Without this, jax fails inside of their loops, in ways that depend on the implementation, or allocates all memory.

  Args:
    implementation: its name, for the error.
    forward: operands -> result, residuals.
    backward: (residuals, cotangent) -> cotangents of the operands.
  """

  def differentiate(primals, tangents):
    raise UserError(
      f"implementation '{implementation}' has no second derivatives; use 'xla' or 'chunked' for a Hessian"
    )

  functions = (jax.custom_jvp(forward), jax.custom_jvp(backward))
  for function in functions:
    function.defjvp(differentiate)
  return functions
