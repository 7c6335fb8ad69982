"""Properties of a decoder that training, search and reports depend on."""

from typing import NamedTuple

from attention_jax.functional.latent import LatentAlignment


class Traits(NamedTuple):
  """Properties of a cell, a decoder or a model, that do not depend on parameter values.

  Attributes:
    attends: whether it attends to the source.
    latent: the LatentAlignment of an alignment that training marginalises over, else None.
    required_loss: name of the auxiliary loss that training the scores requires, or ''.
    attends_in_recurrence: whether attention, if any, needs one query after the other in training too: because it is
      computed inside the recurrence of a cell, or because it is recurrent itself.
    starts_without_source: whether decoding may start before the source is complete, because attention is the only way
      in which the decoder depends on the source.
    packs: whether a row may hold several pairs, as segments that do not affect each other.
  """

  attends: bool = True
  latent: LatentAlignment | None = None
  required_loss: str = ''
  attends_in_recurrence: bool = False
  starts_without_source: bool = False
  packs: bool = False
