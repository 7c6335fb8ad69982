"""Auxiliary losses, added to the objective: `training.auxiliary='guided(weight=0.5) + coverage'`.

An auxiliary loss is `f(outputs, batch, running, *, options) -> [] float32`, a sum over the real target or source tokens
of the batch; losses of classifiers are sums over the real documents, or over their words and sentences. `running` holds
the running means that its row names. Masked positions affect neither the value nor the gradient.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional import latent
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Memory, Problem, attend, project
from attention_jax.functional.mask import Mask
from attention_jax.functional.params import init_params
from attention_jax.functional.sampling import Samples
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row
from attention_jax.specs import NonNegative, Option, Positive, Probability, Range, check_options, parse_sum, schema_of
from attention_jax.training.loss import RunningMeans

DISABLE_HINT = 'to train without the loss: --config.training.auxiliary='


class AuxiliaryLoss(NamedTuple):
  """One auxiliary loss.

  Attributes:
    fn: the loss itself, f(outputs, batch, running, *, options) -> [] float32: `outputs` is a ModelOutput of all steps
      or a ClassifierOutput; `batch` is a data Batch, or a LabelledBatch of documents; `running` maps names, including
      those of the field `running`, to running means, []. The keyword-only arguments are options.
    needs_links: whether it needs Batch.links.
    needs_text: whether the source must be a text, not a picture.
    uses_weights: whether its gradient flows through the attention weights.
    running: names of the RUNNING_METRICS whose running means it uses.
    weight: its factor in the total; an option of every row.
    after: number of updates before it joins the total; an option of every row.
    metrics: further metrics to log, by name: f(outputs, batch) -> a sum over the real target tokens or, for a
      classifier, over the real documents.
  """

  fn: Callable[..., jax.Array]
  needs_links: bool = False
  needs_text: bool = False
  uses_weights: bool = True
  running: tuple[str, ...] = ()
  weight: float = 1.0
  after: int = 0
  metrics: Mapping[str, Callable[..., jax.Array]] = types.MappingProxyType({})

  def contribution(self, value: jax.Array, update: int | jax.Array) -> jax.Array:
    """Returns the term that the loss adds to the total at an update: 0 in the first `after` updates.

    Args:
      value: value of the loss.
      update: number of the update, from 1.
    """
    return jnp.where(update > self.after, self.weight * value, 0.0)


def coverage(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_t Σ_s min(w_ts, c_ts), c_ts the sum of w_ks over k < t. See, Liu & Manning 2017, equation 12.

  Arguments: see AuxiliaryLoss.
  """
  weights = _masked_weights(outputs, batch)
  before = jnp.cumsum(jnp.pad(weights[:, :-1], ((0, 0), (1, 0), (0, 0))), axis=1)
  return jnp.sum(jnp.minimum(weights, before))


