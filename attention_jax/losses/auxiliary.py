"""Auxiliary losses, minimised beside the cross entropy: `training.auxiliary='guided(weight=0.5) + coverage'`.

An auxiliary loss is `f(outputs, batch, running, *, options) -> [] float32`: a sum over the real target tokens of the
batch, as the cross entropy is. `running` holds the running means that its row names. Nothing behind a mask counts, in
the value or in the gradient.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional import latent
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import Memory, attend, init_params, project
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row
from attention_jax.specs import NonNegative, Option, Positive, Probability, Range, check_options, parse_sum, schema_of
from attention_jax.training.loss import RunningMeans

DISABLE_HINT = 'to train without the loss: --config.training.auxiliary='


class AuxiliaryLoss(NamedTuple):
  """One auxiliary loss.

  Attributes:
    fn: the loss itself; its keyword-only arguments are options.
    needs_links: whether it needs Batch.links.
    needs_text: whether the source must be a text, in its order.
    uses_weights: whether it is learned through the weights.
    running: the metrics of RUNNING_METRICS whose running means it uses.
    weight, after: its factor in what is minimised, and how many updates are made before it is; options of every row.
  """

  fn: Callable[..., jax.Array]
  needs_links: bool = False
  needs_text: bool = False
  uses_weights: bool = True
  running: tuple[str, ...] = ()
  weight: float = 1.0
  after: int = 0

  def contribution(self, value: jax.Array, update: int | jax.Array) -> jax.Array:
    """What of its value is minimised by this update (from 1)."""
    return jnp.where(update > self.after, self.weight * value, 0.0)


def coverage(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_t Σ_s min(w_ts, c_ts), c the sum of the weights before. See, Liu & Manning 2017, equation 12."""
  weights = _seen(outputs, batch)
  before = jnp.cumsum(jnp.pad(weights[:, :-1], ((0, 0), (1, 0), (0, 0))), axis=1)
  return jnp.sum(jnp.minimum(weights, before))


def doubly_stochastic(outputs, batch, running: RunningMeans) -> jax.Array:
  """Σ_s (1 − Σ_t w_ts)²: every position is looked at about once. Xu et al. 2015, equation 14."""
  looked = jnp.sum(_seen(outputs, batch), axis=1)
  there = jnp.broadcast_to(batch.source_mask, looked.shape)
  return jnp.sum(jnp.where(there, (1 - looked) ** 2, 0.0))


def guided(outputs, batch, running: RunningMeans) -> jax.Array:
  """−Σ_t mean over the gold links (t, s) of t of log(w_ts + 10⁻⁶). Chen et al. 2016, guided alignment, cross entropy.

  Target tokens without links cost nothing.
  """
  gold = batch.links & batch.target_mask[..., None]
  logs = jnp.log(jnp.where(gold, _seen(outputs, batch) + 1e-6, 1.0))
  return -jnp.sum(logs.sum(axis=-1) / jnp.maximum(gold.sum(axis=-1), 1))


def diagonal(outputs, batch, running: RunningMeans, *, width: Positive = 0.2) -> jax.Array:
  """Σ_ts w_ts (1 − exp(−(s/S − t/T)² / 2g²)), S and T the real lengths. Tachibana et al. 2018, guided attention."""
  target, source = (
    jnp.arange(mask.shape[1])[None] / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    for mask in (batch.target_mask, batch.source_mask)
  )
  offset = source[:, None, :] - target[:, :, None]
  return -jnp.sum(_seen(outputs, batch) * jnp.expm1(-((offset / width) ** 2) / 2))


def reinforce(
  outputs, batch, running: RunningMeans, *, entropy: NonNegative = 0.01, discount: Probability = 1.0
) -> jax.Array:
  """REINFORCE for alignments that draw: each draw is rewarded by log p(y) of its token and those after it.

  The baseline is the running mean of the log-likelihood per token, times the tokens to come. Xu et al. 2015, section
  4.1, where `discount` is 1; at 0 a draw earns what its own token does, and looking ahead of what is said is worth
  nothing.

  Raises: UserError when the alignment leaves no log-probabilities of draws [B, T, N] behind.
  """
  if getattr(outputs.state, 'ndim', 0) != 3:
    possible = ', '.join(name for name, row in ALIGNMENTS.items() if row.required_loss == 'reinforce')
    raise UserError(f'auxiliary loss reinforce needs an alignment that draws and learns by it; possible: {possible}')
  real = batch.target_mask
  draws = jnp.diff(outputs.state.astype(jnp.float32), axis=1, prepend=0).sum(axis=-1)
  draws = jnp.where(real, draws, 0.0)
  expected = jax.vmap(lambda means: latent.rewards_to_go(means, discount))(running['log_likelihood'] * real)
  surrogate = jax.vmap(functools.partial(latent.reinforce, entropy=entropy, discount=discount))
  return -jnp.sum(surrogate(draws, log_likelihoods(outputs, batch), expected))


