"""Several models that speak as one: the mean of their probabilities, and of their weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelOutput
from attention_jax.models.traits import Traits


class Ensemble:
  """Models of the same vocabularies, used as an EncoderDecoder is whose parameters are a tuple, one set for each.

  P(y) is the mean of the models' probabilities of y. Weights are means too, of those that attend; models may differ in
  everything else.
  """

  def __init__(self, models: Sequence[EncoderDecoder]):
    self.models = tuple(models)
    if len({model.copies for model in self.models}) > 1:
      raise UserError(f'ensemble: some of the {len(self.models)} models copy and some do not')
    self.copies = self.models[0].copies
    traits = [model.traits for model in self.models]
    self.traits = Traits(
      attends=any(model.attends for model in traits),
      latent=next((model.latent for model in traits if model.latent), None),
      attends_in_recurrence=any(model.attends_in_recurrence for model in traits),
      starts_without_source=all(model.starts_without_source for model in traits),
    )

  def apply(self, variables: Any, *given: Any, method: str = '__call__') -> Any:
    """As of a flax module, at test time."""
    each = [(model, {'params': params}) for model, params in zip(self.models, variables['params'], strict=True)]
    if method == 'step':
      carries, token, memories = given
      found = [m.apply(own, c, token, k, method=method) for (m, own), c, k in zip(each, carries, memories, strict=True)]
      return tuple(carry for carry, _ in found), self._mean([outputs for _, outputs in found])
    found = [model.apply(own, *given, method=method) for model, own in each]
    return tuple(zip(*found, strict=True)) if method == 'start' else self._mean(found)._replace(state=tuple(found))

  def output_size(self, source_length: int) -> int:
    return self.models[0].output_size(source_length)

  def posterior(self, outputs: ModelOutput, target_mask: jax.Array) -> jax.Array:
    """As of an EncoderDecoder, of the outputs of whole targets."""
    each = [model.posterior(own, target_mask) for model, own in zip(self.models, outputs.state, strict=True)]
    return jnp.stack(each).mean(0)

  def _mean(self, several: Sequence[ModelOutput]) -> ModelOutput:
    log_probs = jnp.stack([jax.nn.log_softmax(outputs.logits) for outputs in several])
    look = [model.traits.attends or not self.traits.attends for model in self.models]
    weights = jnp.stack([outputs.weights for outputs, looks in zip(several, look, strict=True) if looks])
    return ModelOutput(jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(several)), weights.mean(0))
