"""Norms of weighted value vectors. Kobayashi et al. 2020."""

import jax
import jax.numpy as jnp


def weighted_norms(weights: jax.Array, values: jax.Array) -> jax.Array:
  """‖Σₕ wʰₜₛ f(xₛ)ʰ‖: norm of the contribution of position s to the output of query t. Kobayashi et al. 2020.

  A large weight adds little if its vector is short, as is often the case for separators.

  Args:
    weights: [T, S], or [N, T, S] of several heads.
    values: f(x), the vectors that are added: [S, V], or [N, S, V] after the output projection of each head.

  Returns:
    [T, S].
  """
  if weights.ndim == 2:
    return weights * jnp.linalg.norm(values, axis=-1)[None, :]
  # ‖Σₕ wʰ fʰ‖² = Σₕᵢ wʰ wⁱ (fʰ · fⁱ), without an array [T, S, V].
  products = jnp.einsum('hsv,isv->his', values, values)
  squares = jnp.einsum('hts,its,his->ts', weights, weights, products)
  return jnp.sqrt(jnp.maximum(squares, 0.0))
