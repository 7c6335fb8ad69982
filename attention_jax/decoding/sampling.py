"""Hypotheses drawn at random instead of searched for. As search.py, this knows only `step`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from attention_jax.decoding import search
from attention_jax.specs import Count, Probability, Range, Size, check_fields


@dataclasses.dataclass(frozen=True)
class Sampling:
  """What each token is drawn from: softmax(logits / temperature) over the tokens that are left, the rest of it 0.

  Attributes:
    samples: how many hypotheses of each source.
    seed: of the draws. What is drawn of a source is a function of it and of the source's number.
    temperature: below 1 prefers likely tokens, above 1 flattens.
    top_k: leaves the k likeliest tokens; 0 leaves all (Fan, Lewis & Dauphin 2018).
    top_p: leaves the smallest set of the likeliest tokens whose probability reaches p (Holtzman et al. 2020).
    min_p: leaves tokens at least this times as likely as the likeliest (Nguyen et al. 2024).

  Raises: UserError for numbers that mean nothing.
  """

  samples: Size = 1
  seed: Annotated[int, Range(0, 2**31 - 1)] = 0
  temperature: Annotated[float, Range(1e-3)] = 1.0
  top_k: Count = 0
  top_p: Annotated[float, Range(0, 1, include_low=False)] = 1.0
  min_p: Probability = 0.0

  def __post_init__(self):
    check_fields(self, 'sampling')

  def make_search(self, drawn: tuple[jax.Array, jax.Array]) -> Callable:
    """What draws hypotheses of a model's steps, for sources with these seeds [B] and numbers [B]."""
    rngs = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(*drawn)
    return functools.partial(sample, rngs=rngs, sampling=self)

  def filter_logits(self, logits: jax.Array) -> jax.Array:
    """logits [..., V] / temperature, -inf for tokens that may not be drawn. The likeliest one is always left."""
    logits = logits / self.temperature
    highest = logits.max(-1, keepdims=True)
    least = highest + math.log(self.min_p) if self.min_p else jnp.full_like(highest, -jnp.inf)
    if 0 < self.top_k < logits.shape[-1]:
      least = jnp.maximum(least, jax.lax.top_k(logits, self.top_k)[0][..., -1:])
    if self.top_p < 1:
      ordered = -jnp.sort(-logits, axis=-1)
      probs = jax.nn.softmax(ordered, axis=-1)
      inside = jnp.cumsum(probs, axis=-1) - probs < self.top_p  # what comes before a token does not reach p yet
      least = jnp.maximum(least, jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True))
    return jnp.where(logits >= least, logits, -jnp.inf)


def sample(
  step: Callable,
  carry: Any,
  memory: Any,
  rngs: jax.Array,
  *,
  sampling: Sampling,
  max_length: int,
  ranking: search.Ranking = search.DEFAULT_RANKING,
  source_mask: jax.Array | None = None,
) -> search.Hypotheses:
  """Hypotheses in the order in which they were drawn, scored as those of a search; the last token is always EOS.

  Args: rngs [B], one PRNG key per source, consumed. The others are those of search.beam.
  """
  batch, count = rngs.shape[0], sampling.samples
  carry = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (batch, count, *x.shape[1:])), carry)
  step = jax.vmap(step, in_axes=(1, 1, None), out_axes=1)

  def pick(logits, level, rngs):
    ends, continues = search.ending_and_continuing(logits.shape[-1])
    may_come = jnp.where(level == max_length - 1, ends, continues | ends)
    drawn_from = sampling.filter_logits(jnp.where(may_come[None, None], logits, -jnp.inf))
    own = jax.vmap(lambda rng: jax.random.split(jax.random.fold_in(rng, level), count))(rngs)
    return jax.vmap(jax.vmap(jax.random.categorical))(own, drawn_from).astype(jnp.int32)

  return search.unroll(
    step, carry, memory, pick, rngs, hypotheses=count, max_length=max_length, ranking=ranking, source_mask=source_mask
  )
