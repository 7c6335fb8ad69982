"""Ensembles: the mean of the probabilities and of the attention weights of several models."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelOutput
from attention_jax.models.traits import Traits


class Ensemble:
  """Several models with the same vocabularies behind the interface of one EncoderDecoder.

  The distribution of each token, conditional on those before it, is the mean of the models' distributions. Attention
  weights are the mean over the models that attend. The models may differ in everything else. The parameters of an
  ensemble are a tuple with one parameter tree per model.

  Args:
    models: the models; either all of them copy or none does.

  Raises:
    UserError: if only some of the models copy.
  """

  def __init__(self, models: Sequence[EncoderDecoder]):
    self.models = tuple(models)
    num_copying = sum(bool(model.copies) for model in self.models)
    if num_copying not in (0, len(self.models)):
      raise UserError(
        f'ensemble: all models must copy or none, got {num_copying} of {len(self.models)} models that copy'
      )
    self.copies = self.models[0].copies
    traits = [model.traits for model in self.models]
    self.traits = Traits(
      attends=any(x.attends for x in traits),
      latent=next((x.latent for x in traits if x.latent), None),
      attends_in_recurrence=any(x.attends_in_recurrence for x in traits),
      starts_without_source=all(x.starts_without_source for x in traits),
    )

  def apply(self, variables: Any, *args: Any, method: str = '__call__') -> Any:
    """Applies a method of every model, at test time, and combines the results.

    Args:
      variables: {'params': one parameter tree per model}.
      *args: the arguments of the method; a carry or a memory is a tuple with one entry per model.
      method: '__call__', 'start' or 'step' of EncoderDecoder.

    Returns:
      The result of the method, in which a carry or a memory is a tuple with one entry per model, and a ModelOutput is
      the mean over the models. The ModelOutput of '__call__' has the outputs of each model as its state.
    """
    variables_by_model = [{'params': params} for params in variables['params']]
    pairs = list(zip(self.models, variables_by_model, strict=True))
    if method == 'step':
      carries, token, memories = args
      results = [
        model.apply(model_variables, carry, token, memory, method=method)
        for (model, model_variables), carry, memory in zip(pairs, carries, memories, strict=True)
      ]
      return tuple(carry for carry, _ in results), self._mean([outputs for _, outputs in results])
    results = [model.apply(model_variables, *args, method=method) for model, model_variables in pairs]
    if method == 'start':
      carries, memories = zip(*results, strict=True)
      return carries, memories
    return self._mean(results)._replace(state=tuple(results))

  def output_size(self, source_length: int) -> int:
    """Size of the output: the vocabulary and the copyable positions."""
    return self.models[0].output_size(source_length)

  def posterior(self, outputs: ModelOutput, target_mask: jax.Array) -> jax.Array:
    """Returns the weights given the whole target, [B, T, S]: the mean over the models that attend.

    Args:
      outputs: the outputs of '__call__'.
      target_mask: [B, T], True = real.
    """
    return self._mean_weights(
      [
        model.posterior(model_outputs, target_mask)
        for model, model_outputs in zip(self.models, outputs.state, strict=True)
      ]
    )

  def _mean(self, outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Returns logits whose softmax is the mean of the probabilities, and the mean weights."""
    log_probs = jnp.stack([jax.nn.log_softmax(model_outputs.logits) for model_outputs in outputs])
    weights = self._mean_weights([model_outputs.weights for model_outputs in outputs])
    return ModelOutput(jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(outputs)), weights)

  def _mean_weights(self, weights_by_model: Sequence[jax.Array]) -> jax.Array:
    """Returns the mean of the weights of the models that attend; zeros if none does."""
    weights = [
      model_weights
      for model, model_weights in zip(self.models, weights_by_model, strict=True)
      if model.traits.attends or not self.traits.attends
    ]
    return jnp.stack(weights).mean(0)
