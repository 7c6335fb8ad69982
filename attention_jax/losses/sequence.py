"""Losses as sums over real tokens: the step divides once, by the tokens of the whole global batch.

A loss gives `{'loss': [], 'tokens': [], ...}`, float32 sums over the batch. 'loss' is what is minimised; what else it
names ('accuracy', auxiliary losses) is divided by the tokens and logged.
"""

import jax
import jax.numpy as jnp

from attention_jax.functional.copying import emittable
from attention_jax.functional.masking import zero_masked
from attention_jax.losses.auxiliary import RUNNING_METRICS, auxiliary_losses
from attention_jax.losses.objectives import ObjectiveInputs, likelihood, make_objective
from attention_jax.losses.vocabulary import linear_cross_entropy
from attention_jax.modules.embedding import oov_to_unk
from attention_jax.training.loss import OBJECTIVE_RNG, Loss, Sums


def cross_entropy(
  logits: jax.Array, target: jax.Array, mask: jax.Array, smoothing: float = 0.0, among: jax.Array | None = None
) -> Sums:
  """−Σ ((1 − ε) log p(y) + ε/V Σ_v log p(v)) over real tokens; ε = smoothing (Szegedy et al. 2016).

  Args:
    logits: [B, T, V], any float, computed in float32; target [B, T]; mask [B, T], True = real.
    among: [B, T, V] bool, the v and V of the sum; by default all.
  Returns: sums 'loss', 'tokens' and 'accuracy' (tokens whose argmax is the target). Nothing behind the mask counts,
    in the value or in the gradient.
  """
  logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
  chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
  if smoothing:  # not with 0 · mean: a logit of -inf (a forbidden token) would make it NaN
    among = jnp.ones_like(logits, bool) if among is None else among
    mean = zero_masked(logits, among).sum(-1) / jnp.maximum(among.sum(-1), 1)
    chosen = (1 - smoothing) * chosen + smoothing * mean
  losses = jax.nn.logsumexp(logits, axis=-1) - chosen
  right = logits.argmax(axis=-1) == target
  total = lambda x: jnp.sum(jnp.where(mask, x, 0), dtype=jnp.float32)
  return {'loss': total(losses), 'accuracy': total(right), 'tokens': total(mask)}


def replace_unreachable_targets(model, batch):
  """The batch, with UNK for words of the target that the model cannot say: those that the source alone knows."""
  return batch._replace(target=oov_to_unk(batch.target, model.output_size(batch.source.shape[-1])))


def output_loss(outputs, target: jax.Array, mask: jax.Array, smoothing: float = 0.0, copies: bool = False) -> Sums:
  """`cross_entropy` of a model's outputs, by the shorter way where their logits are those of a linear layer.

  Where it copies, smoothing is over the words that can be said: how many others there are is up to the padding.
  """
  if not outputs.linear:
    among = emittable(outputs.logits) if copies and smoothing else None
    return cross_entropy(outputs.logits, target, mask, smoothing, among)
  loss, accuracy = linear_cross_entropy(outputs.linear, target, mask, smoothing)
  return {'loss': loss, 'accuracy': accuracy, 'tokens': jnp.sum(mask, dtype=jnp.float32)}


def sequence_loss(model, smoothing: float = 0.0, auxiliary: str = '', objective: str = 'likelihood') -> Loss:
  """What a sequence-to-sequence flax model minimises on data Batches, with auxiliary losses beside it.

  Args:
    auxiliary: specs of auxiliary.LOSSES joined by '+'; the one that the model cannot do without is added.
    objective: a spec of objectives.OBJECTIVES. Without rngs it is the likelihood, whatever is trained.
  Raises: UserError for an unknown name or option.
  """
  extra = auxiliary_losses(auxiliary, model.traits.required_loss)
  measured = tuple(sorted({name for row in extra.values() for name in row.running}))
  trained, running_too = make_objective(objective)
  forced = likelihood()

  def loss(params, batch, rngs, running, update) -> Sums:
    batch = replace_unreachable_targets(model, batch)
    score = lambda outputs: output_loss(outputs, batch.target, batch.target_mask, smoothing, model.copies)
    of_model = rngs and {name: rng for name, rng in rngs.items() if name != OBJECTIVE_RNG}
    own = rngs and rngs.get(OBJECTIVE_RNG)
    task = ObjectiveInputs(model, params, batch, of_model, own, running, update, score)
    sums, passes = (forced if rngs is None else trained)(task)
    if not extra:
      return sums
    mean = lambda measure: sum(map(measure, passes)) / len(passes)
    beside = {name: mean(lambda outputs, fn=row.fn: fn(outputs, batch, running)) for name, row in extra.items()}
    total = sums['loss'] + len(passes) * sum(row.contribution(beside[name], update) for name, row in extra.items())
    measures = {name: mean(lambda outputs, fn=RUNNING_METRICS[name]: fn(outputs, batch)) for name in measured}
    return {'cross_entropy': sums['loss'], **sums, **measures, **beside, 'loss': total}

  return Loss(loss, (*measured, *running_too), any(row.needs_links for row in extra.values()))
