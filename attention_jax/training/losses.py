"""Losses as sums over real tokens: the step divides once, by the tokens of the whole global batch.

A loss is `f(params, batch, rngs) -> {'loss': [], 'tokens': [], ...}`, float32 sums over the batch; what else it names
('accuracy') is divided by the tokens and logged. `rngs=None` means deterministic.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Sums = Mapping[str, jax.Array]
Loss = Callable[..., Sums]


def cross_entropy(logits: jax.Array, target: jax.Array, mask: jax.Array, smoothing: float = 0.0) -> Sums:
  """−Σ ((1 − ε) log p(y) + ε/V Σ_v log p(v)) over real tokens; ε = smoothing (Szegedy et al. 2016).

  Args: logits [B, T, V], any float, computed in float32; target [B, T]; mask [B, T], True = real.
  Returns: sums 'loss', 'tokens' and 'accuracy' (tokens whose argmax is the target). Nothing behind the mask counts,
    in the value or in the gradient.
  """
  logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
  chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
  if smoothing:  # not with 0 · mean: a logit of -inf (a forbidden token) would make it NaN
    chosen = (1 - smoothing) * chosen + smoothing * logits.mean(axis=-1)
  losses = jax.nn.logsumexp(logits, axis=-1) - chosen
  right = logits.argmax(axis=-1) == target
  total = lambda x: jnp.sum(jnp.where(mask, x, 0), dtype=jnp.float32)
  return {'loss': total(losses), 'accuracy': total(right), 'tokens': total(mask)}


def sequence_loss(model, smoothing: float = 0.0) -> Loss:
  """Teacher forcing for a sequence-to-sequence flax model: `loss(params, batch, rngs=None)` on a data Batch."""

  def loss(params, batch, rngs=None) -> Sums:
    outputs = model.apply(
      {'params': params},
      batch.source,
      batch.source_mask,
      batch.target,
      deterministic=rngs is None,
      rngs=rngs,
    )
    return cross_entropy(outputs.logits, batch.target, batch.target_mask, smoothing)

  return loss
