"""The errors for derivatives that an implementation does not have: forward mode and second derivatives.

A kernel with a gradient of its own has first derivatives in reverse mode alone. So has 'auto', which may select such a
kernel: its derivatives do not depend on the sizes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attention_jax.errors import UserError


def reverse_mode_only(implementation: str, operands):
  """Returns the operands of an implementation that has first derivatives in reverse mode (jax.grad) alone.

  Other derivatives with respect to them raise UserError: second derivatives where they are traced; forward mode
  (jax.jvp, jax.jacfwd, jax.linearize) where a tangent is computed, which under jax.jit is during the compilation.

  Args:
    implementation: its name, for the error.
    operands: a tree of arrays.
  """

  def restrict(x):
    is_differentiable = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    return _with_tangent(implementation, x) if is_differentiable else x

  return jax.tree.map(restrict, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_tangent(implementation: str, x: jax.Array) -> jax.Array:
  """The identity; its tangent can be transposed for a gradient, but not computed."""
  return x


@_with_tangent.defjvp
def _(implementation, primals, tangents):
  return _without_tangent(implementation, *primals), _tangent_p.bind(*tangents, implementation=implementation)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_tangent(implementation: str, x: jax.Array) -> jax.Array:
  """The identity; differentiating it raises UserError."""
  return x


@_without_tangent.defjvp
def _(implementation, primals, tangents):
  raise UserError(f"implementation '{implementation}' has no second derivatives; use 'xla' for a Hessian")


def _refuse_tangent(*_, implementation: str, **__):
  raise UserError(
    f"implementation '{implementation}' has no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.linearize); "
    "use 'xla', or reverse mode (jax.grad, jax.vjp, jax.jacrev)"
  )


_tangent_p = Primitive('reverse_mode_tangent')  # the identity of tangents, which only a transposition removes
_tangent_p.def_abstract_eval(lambda tangent, *, implementation: tangent)
_tangent_p.def_impl(_refuse_tangent)
ad.deflinear2(_tangent_p, lambda cotangent, tangent, *, implementation: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, lambda context, *args, **params: _refuse_tangent(**params))
