"""The interface of objectives, helpers for them, and the objective `likelihood`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.functional.mask import Mask
from attention_jax.training.loss import Sums


class ObjectiveInputs(NamedTuple):
  """Inputs of an objective.

  Attributes:
    model: the EncoderDecoder.
    params: its parameters.
    batch: a data Batch.
    rngs: the rngs of the model; None for a deterministic pass.
    rng: the rng of the objective itself, or None.
    running: running means per token, by name, including those that `Objective.running` lists.
    update: number of the update, from 1.
    compute_loss: ModelOutput for the batch's targets -> the sums 'loss', 'accuracy' and 'tokens' of cross entropy.
  """

  model: Any
  params: Any
  batch: Any
  rngs: Mapping[str, jax.Array] | None
  rng: jax.Array | None
  running: Sums
  update: int | jax.Array
  compute_loss: Callable[[Any], Sums]

  def forward(self, target: jax.Array, rngs: Mapping[str, jax.Array] | None, params: Any = None):
    """Runs one pass of teacher forcing.

    Args:
      target: [B, T] ids; the decoder reads the ids before each step.
      rngs: the rngs of the model; None for a deterministic pass.
      params: the parameters; by default those of the inputs.

    Returns:
      ModelOutput of all steps.
    """
    variables = {'params': self.params if params is None else params}
    batch = self.batch
    segments = {} if batch.segments is None else {'segments': batch.segments}
    mask = batch.source_mask
    if getattr(self.model, 'takes_masks', False) and not segments:  # models of users' own read an array
      mask = Mask.lengths(mask.sum(-1))  # the real positions of a batch come first
    return self.model.apply(variables, batch.source, mask, target, deterministic=rngs is None, rngs=rngs, **segments)


class ObjectiveOutput(NamedTuple):
  """Result of an objective.

  Attributes:
    sums: sums as a loss returns them; if 'loss' is not the cross entropy, 'cross_entropy' is included, averaged over
      the passes.
    passes: a ModelOutput for each pass that predicts the data's targets; auxiliary losses are added for each of them.
      Passes that only provide samples or their log-probabilities are not included.
  """

  sums: Sums
  passes: tuple[Any, ...]


ObjectiveFn = Callable[[ObjectiveInputs], ObjectiveOutput]


def likelihood() -> ObjectiveFn:
  """−log p(y | x): teacher forcing, each token predicted from the data's tokens before it."""
  return teacher_forcing


def teacher_forcing(inputs: ObjectiveInputs) -> ObjectiveOutput:
  """The objective of `likelihood`."""
  outputs = inputs.forward(inputs.batch.target, inputs.rngs)
  return ObjectiveOutput(inputs.compute_loss(outputs), (outputs,))


def fold_in_rngs(rngs: Mapping[str, jax.Array], number: int | jax.Array) -> dict[str, jax.Array]:
  """Returns independent rngs for the pass with this number."""
  return {name: jax.random.fold_in(rng, number) for name, rng in rngs.items()}


def masked_logits(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns logits [B, T, V] as float32, 0 where mask [B, T] is False."""
  return jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
