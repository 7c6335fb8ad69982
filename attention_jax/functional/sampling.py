"""Hard alignments that draw one position: sampled, trained by REINFORCE, or relaxed, trained straight through.

Drawn for training; at test both take the most probable position (`hardmax`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.errors import UserError
from attention_jax.functional.dense import check_single_query, check_temperature, hardmax, log_softmax, softmax
from attention_jax.functional.masking import at_least_float32

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']


@check_single_query
def hard(
  scores: Scores, mask: Mask, *, rng: jax.Array, state: Float[Array, ''], expected: float = 0.0
) -> tuple[Weights, Float[Array, '']]:
  """One position drawn from softmax(e); with probability `expected` nothing is drawn, and it is softmax(e) itself.

  Xu et al. 2015, section 4.1, who toss once for an image what is tossed here at every step: half of the time their
  model looks everywhere at once, and learns where to look before its draws are any good.

  A drawn weight has no gradient; the state is the sum of log-probabilities of all draws so far, and its gradient is
  what the REINFORCE estimator multiplies with the reward. Consumes rng. Raises: UserError unless 0 <= expected <= 1.
  """
  if not 0 <= expected <= 1:
    raise UserError(f'hard: expected is {expected}; possible: from 0 to 1')
  drawn = jax.lax.stop_gradient(_draw(scores, mask, rng))
  log_prob = jnp.sum(drawn * log_softmax(scores, mask)).astype(state.dtype)
  if not expected:
    return drawn, state + log_prob
  soft = jax.random.bernoulli(jax.random.fold_in(rng, 1), expected)
  return jnp.where(soft, softmax(scores, mask), drawn), state + jnp.where(soft, 0.0, log_prob)


@check_single_query
def gumbel(scores: Scores, mask: Mask, *, rng: jax.Array, temperature: float | Float[Array, ''] = 1.0) -> Weights:
  """One position drawn from softmax(e), with the gradient of softmax((e + g)/τ), g ~ Gumbel: straight through.

  Jang, Gu & Poole 2017, section 2.2. Consumes rng. Raises: UserError unless temperature > 0.
  """
  check_temperature('gumbel', temperature)
  noisy = at_least_float32(scores) + _noise(scores, rng)
  return straight_through(hardmax(noisy, mask), softmax(noisy, mask, temperature=temperature))


@check_single_query
def gumbel_annealed(scores: Scores, mask: Mask, *, rng: jax.Array, temperature: float | Float[Array, '']) -> Weights:
  """`gumbel` whose temperature is a parameter: `training.anneal` lets it fall, or else it is learned.

  A temperature below 0.01 counts as 0.01: a schedule may end at 0.
  """
  return gumbel(scores, mask, rng=rng, temperature=jnp.maximum(temperature, 0.01))


def init_log_prob(size: int, dtype) -> Float[Array, '']:
  """The state of `hard` before the first query."""
  return jnp.zeros((), dtype)


@jax.custom_jvp
def straight_through(hard: Weights, soft: Weights) -> Weights:
  """The value of `hard`, exactly, and the gradient of `soft`. Bengio, Léonard & Courville 2013."""
  return hard


@straight_through.defjvp
def _(primals, tangents):
  return primals[0], tangents[1]


def _noise(scores: Scores, rng: jax.Array) -> Scores:
  # Drawn in float32 in any precision, so that a seed means the same draw.
  return jax.random.gumbel(rng, scores.shape, jnp.float32).astype(at_least_float32(scores).dtype)


def _draw(scores: Scores, mask: Mask, rng: jax.Array) -> Weights:
  """A one-hot draw from softmax(scores): the largest of scores + Gumbel noise."""
  return hardmax(at_least_float32(scores) + _noise(scores, rng), mask)
