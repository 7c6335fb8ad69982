"""Addressing a memory by content and by location: the alignment of Neural Turing Machines, and what it writes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention_jax.functional.dense import Mask, Scores, Weights, check_single_query, softmax
from attention_jax.functional.masking import at_least_float32, zero_masked


@check_single_query
def addressing(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, 'Dq'],
  previous: Scores,
  strength: Float[Array, 'Dq'],
  gate: Float[Array, 'Dq'],
  power: Float[Array, 'Dq'],
  shift: Float[Array, 'K Dq'],
  strength_bias: Float[Array, ''],
  gate_bias: Float[Array, ''],
  power_bias: Float[Array, ''],
  shift_bias: Float[Array, 'K'],
) -> Weights:
  """w ∝ (s ∗ (g softmax(β e) + (1 - g) w'))^γ: by content, or from where it was before, moved on and sharpened.

  Of the query q: β = ζ(bᵀ q), g = σ(gᵀ q), s = softmax(S q) over moves by -⌊K/2⌋ ... ⌊K/2⌋ positions (an even K lacks
  the last), γ = 1 + ζ(pᵀ q), each with its bias; ζ is softplus. ∗ goes round, see `shift_weights`. Before anything was attended
  to (w' = 0) there is content alone. Graves, Wayne & Danihelka 2014, equations 5 and 7 to 9; with the score
  `cosine(beta=1.0)` (their equation 6) it is the whole of their section 3.3.
  """
  scores = at_least_float32(scores)
  query = at_least_float32(query)
  product = lambda w: jnp.einsum('...d,d->...', at_least_float32(w), query, precision='highest')
  of_query = lambda w, bias: (product(w) + at_least_float32(bias)).astype(scores.dtype)
  content = softmax(jax.nn.softplus(of_query(strength, strength_bias)) * scores, mask)
  before = zero_masked(previous.astype(scores.dtype), mask)
  gate = jnp.where(before.any(), jax.nn.sigmoid(of_query(gate, gate_bias)), 1.0)
  moves = jax.nn.softmax(of_query(shift, shift_bias))
  weights = shift_weights(gate * content + (1 - gate) * before, mask, moves)
  return sharpen(weights, 1 + jax.nn.softplus(of_query(power, power_bias)))


def shift_weights(weights: Weights, mask: Mask, moves: Float[Array, 'K']) -> Weights:
  """Σ_k moves[k] weights[s - k + ⌊K/2⌋]; what leaves at the last unmasked position comes in at the first.

  Graves et al. 2014, equation 8. What would come to a masked position between them is left out, or stays where it was
  where nothing else would be left.
  """
  here, size, reach = jnp.arange(len(mask)), len(mask), len(moves) // 2
  first, last = jnp.min(jnp.where(mask, here, size)), jnp.max(jnp.where(mask, here, -1))

  def turned(x: Weights, by: int, enters: Int[Array, ''], leaves: Int[Array, '']) -> Weights:
    # No gather: its gradient adds one number at a time on a CPU.
    return jnp.where(here == enters, jnp.sum(jnp.where(here == leaves, x, 0.0)), jnp.roll(x, by))

  total, ahead, back = moves[reach] * weights, weights, weights
  for k in range(1, reach + 1):
    ahead, back = turned(ahead, 1, first, last), turned(back, -1, last, first)
    total = total + moves[reach - k] * back
    if reach + k < len(moves):
      total = total + moves[reach + k] * ahead
  total = zero_masked(total, mask)
  return jnp.where(total.any(), total, weights)


def sharpen(weights: Weights, power: Float[Array, '']) -> Weights:
  """weights^power / Σ weights^power. Graves et al. 2014, equation 9. All 0 stay 0."""
  largest = weights.max()
  share = weights / jnp.where(largest > 0, largest, 1.0)
  # Double where: the logarithm must not see what is 0 or so small that one over it is not finite.
  some = share > jnp.finfo(share.dtype).tiny
  powers = jnp.where(some, jnp.exp(power * jnp.log(jnp.where(some, share, 1.0))), 0.0)
  total = powers.sum()  # no maximum with 1: of two that are equal each has half of the gradient
  return powers / jnp.where(total > 0, total, 1.0)


def write_memory(
  memory: Float[Array, 'S D'], weights: Float[Array, 'H S'], erase: Float[Array, 'H D'], add: Float[Array, 'H D']
) -> Float[Array, 'S D']:
  """The memory after H heads have written: M Π_h (1 - w_h e_hᵀ) + Σ_h w_h a_hᵀ. Graves et al. 2014, equations 3 and 4.

  All heads erase before any adds, so that their order is nothing. Args: erase, from 0 to 1.
  """
  kept = functools.reduce(jnp.multiply, 1 - weights[:, :, None] * erase[:, None])  # the gradient of prod is slow
  return memory * kept + jnp.einsum('hs,hd->sd', weights, add)