def log_likelihoods(outputs, batch) -> jax.Array:
  """log p(y_t) of the real target tokens, 0 behind the mask: [B, T] float32."""
  logits = jnp.where(batch.target_mask[..., None], outputs.logits.astype(jnp.float32), 0.0)
  chosen = jnp.take_along_axis(logits, batch.target[..., None], axis=-1)[..., 0]
  return jnp.where(batch.target_mask, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)


LOSSES: Mapping[str, AuxiliaryLoss] = {
  'coverage': AuxiliaryLoss(coverage),
  'diagonal': AuxiliaryLoss(diagonal, needs_text=True),
  'doubly_stochastic': AuxiliaryLoss(doubly_stochastic),
  'guided': AuxiliaryLoss(guided, needs_links=True, needs_text=True),
  'reinforce': AuxiliaryLoss(reinforce, uses_weights=False, running=('log_likelihood',)),
}

# What running means may be of: f(outputs, batch) -> a sum over the real target tokens.
RUNNING_METRICS: Mapping[str, Callable[..., jax.Array]] = {
  'log_likelihood': lambda outputs, batch: jnp.sum(log_likelihoods(outputs, batch)),
}


def auxiliary_losses(
  specs: str, needed: str = '', table: Mapping[str, AuxiliaryLoss] | None = None
) -> dict[str, AuxiliaryLoss]:
  """The rows that `specs`, joined by '+', mean, with their options set; `needed` is added unless it is among them.

  Args: table, LOSSES where none is given.

  Raises: UserError for an unknown name or option, with what is possible.
  """
  given = ({needed: {}} if needed else {}) | parse_sum(specs)
  return {name: _with_options(name, options, LOSSES if table is None else table) for name, options in given.items()}


def check_weights(losses: Mapping[str, AuxiliaryLoss], attention) -> None:
  """Raises: UserError for a loss of weights that have no gradient, as those of alignments that draw or round.

  Args: attention, a modules.attention.Attention; None for a decoder that attends to nothing.
  """
  names = ', '.join(name for name, row in losses.items() if row.uses_weights)
  if names and attention is None:
    raise UserError(f'auxiliary loss {names} is of weights, and this decoder attends to nothing; {DISABLE_HINT}')
  if names and not has_gradient(attention.resolved_alignment):
    raise UserError(
      f'auxiliary loss {names} learns through the weights, and those of alignment {attention.alignment!r} have no '
      f'gradient; possible: one that neither draws nor rounds, such as softmax, or gumbel; {DISABLE_HINT}'
    )


def has_gradient(alignment: Row) -> bool:
  """Whether any of many draws of an alignment's weights has a gradient with respect to the query."""
  rngs, rows = jax.random.split(jax.random.key(0), 64), {'score': SCORES['additive'], 'alignment': alignment}
  params = init_params(rngs[0], **rows, query=3, key=3, features=3)
  query, key = jax.random.normal(rngs[1], (2, 4, 3))
  memory = Memory(project(key, params, 'key'), key, jnp.ones(4, bool))

  def weighed(query, rng):
    found = attend(*rows.values(), params, query, memory, rng=rng, deterministic=False)
    return jnp.sum(found.weights * jnp.arange(16.0).reshape(4, 4) ** 2)

  return bool(jax.jit(jax.vmap(jax.grad(weighed), (None, 0)))(query, rngs).any())


def option_schema(row: AuxiliaryLoss) -> dict[str, Option]:
  """Returns the options of an auxiliary loss: those of its function, and the weight and the start of every row."""
  common = {'weight': Option(float, row.weight, Range(0)), 'after': Option(int, row.after, Range(0))}
  return common | schema_of(row.fn)


def _with_options(name: str, options: Mapping[str, float], table: Mapping[str, AuxiliaryLoss]) -> AuxiliaryLoss:
  row = table[choose(name, table, 'auxiliary loss')]
  check_options(f'auxiliary loss {name!r}', options, option_schema(row))
  common = {option: value for option, value in options.items() if option in row._fields}
  specific = {option: value for option, value in options.items() if option not in common}
  return row._replace(fn=functools.partial(row.fn, **specific), **common)


def _seen(outputs, batch) -> jax.Array:
  """The weights [B, T, S] of real target tokens over real source tokens, 0 elsewhere."""
  return jnp.where(batch.target_mask[:, :, None] & batch.source_mask[:, None, :], outputs.weights, 0.0)
