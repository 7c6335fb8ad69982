"""Objectives of training, selected by a spec string: `training.objective='minimum_risk(samples=8, after=2000)'`.

An objective is a function ObjectiveInputs -> ObjectiveOutput. A row of OBJECTIVES builds it; the keyword-only arguments
of the builder are the options. `losses.sequence.sequence_loss` adds the auxiliary losses; label smoothing is part of
`ObjectiveInputs.compute_loss`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from attention_jax.decoding.generate import IMPOSSIBLE_SCORE, end_and_continuation_masks
from attention_jax.errors import UserError
from attention_jax.losses.base import (
  ObjectiveFn,
  ObjectiveInputs,
  ObjectiveOutput,
  fold_in_rngs,
  likelihood,
  masked_logits,
)
from attention_jax.losses.sequence_level import minimum_risk, reinforce
from attention_jax.specs import NonNegative, Probability, Range, bind, parse
from attention_jax.tokens import EOS


class Objective(NamedTuple):
  """A row of OBJECTIVES.

  Attributes:
    build: options -> the objective.
    running: names of the sums whose running means per token the objective may read.
    per_token: whether it is a sum over tokens, so that a row of a batch may hold several pairs.
  """

  build: Callable[..., ObjectiveFn]
  running: tuple[str, ...] = ()
  per_token: bool = False


# ------------------------------------------------------------------------------------------------------------- r_drop


def r_drop(*, alpha: NonNegative = 5.0) -> ObjectiveFn:
  """−log p₁(y) − log p₂(y) + α/2 (KL(p₁‖p₂) + KL(p₂‖p₁)), two passes with independent dropout. Liang et al. 2021.

  The divergence is summed over tokens and computed over the whole vocabulary. Both passes run as one batch of twice the
  size, so that the logits of both are in memory at the same time.

  Raises:
    UserError: when the objective is called, for a model whose passes are deterministic.
  """

  def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
    if not _is_random(inputs):
      raise UserError('objective r_drop needs a model with dropout, otherwise both passes are equal; set model.dropout')

    def forward(i):
      outputs = inputs.forward(inputs.batch.target, fold_in_rngs(inputs.rngs, i))
      return outputs._replace(linear=())  # vmap would copy its kernel

    both = jax.vmap(forward)(jnp.arange(2))
    passes = tuple(jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))
    first, second = (inputs.compute_loss(outputs) for outputs in passes)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    kl = divergence(passes[0].logits, passes[1].logits, inputs.batch.target_mask)
    sums = {'cross_entropy': mean['loss'], 'divergence': kl, 'loss': 2 * mean['loss'] + alpha * kl}
    return ObjectiveOutput(mean | sums, passes)

  return objective


def divergence(first: jax.Array, second: jax.Array, mask: jax.Array) -> jax.Array:
  """Σ over real tokens of ½ (KL(p‖q) + KL(q‖p)) = ½ Σ_v (p_v − q_v)(log p_v − log q_v).

  Args:
    first: logits [B, T, V] of p.
    second: logits [B, T, V] of q.
    mask: [B, T], True = real.
  """
  log_p, log_q = (jax.nn.log_softmax(masked_logits(logits, mask)) for logits in (first, second))
  # The log-probability of a forbidden token is -inf in both, and their difference would be NaN.
  log_ratio = jnp.maximum(log_p, IMPOSSIBLE_SCORE) - jnp.maximum(log_q, IMPOSSIBLE_SCORE)
  return jnp.sum(jnp.where(mask, jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * log_ratio, axis=-1) / 2, 0.0))


def _is_random(inputs: ObjectiveInputs) -> bool:
  """Returns whether a training pass needs an rng; traces the pass without running it."""
  try:
    jax.eval_shape(lambda params: inputs.forward(inputs.batch.target, {}, params), inputs.params)
  except InvalidRngError:
    return True
  return False


# -------------------------------------------------------------------------------------------------- scheduled sampling


def linear(*, start: Probability = 1.0, slope: NonNegative = 1e-4, minimum: Probability = 0.5) -> Callable:
  """The schedule ε_n = max(minimum, start − slope n), see SAMPLING_SCHEDULES.

  Args:
    start: value of the line at n = 0.
    slope: decrease per update.
    minimum: lower bound of ε.

  Returns:
    n -> ε_n.
  """
  return lambda n: jnp.maximum(minimum, start - slope * n)


def exponential(*, base: Annotated[float, Range(0, 1, include_low=False, include_high=False)] = 0.9999) -> Callable:
  """The schedule ε_n = base^n, see SAMPLING_SCHEDULES. Returns n -> ε_n."""
  return lambda n: jnp.exp(n * math.log(base))


def inverse_sigmoid(*, k: Annotated[float, Range(1)] = 1000.0) -> Callable:
  """The schedule ε_n = k / (k + exp(n / k)), see SAMPLING_SCHEDULES. Returns n -> ε_n."""
  return lambda n: k / (k + jnp.exp(n / k))


# Probability ε_n that the decoder reads the reference token at update n. Bengio et al. 2015, section 2.4.
SAMPLING_SCHEDULES: Mapping[str, Callable[..., Callable]] = {
  'exponential': exponential,
  'inverse_sigmoid': inverse_sigmoid,
  'linear': linear,
}


def scheduled_sampling(*, schedule: str = 'linear', temperature: NonNegative = 1.0) -> ObjectiveFn:
  """−log p(y | x), where the decoder reads reference tokens with probability ε_n at update n, else predicted ones.

  Bengio et al. 2015, but in two passes, the same for every decoder (Mihaylova & Martins 2019; Duckworth et al. 2019,
  parallel scheduled sampling): the first pass predicts every token by teacher forcing, and the second pass reads some
  of the predictions. No gradient flows through the first pass. The sum 'replaced_tokens' counts the reference tokens
  that predictions replace, EOS excluded.

  Args:
    schedule: a spec of SAMPLING_SCHEDULES.
    temperature: temperature of the sampling; 0 selects the most probable token.

  Raises:
    UserError: for a schedule that cannot be parsed, an unknown schedule or option, and a value outside its range.
  """
  reference_probability = build_from_spec(schedule, SAMPLING_SCHEDULES, 'schedule of scheduled_sampling')

  def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
    batch = inputs.batch
    mask_rng, sample_rng = jax.random.split(inputs.rng)
    first_rngs = fold_in_rngs(inputs.rngs, 1)
    first_pass = inputs.forward(batch.target, first_rngs, jax.lax.stop_gradient(inputs.params))
    predicted = _sample_tokens(sample_rng, first_pass.logits, temperature)
    is_reference = jax.random.bernoulli(mask_rng, reference_probability(inputs.update), batch.target.shape)
    is_predicted = batch.target_mask & ~is_reference & (batch.target != EOS)  # the decoder never reads EOS
    outputs = inputs.forward(jnp.where(is_predicted, predicted, batch.target), inputs.rngs)
    sums = inputs.compute_loss(outputs) | {'replaced_tokens': jnp.sum(is_predicted, dtype=jnp.float32)}
    return ObjectiveOutput(sums, (outputs,))

  return objective


def _sample_tokens(rng: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
  """Samples tokens [B, T] from logits [B, T, V], among those that continue a hypothesis. Consumes rng."""
  _, continues = end_and_continuation_masks(logits.shape[-1])
  logits = jnp.where(continues[None, None], logits, -jnp.inf)
  logits = logits - logits.max(-1, keepdims=True)  # at most 0, so that no quotient by a small temperature is inf
  tokens = jax.random.categorical(rng, logits / temperature) if temperature else logits.argmax(-1)
  return tokens.astype(jnp.int32)


# --------------------------------------------------------------------------------------------------------------- specs

OBJECTIVES: Mapping[str, Objective] = {
  'likelihood': Objective(likelihood, per_token=True),
  'minimum_risk': Objective(minimum_risk),
  'r_drop': Objective(r_drop, per_token=True),
  'reinforce': Objective(reinforce, ('bleu',)),
  'scheduled_sampling': Objective(scheduled_sampling, per_token=True),
}


def make_objective(spec: str) -> tuple[ObjectiveFn, Objective]:
  """Builds an objective from a spec string.

  Returns:
    The objective, and its row.

  Raises:
    UserError: as `build_from_spec`, and for options that the objective rejects, such as too few samples.
  """
  builders = {name: row.build for name, row in OBJECTIVES.items()}
  return build_from_spec(spec, builders, 'objective'), OBJECTIVES[parse(spec)[0]]


def build_from_spec(spec: str, table: Mapping[str, Callable], kind: str) -> Callable:
  """Calls the function of `table` that a spec string selects, with the options of the string.

  Args:
    spec: `'name'` or `'name(option=literal, ...)'`.
    table: functions by name.
    kind: the kind of entry, for error messages.

  Raises:
    UserError: for a spec that cannot be parsed, an unknown name or option, and a value outside its range.
  """
  _, build, options = bind(spec, table, kind)
  return build(**options)
