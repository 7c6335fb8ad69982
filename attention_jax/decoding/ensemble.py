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

  P(y) is the mean of the models' probabilities of y. Attention weights are the mean over the models that attend. The
  models may differ in everything else. The parameters of an ensemble are a tuple with one parameter tree per model.

  Args:
    models: the models; either all of them copy or none does.

  Raises:
    UserError: if only some of the models copy.
  """

  def __init__(self, models: Sequence[EncoderDecoder]):
    self.models = tuple(models)
    copying = sum(bool(model.copies) for model in self.models)
    if copying not in (0, len(self.models)):
      raise UserError(f'ensemble: all models must copy or none, got {copying} of {len(self.models)} models that copy')
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
      args: the arguments of the method; a carry, a memory or a shortlist is a tuple with one entry per model.
      method: '__call__', 'start', 'select' or 'step' of EncoderDecoder.

    Returns:
      The result of the method: of a carry, a memory or a shortlist, a tuple with one entry per model; of a ModelOutput,
      the mean over the models. The state of the ModelOutput of '__call__' is the tuple of the models' own outputs.
    """
    variables_by_model = [{'params': params} for params in variables['params']]
    pairs = list(zip(self.models, variables_by_model, strict=True))
    if method == 'step':
      carries, token, *others = args  # the memories, and perhaps the shortlists
      results = [
        model.apply(model_variables, carry, token, *model_args, method=method)
        for (model, model_variables), carry, *model_args in zip(pairs, carries, *others, strict=True)
      ]
      return tuple(carry for carry, _ in results), self._mean([outputs for _, outputs in results])
    results = [model.apply(model_variables, *args, method=method) for model, model_variables in pairs]
    if method == 'select':
      return tuple(results)
    if method == 'start':
      carries, memories = zip(*results, strict=True)
      return carries, memories
    return self._mean(results)._replace(state=tuple(results))

  def output_size(self, source_length: int) -> int:
    """Size of the output: the vocabulary and the copyable positions."""
    return self.models[0].output_size(source_length)

  def posterior(self, outputs: ModelOutput, target_mask: jax.Array) -> jax.Array:
    """Returns the mean [B, T, S] of the models' weights given the whole target.

    Args:
      outputs: the outputs of '__call__'.
      target_mask: [B, T], True = real.
    """
    weights = [
      model.posterior(model_outputs, target_mask)
      for model, model_outputs in zip(self.models, outputs.state, strict=True)
    ]
    return jnp.stack(weights).mean(0)

  def _mean(self, outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Logits whose softmax is the mean of the probabilities; weights of models without attention do not count."""
    log_probs = jnp.stack([jax.nn.log_softmax(model_outputs.logits) for model_outputs in outputs])
    weights = jnp.stack(
      [
        model_outputs.weights
        for model, model_outputs in zip(self.models, outputs, strict=True)
        if model.traits.attends or not self.traits.attends
      ]
    )
    return ModelOutput(jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(outputs)), weights.mean(0))
