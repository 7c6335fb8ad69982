"""Whether weights explain an output: agreement with other measures, and other weights with nearly the same output.

Jain & Wallace 2019, "Attention is not Explanation"; Wiegreffe & Pinter 2019 discuss what follows from it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.alignments import softmax
from attention_jax.functional.masking import at_least_float32

PENALTY = 500.0  # λ, the factor of the output change beyond ε in the objective. Jain & Wallace 2019, section 4.2.2


class Adversarial(NamedTuple):
  """Weights that are far from the original ones and change the output little.

  Attributes:
    weights: [S].
    divergence: Jensen-Shannon divergence from the original weights, 0 to ln 2.
    output_change: total variation distance of the outputs.
  """

  weights: jax.Array
  divergence: jax.Array
  output_change: jax.Array


def kendall(weights: np.ndarray, importance: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
  """Kendall's τ-b between two measures of importance, for each query. Jain & Wallace 2019, section 4.1.

  Args:
    weights: [T, S].
    importance: [T, S], such as the sizes of attributions.
    mask: [S], the positions that are compared; by default all.

  Returns:
    [T], -1 (opposite orders) to 1 (same order); NaN where either is constant, or with fewer than two positions.
  """
  from scipy.stats import kendalltau

  keep = slice(None) if mask is None else np.asarray(mask, bool)
  # In float64, because scipy does not support bfloat16.
  rows = zip(np.asarray(weights, float)[:, keep], np.asarray(importance, float)[:, keep], strict=True)
  return np.array([kendalltau(a, b).statistic if len(a) > 1 else np.nan for a, b in rows])


def total_variation(p: jax.Array, q: jax.Array) -> jax.Array:
  """½ Σ |p - q| over the last axis, 0 to 1."""
  return 0.5 * jnp.abs(p - q).sum(-1)


def jensen_shannon(p: jax.Array, q: jax.Array) -> jax.Array:
  """½ KL(p ‖ m) + ½ KL(q ‖ m) over the last axis, m = (p + q) / 2; in nats, 0 to ln 2."""
  middle = (p + q) / 2
  return (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2


def _relative_entropy(p: jax.Array, q: jax.Array) -> jax.Array:
  # A p of at most 2 * tiny counts as 0: q may be as small as p / 2, which devices round to 0 if it is below `tiny`.
  is_positive = p > 2 * jnp.finfo(p.dtype).tiny
  # Not the logarithm of a ratio, whose gradient contains 1 / q²: it overflows where q is below 1e-19.
  log_ratio = jnp.log(jnp.where(is_positive, p, 1.0)) - jnp.log(jnp.where(is_positive, q, 1.0))
  return jnp.sum(p * log_ratio, -1)


def permutation_effect(
  fn: Callable[[jax.Array], jax.Array], weights: jax.Array, mask: jax.Array, rng: jax.Array, count: int = 100
) -> jax.Array:
  """Median total variation distance of the output when the weights are permuted. Jain & Wallace 2019, section 4.2.1.

  Args:
    fn: weights [S] -> distribution of the output [V].
    weights: the original weights, 0 at masked positions.
    mask: [S]; weights are permuted among the unmasked positions.
    rng: a PRNG key, consumed.
    count: number of permutations.

  Returns:
    [], from 0 (no change) to 1.
  """
  original = fn(weights)
  unmasked_first = jnp.argsort(~mask)

  def change(rng):
    draws = jnp.where(mask, jax.random.uniform(rng, mask.shape), 2.0)
    permuted = jnp.zeros_like(weights).at[jnp.argsort(draws)].set(weights[unmasked_first])
    return total_variation(fn(permuted), original)

  return jnp.median(jax.lax.map(change, jax.random.split(rng, count)))


def adversarial_weights(
  fn: Callable[[jax.Array], jax.Array],
  weights: jax.Array,
  mask: jax.Array,
  rng: jax.Array,
  epsilon: float = 0.05,
  steps: int = 300,
  learning_rate: float = 0.05,
) -> Adversarial:
  """Weights w̃ with the greatest JS(w̃, w) whose output changes by at most ε. Jain & Wallace 2019, section 4.2.2.

  Adam maximises JS(w̃, w) - λ max(0, TV(fn(w̃), fn(w)) - ε) over w̃ = softmax(z), as in the paper with one adversary. The
  result is the most distant w̃ of all steps whose output changes by at most ε; the original weights if there is none.

  Args:
    fn: weights [S] -> distribution of the output [V].
    weights: the original weights, 0 at masked positions.
    mask: [S].
    rng: a PRNG key for the first z, consumed.
    epsilon: ε.
    steps: number of steps.
    learning_rate: of Adam.
  """
  import optax

  weights = at_least_float32(weights)
  original = fn(weights)
  optimizer = optax.adam(learning_rate)

  def objective(z):
    candidate = softmax(z, mask)
    divergence = jensen_shannon(candidate, weights)
    change = total_variation(fn(candidate), original)
    return -divergence + PENALTY * jnp.maximum(0.0, change - epsilon), Adversarial(candidate, divergence, change)

  def step(carry, _):
    z, state, best = carry
    (_, candidate), gradient = jax.value_and_grad(objective, has_aux=True)(z)
    is_better = (candidate.output_change <= epsilon) & (candidate.divergence > best.divergence)
    best = jax.tree.map(lambda new, old: jnp.where(is_better, new, old), candidate, best)
    updates, state = optimizer.update(gradient, state)
    return (optax.apply_updates(z, updates), state, best), None

  z = jnp.log(jnp.maximum(weights, 1e-3)) + jax.random.normal(rng, weights.shape)
  unchanged = Adversarial(weights, jnp.zeros(()), jnp.zeros(()))
  (_, _, best), _ = jax.lax.scan(step, (z, optimizer.init(z), unchanged), length=steps)
  return best
