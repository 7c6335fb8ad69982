"""The interface of a loss: what `fit` minimises."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

Sums = Mapping[str, jax.Array]
RunningMeans = Mapping[str, jax.Array]
NO_MEANS: RunningMeans = {}
OBJECTIVE_RNG = 'objective'  # the stream of randomness that an objective draws from itself


@dataclasses.dataclass(frozen=True)
class Loss:
  """`loss(params, batch, rngs=None, running={}, update=1) -> sums`; `rngs=None` means deterministic.

  Attributes:
    fn: the loss itself, of all five; `update` is the number of the update that is being made.
    running: names of its sums whose running means per token it is given, as the updates before left them.
    needs_links: whether its batches must have links.
  """

  fn: Callable[..., Sums]
  running: tuple[str, ...] = ()
  needs_links: bool = False

  def __call__(self, params, batch, rngs=None, running: RunningMeans = NO_MEANS, update: int | jax.Array = 1) -> Sums:
    return self.fn(params, batch, rngs, running, update)