def doubly_stochastic(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_s (1 − Σ_t w_ts)²: pulls the total attention to every position towards 1. Xu et al. 2015, equation 14.

  Arguments: see AuxiliaryLoss.
  """
  total = jnp.sum(_masked_weights(outputs, batch), axis=1)
  source_mask = jnp.broadcast_to(batch.source_mask, total.shape)
  return jnp.sum(jnp.where(source_mask, (1 - total) ** 2, 0.0))


def guided(outputs, batch, running: RunningMeans) -> jax.Array:
  """−Σ_t mean_s log(w_ts + 10⁻⁶) over the gold links (t, s) of t. Chen et al. 2016, guided alignment, cross entropy.

  Target tokens without links contribute 0.

  Arguments: see AuxiliaryLoss.
  """
  gold = batch.links & batch.target_mask[..., None]
  logs = jnp.log(jnp.where(gold, _masked_weights(outputs, batch) + 1e-6, 1.0))
  return -jnp.sum(logs.sum(axis=-1) / jnp.maximum(gold.sum(axis=-1), 1))


def diagonal(outputs, batch, running: RunningMeans, *, width: Positive = 0.2) -> jax.Array:
  """Σ_ts w_ts (1 − exp(−(s/S − t/T)² / 2g²)), S and T the real lengths. Tachibana et al. 2018, guided attention.

  The option `width` is g.

  Arguments: see AuxiliaryLoss.
  """
  target, source = (
    jnp.arange(mask.shape[1])[None] / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    for mask in (batch.target_mask, batch.source_mask)
  )
  offset = source[:, None, :] - target[:, :, None]
  return -jnp.sum(_masked_weights(outputs, batch) * jnp.expm1(-((offset / width) ** 2) / 2))


def reinforce(
  outputs, batch, running: RunningMeans, *, entropy: NonNegative = 0.01, discount: Probability = 1.0
) -> jax.Array:
  """REINFORCE for sampled alignments: the reward of a sample is log p(y) of its token and the tokens after it.

  The baseline is this reward with the running mean of the log-likelihood per token in place of each log p(y). Xu et al.
  2015, section 4.1, with discount=1. The entropy bonus is λ Σ_t H_t, where λ is the option `entropy`. The state of the
  alignment `hard_once` contains the sum of the entropies H_t so far; for `hard`, the log-probabilities of the samples
  estimate them.

  Args:
    outputs: ModelOutput, whose state is the sum of the log-probabilities of the samples so far, [B, T, N], or
      sampling.Samples of such arrays.
    batch: the batch.
    running: the running mean 'log_likelihood'.
    entropy: λ, the weight of the entropy bonus.
    discount: factor of the rewards per token of distance. At 0 a sample is rewarded for the token of its step only, and
      not for later tokens that depend on it.

  Raises:
    UserError: if the state of the alignment holds no log-probabilities of samples.
  """
  has_entropies = isinstance(outputs.state, Samples)
  log_prob_sums = outputs.state.log_prob if has_entropies else outputs.state
  if getattr(log_prob_sums, 'ndim', 0) != 3:
    expected = ', '.join(name for name, row in ALIGNMENTS.items() if row.required_loss == 'reinforce')
    raise UserError(
      f'auxiliary loss reinforce needs a sampled alignment that is trained by it; expected one of: {expected}'
    )
  mask = batch.target_mask

  def increments(sums):
    """The terms of each step, summed over heads, from the sums [B, T, N] up to each step."""
    return jnp.where(mask, jnp.diff(sums.astype(jnp.float32), axis=1, prepend=0).sum(axis=-1), 0.0)

  log_probs = increments(log_prob_sums)
  bonus = entropy * jnp.sum(increments(outputs.state.entropy)) if has_entropies else 0.0
  baseline = jax.vmap(lambda means: latent.rewards_to_go(means, discount))(running['log_likelihood'] * mask)
  estimated_entropy_weight = 0.0 if has_entropies else entropy
  surrogate = jax.vmap(functools.partial(latent.reinforce, entropy=estimated_entropy_weight, discount=discount))
  return -jnp.sum(surrogate(log_probs, log_likelihoods(outputs, batch), baseline)) - bonus


def ponder(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_t (N_t + R_t) over real source positions and all layers with adaptive computation time. Graves 2016, section 2.

  N_t is the number of updates of step t, and R_t the remainder, see modules.adaptive. The weight is τ of the paper.

  Arguments: see AuxiliaryLoss.

  Raises:
    UserError: if the encoder has no layer with adaptive computation time.
  """
  return _ponder_cost(outputs, batch.source_mask.any(axis=1))


def ponder_of_documents(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_t (N_t + R_t) over all steps (words and sentences) of layers with adaptive computation time. Graves 2016.

  Arguments: see AuxiliaryLoss.

  Raises:
    UserError: if the encoder has no layer with adaptive computation time.
  """
  return _ponder_cost(outputs, batch.index >= 0)


def _ponder_cost(outputs, is_real: jax.Array) -> jax.Array:
  """The ponder cost of the rows for which `is_real` [B] is True; masked positions have cost 0."""
  return sum(jnp.sum(layer.cost * is_real[:, None]) for layer in _ponder_of(outputs))


def _ponder_of(outputs):
  if not outputs.ponder:
    raise UserError('auxiliary loss ponder needs an encoder with adaptive computation time, such as act')
  return outputs.ponder


def mean_updates(outputs) -> jax.Array:
  """Mean number of updates of a step with adaptive computation time, in each row, [B].

  Raises:
    UserError: if the encoder has no layer with adaptive computation time.
  """
  layers = _ponder_of(outputs)
  updates = sum(layer.updates.sum(axis=1) for layer in layers)
  return updates / jnp.maximum(sum(jnp.sum(layer.updates > 0, axis=1) for layer in layers), 1)


def redundancy(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ over documents of ‖A Aᵀ − I‖². A has a row of weights over all words per head and hop. Lin et al. 2017.

  Equation 8 of the paper. Arguments: see AuxiliaryLoss.
  """
  weights = jnp.moveaxis(outputs.word_weights, 1, 2)  # [B, H, N, W], letters as in ClassifierOutput
  weights = weights.reshape(*weights.shape[:2], -1)
  difference = jnp.einsum('bhs,bgs->bhg', weights, weights) - jnp.eye(weights.shape[1])[None]
  return jnp.sum(jnp.where((batch.index >= 0)[:, None, None], difference**2, 0.0))


def log_likelihoods(outputs, batch) -> jax.Array:
  """log p(y_t) of the real target tokens, 0 at masked ones: [B, T] float32."""
  logits = jnp.where(batch.target_mask[..., None], outputs.logits.astype(jnp.float32), 0.0)
  target_logits = jnp.take_along_axis(logits, batch.target[..., None], axis=-1)[..., 0]
  return jnp.where(batch.target_mask, target_logits - jax.nn.logsumexp(logits, axis=-1), 0.0)


LOSSES: Mapping[str, AuxiliaryLoss] = {
  'coverage': AuxiliaryLoss(coverage),
  'diagonal': AuxiliaryLoss(diagonal, needs_text=True),
  'doubly_stochastic': AuxiliaryLoss(doubly_stochastic),
  'guided': AuxiliaryLoss(guided, needs_links=True, needs_text=True),
  'reinforce': AuxiliaryLoss(reinforce, uses_weights=False, running=('log_likelihood',)),
  'ponder': AuxiliaryLoss(
    ponder,
    needs_text=True,
    uses_weights=False,
    weight=0.01,
    metrics={'ponder_updates': lambda outputs, batch: jnp.sum(mean_updates(outputs) * batch.target_mask.sum(axis=1))},
  ),
}
CLASSIFIER_LOSSES: Mapping[str, AuxiliaryLoss] = {
  'redundancy': AuxiliaryLoss(redundancy),
  'ponder': AuxiliaryLoss(
    ponder_of_documents,
    uses_weights=False,
    weight=0.01,
    metrics={'ponder_updates': lambda outputs, batch: jnp.sum(mean_updates(outputs) * (batch.index >= 0))},
  ),
}

# Metrics of which a running mean is available: f(outputs, batch) -> a sum over the real target tokens.
RUNNING_METRICS: Mapping[str, Callable[..., jax.Array]] = {
  'log_likelihood': lambda outputs, batch: jnp.sum(log_likelihoods(outputs, batch)),
}


def auxiliary_losses(
  specs: str, needed: str = '', table: Mapping[str, AuxiliaryLoss] | None = None
) -> dict[str, AuxiliaryLoss]:
  """Returns the selected rows with their options set.

  Args:
    specs: spec strings joined by '+'.
    needed: name of a loss that is added unless `specs` contains it; '' for none.
    table: rows by name; by default LOSSES.

  Raises:
    UserError: for specs that cannot be parsed, an unknown name or option, and a value outside its range.
  """
  table = LOSSES if table is None else table
  options_by_name = ({needed: {}} if needed else {}) | parse_sum(specs, 'auxiliary losses')
  return {name: _set_options(name, options, table) for name, options in options_by_name.items()}


def check_weights(losses: Mapping[str, AuxiliaryLoss], attention) -> None:
  """Checks that attention weights exist and have a gradient if a loss is trained through them.

  Args:
    losses: the rows by name.
    attention: a modules.attention.Attention; None for a decoder without attention.

  Raises:
    UserError: if a loss needs attention weights, and there are none or they have no gradient.
  """
  names = ', '.join(name for name, row in losses.items() if row.uses_weights)
  if names and attention is None:
    raise UserError(f'auxiliary loss {names} needs attention weights, but the decoder does not attend; {DISABLE_HINT}')
  if names and not has_weight_gradient(attention.resolved_alignment):
    raise UserError(
      f'auxiliary loss {names} is trained through the attention weights, but those of alignment '
      f'{attention.alignment!r} have no gradient; expected an alignment whose weights have one, such as '
      f'softmax or gumbel; {DISABLE_HINT}'
    )


def has_weight_gradient(alignment: Row) -> bool:
  """Returns whether the weights of an alignment have a gradient with respect to the query, in any of 64 samples."""
  rngs = jax.random.split(jax.random.key(0), 64)
  score = SCORES['additive']
  params = init_params(rngs[0], score=score, alignment=alignment, query=3, key=3, features=3)
  query, key = jax.random.normal(rngs[1], (2, 4, 3))
  memory = Memory(project(key, params, 'key'), key, Mask())

  def weighted_sum(query, rng):
    attended = attend(Problem(score, alignment, params, query, memory, rng=rng, deterministic=False))
    return jnp.sum(attended.weights * jnp.arange(16.0).reshape(4, 4) ** 2)

  return bool(jax.jit(jax.vmap(jax.grad(weighted_sum), (None, 0)))(query, rngs).any())


def option_schema(row: AuxiliaryLoss) -> dict[str, Option]:
  """Returns the options of an auxiliary loss: those of its function, and `weight` and `after` of every row."""
  common = {'weight': Option(float, row.weight, Range(0)), 'after': Option(int, row.after, Range(0))}
  return common | schema_of(row.fn)


def _set_options(name: str, options: Mapping[str, float], table: Mapping[str, AuxiliaryLoss]) -> AuxiliaryLoss:
  row = table[choose(name, table, 'auxiliary loss')]
  check_options(f'auxiliary loss {name!r}', options, option_schema(row))
  common = {option: value for option, value in options.items() if option in row._fields}
  specific = {option: value for option, value in options.items() if option not in common}
  return row._replace(fn=functools.partial(row.fn, **specific), **common)


def _masked_weights(outputs, batch) -> jax.Array:
  """The weights [B, T, S] of real target tokens over real source positions, 0 elsewhere."""
  return jnp.where(batch.target_mask[:, :, None] & batch.source_mask[:, None, :], outputs.weights, 0.0)
