"""Losses as sums over real tokens: the update divides once, by the tokens of the whole global batch.

A loss returns a dictionary of float32 scalars, sums over the batch: 'loss', 'tokens' and others. The quotient of 'loss'
and 'tokens' is minimised; those of the other entries ('accuracy', auxiliary losses) are logged.
"""

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.copying import emittable
from attention_jax.functional.masking import zero_masked
from attention_jax.losses.auxiliary import RUNNING_METRICS, auxiliary_losses
from attention_jax.losses.base import ObjectiveInputs, likelihood
from attention_jax.losses.objectives import make_objective
from attention_jax.losses.vocabulary import linear_cross_entropy
from attention_jax.models.encoder_decoder import replace_unreachable_targets
from attention_jax.training.loss import OBJECTIVE_RNG, Loss, Sums


def cross_entropy(
  logits: jax.Array, target: jax.Array, mask: jax.Array, smoothing: float = 0.0, smoothing_mask: jax.Array | None = None
) -> Sums:
  """−Σ ((1 − ε) log p(y) + ε/V Σ_v log p(v)) over real tokens; ε = smoothing (Szegedy et al. 2016).

  Masked tokens affect neither the value nor the gradient.

  Args:
    logits: [B, T, V], any float; computed in float32.
    target: [B, T] ids.
    mask: [B, T], True = real.
    smoothing: ε.
    smoothing_mask: [B, T, V] bool, True for the ids v in the smoothing sum; their number replaces V in ε/V. By
      default all ids.

  Returns:
    The sums 'loss', 'tokens' and 'accuracy' (the number of tokens whose largest logit is that of the target).
  """
  logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
  chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
  if smoothing:  # skipped for 0, because 0 times the mean is NaN if a logit is -inf (a forbidden token)
    smoothing_mask = jnp.ones_like(logits, bool) if smoothing_mask is None else smoothing_mask
    mean = zero_masked(logits, smoothing_mask).sum(-1) / jnp.maximum(smoothing_mask.sum(-1), 1)
    chosen = (1 - smoothing) * chosen + smoothing * mean
  losses = jax.nn.logsumexp(logits, axis=-1) - chosen
  is_correct = logits.argmax(axis=-1) == target

  def total(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, x, 0), dtype=jnp.float32)

  return {'loss': total(losses), 'accuracy': total(is_correct), 'tokens': total(mask)}


def output_loss(outputs, target: jax.Array, mask: jax.Array, smoothing: float = 0.0, copies: bool = False) -> Sums:
  """Returns the sums of `cross_entropy` for a model's outputs, without the logits of the whole batch if possible.

  `linear_cross_entropy` computes the sums if the logits are those of a linear layer.

  Args:
    outputs: ModelOutput of all steps.
    target: [B, T] ids.
    mask: [B, T], True = real.
    smoothing: as in `cross_entropy`.
    copies: whether the model copies. The smoothing is then a mean over the tokens that can be emitted, because the
      number of the other tokens depends on the padding.
  """
  if not outputs.linear:
    smoothing_mask = emittable(outputs.logits) if copies and smoothing else None
    return cross_entropy(outputs.logits, target, mask, smoothing, smoothing_mask)
  loss, accuracy = linear_cross_entropy(outputs.linear, target, mask, smoothing)
  return {'loss': loss, 'accuracy': accuracy, 'tokens': jnp.sum(mask, dtype=jnp.float32)}


def sequence_loss(model, smoothing: float = 0.0, auxiliary: str = '', objective: str = 'likelihood') -> Loss:
  """Returns the loss of a sequence-to-sequence model on data Batches: an objective and auxiliary losses.

  Args:
    model: a flax EncoderDecoder.
    smoothing: ε of the label smoothing.
    auxiliary: specs of auxiliary.LOSSES joined by '+'; the loss that the model's alignment needs is added.
    objective: a spec of objectives.OBJECTIVES. Without rngs the objective is the likelihood.

  Raises:
    UserError: for specs that cannot be parsed, an unknown name or option, and an invalid value of an option; when the
      loss is called, for a batch of packed rows that it or the model does not support.
  """
  auxiliary_rows = auxiliary_losses(auxiliary, model.traits.required_loss)
  running_metrics = tuple(sorted({name for row in auxiliary_rows.values() for name in row.running}))
  training_objective, objective_row = make_objective(objective)
  evaluation_objective = likelihood()

  def loss(params, batch, rngs, running, update) -> Sums:
    if batch.segments is not None and (auxiliary_rows or not objective_row.per_token):
      raise UserError(
        'data.packed must be False for auxiliary losses and for objectives of whole sequences, got '
        f'{", ".join(auxiliary_rows) or objective}'
      )
    batch = replace_unreachable_targets(model, batch)

    def compute_loss(outputs) -> Sums:
      return output_loss(outputs, batch.target, batch.target_mask, smoothing, model.copies)

    model_rngs = rngs and {name: rng for name, rng in rngs.items() if name != OBJECTIVE_RNG}
    objective_rng = rngs and rngs.get(OBJECTIVE_RNG)
    inputs = ObjectiveInputs(model, params, batch, model_rngs, objective_rng, running, update, compute_loss)
    run_objective = evaluation_objective if rngs is None else training_objective
    sums, passes = run_objective(inputs)
    if not auxiliary_rows:
      return sums

    def mean_over_passes(fn) -> jax.Array:
      return sum(map(fn, passes)) / len(passes)

    values = {
      name: mean_over_passes(lambda outputs, fn=row.fn: fn(outputs, batch, running))
      for name, row in auxiliary_rows.items()
    }
    contributions = sum(row.contribution(values[name], update) for name, row in auxiliary_rows.items())
    total = sums['loss'] + len(passes) * contributions
    metric_fns = {name: RUNNING_METRICS[name] for name in running_metrics}
    for row in auxiliary_rows.values():
      metric_fns |= row.metrics
    metrics = {name: mean_over_passes(lambda outputs, fn=fn: fn(outputs, batch)) for name, fn in metric_fns.items()}
    return {'cross_entropy': sums['loss'], **sums, **metrics, **values, 'loss': total}

  needs_links = any(row.needs_links for row in auxiliary_rows.values())
  return Loss(loss, (*running_metrics, *objective_row.running), needs_links)
