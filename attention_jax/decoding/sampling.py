"""Random sampling of hypotheses. It depends on the step of a model alone, see generate.py."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding.generate import Hypotheses, end_and_continuation_masks, generate
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.decoding.top_k import masked_top_k
from attention_jax.functional.masking import at_least_float32
from attention_jax.specs import Count, Probability, Range, Repeats, check_fields

BISECTIONS = 40  # halvings of an interval of logits: to 1e-12 of its length
LOWEST = 128.0  # logits this far below the highest one have probability 0 in float32


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Distribution of each token: softmax(logits / temperature), restricted to the tokens that pass every filter.

  Equally likely tokens pass a filter together or not at all.

  Attributes:
    samples: number of hypotheses per source.
    seed: seed of the samples. Those of a source are a function of the seed and of its number, such as its index.
    temperature: below 1 favours likely tokens, above 1 flattens the distribution.
    top_k: keeps the k likeliest tokens; 0 keeps all (Fan, Lewis & Dauphin 2018).
    top_p: keeps the smallest set of the likeliest tokens whose probability reaches p (Holtzman et al. 2020).
    min_p: keeps tokens whose probability is at least this fraction of the highest one (Nguyen et al. 2024).

  Raises:
    UserError: for a number outside its range.
  """

  samples: Repeats = 1
  seed: Annotated[int, Range(0, 2**31 - 1)] = 0
  # Far above the limit, tokens of IMPOSSIBLE_SCORE would be sampled too, such as those that a prefix excludes.
  temperature: Annotated[float, Range(1e-3, 1e6)] = 1.0
  top_k: Count = 0
  top_p: Annotated[float, Range(0, 1, include_low=False)] = 1.0
  min_p: Probability = 0.0

  def __post_init__(self):
    check_fields(self, 'sampling')

  @property
  def hypotheses(self) -> int:
    """Number of hypotheses of each source."""
    return self.samples

  def make_search(self, rng_inputs: tuple[jax.Array, jax.Array]) -> Callable:
    """Returns `sample` with the rngs of the sources and these options.

    Args:
      rng_inputs: the seed of each source, and its number, see `seed`; [B] each.
    """
    rngs = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(*rng_inputs)
    return functools.partial(sample, rngs=rngs, sampling=self)

  def filter_logits(self, logits: jax.Array) -> jax.Array:
    """Returns logits [..., V] / temperature, -inf for tokens that a filter drops; the likeliest token always passes."""
    logits = at_least_float32(logits) / self.temperature
    highest = logits.max(-1, keepdims=True)
    threshold = highest + math.log(self.min_p) if self.min_p else jnp.full_like(highest, -jnp.inf)
    size = logits.shape[-1]
    if 0 < self.top_k < size:
      largest, _ = masked_top_k(logits, np.ones(size, bool), self.top_k)
      threshold = jnp.maximum(threshold, largest[..., -1:])
    if self.top_p < 1:
      threshold = jnp.maximum(threshold, nucleus_threshold(logits, self.top_p))
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def nucleus_threshold(logits: jax.Array, p: float) -> jax.Array:
  """Returns the lowest logit of the nucleus, [..., 1].

  A token is in the nucleus if all likelier tokens together have a probability below p. The lowest logit is found by
  bisection: sorting a large vocabulary takes longer on a CPU than the step of a model.

  Args:
    logits: [..., V] float32.
    p: probability of the nucleus, greater than 0 and at most 1.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  relative = logits - logits.max(-1, keepdims=True)

  def halve(_, bounds):
    outside, inside = bounds
    middle = (outside + inside) / 2
    mass_above = jnp.where(relative > middle, probs, 0.0).sum(-1, keepdims=True)
    return jnp.where(mass_above < p, outside, middle), jnp.where(mass_above < p, middle, inside)

  inside = jnp.zeros_like(logits, shape=(*logits.shape[:-1], 1))
  outside, _ = jax.lax.fori_loop(0, BISECTIONS, halve, (inside - LOWEST, inside))
  return jnp.where(relative > outside, logits, jnp.inf).min(-1, keepdims=True)


def sample(
  step: Callable,
  carry: Any,
  memory: Any,
  rngs: jax.Array,
  *,
  sampling: Sampling,
  max_length: int,
  ranking: Ranking = DEFAULT_RANKING,
  source_mask: jax.Array | None = None,
) -> Hypotheses:
  """Samples hypotheses, returned in the order of sampling; the last token of each is EOS.

  Args:
    step: the step of the model, see generate.py.
    carry: its first carry.
    memory: its memory.
    rngs: [B], one PRNG key per source, consumed.
    sampling: the distribution of each token, and the number K of samples.
    max_length: T, EOS included.
    ranking: the ranking that defines the scores.
    source_mask: [B, S] bool, True = real; by default every position is.

  Returns:
    Hypotheses, scored as those of a search.
  """
  batch = rngs.shape[0]
  samples = sampling.samples
  carry = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (batch, samples, *x.shape[1:])), carry)
  step = jax.vmap(step, in_axes=(1, 1, None), out_axes=1)

  def choose_token(logits, step_index, rngs):
    ends, continues = end_and_continuation_masks(logits.shape[-1])
    allowed = jnp.where(step_index == max_length - 1, ends, continues | ends)
    filtered = sampling.filter_logits(jnp.where(allowed[None, None], logits, -jnp.inf))
    step_rngs = jax.vmap(lambda rng: jax.random.split(jax.random.fold_in(rng, step_index), samples))(rngs)
    return jax.vmap(jax.vmap(jax.random.categorical))(step_rngs, filtered).astype(jnp.int32)

  return generate(
    step,
    carry,
    memory,
    choose_token,
    rngs,
    hypotheses=samples,
    max_length=max_length,
    ranking=ranking,
    source_mask=source_mask,
  )
