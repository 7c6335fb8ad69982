"""The interface of a loss, which `loop.fit` minimises."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

Sums = Mapping[str, jax.Array]
RunningMeans = Mapping[str, jax.Array]
NO_MEANS: RunningMeans = {}
OBJECTIVE_RNG = 'objective'  # name of the rng that an objective consumes itself


@dataclasses.dataclass(frozen=True)
class Loss:
  """A loss and its requirements: `loss(params, batch, rngs=None, running={}, update=1) -> sums`.

  Attributes:
    fn: (params, batch, rngs, running, update) -> sums over the batch, float32 [] by name. Required are 'loss' and
      'tokens', the number of terms; every other sum is logged, divided by 'tokens'.
    running: names of the sums whose running means per token `fn` reads, as the previous updates left them.
    needs_links: whether its batches must have links.
  """

  fn: Callable[..., Sums]
  running: tuple[str, ...] = ()
  needs_links: bool = False

  def __call__(
    self,
    params: Any,
    batch: Any,
    rngs: Mapping[str, jax.Array] | None = None,
    running: RunningMeans = NO_MEANS,
    update: int | jax.Array = 1,
  ) -> Sums:
    """Returns the sums over a batch.

    Args:
      params: the model's parameters.
      batch: arrays with a leading axis of rows.
      rngs: rngs by name, see step.RNGS; None means deterministic.
      running: running means by name.
      update: number of the current update, from 1.
    """
    return self.fn(params, batch, rngs, running, update)
