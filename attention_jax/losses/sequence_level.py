"""Sequence-level objectives: minimum risk and REINFORCE with sentence BLEU of sampled hypotheses."""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.decoding import search
from attention_jax.decoding.generate import end_and_continuation_masks
from attention_jax.decoding.sampling import Sampling, sample
from attention_jax.errors import UserError, choose
from attention_jax.losses.base import ObjectiveFn, ObjectiveInputs, ObjectiveOutput, masked_logits, teacher_forcing
from attention_jax.losses.sentence_bleu import sentence_bleu
from attention_jax.specs import MAX_REPEATS, Count, NonNegative, Positive, Range, Repeats
from attention_jax.tokens import EOS, PAD

SampleLoss = Callable[[ObjectiveInputs], tuple[jax.Array, jax.Array]]  # -> loss [B], mean BLEU of the samples [B]


def minimum_risk(
  *,
  samples: Annotated[int, Range(2, MAX_REPEATS)] = 8,
  sharpness: Positive = 0.005,
  gold: bool = True,
  likelihood: NonNegative = 0.0,
  after: Count = 0,
) -> ObjectiveFn:
  """Σ_y Q(y | x) (1 − BLEU(y)), Q ∝ p(y | x)^sharpness over the distinct samples. Shen et al. 2016, minimum risk.

  Each sentence counts once, whatever its length. Sampling and the risk use no dropout; the likelihood term does. The
  logits of all samples are in memory at once; config.training.accumulate splits the batch to reduce them.

  Args:
    samples: samples per source; duplicates count once.
    sharpness: as in the paper. It is also a factor of the gradient, which becomes some thousand times smaller than that
      of the likelihood. After the change from the likelihood to the risk, the updates of Adam are tiny until its second
      moments have decayed (measured with configs/dates.py). A greater sharpness, or a `likelihood` term, avoids this.
    gold: whether the data's target joins the samples, as in the paper.
    likelihood: factor of −log p of the data's target (with label smoothing), added to the risk.
    after: number of updates at the start that train with the likelihood alone. They draw no samples, but reserve memory
      for the gradient of the samples: they take 1.7 times as long as updates of the objective `likelihood`, and later
      updates 10 times as long (8 samples, configs/dates.py, CPU).
  """

  def risk(inputs: ObjectiveInputs) -> tuple[jax.Array, jax.Array]:
    sampled = _samples(inputs, samples)
    tokens = jnp.concatenate([sampled, _targets(inputs)[None]]) if gold else sampled
    bleu = _bleu(inputs, tokens)
    is_distinct = _is_first_occurrence(tokens)
    scores = jnp.where(is_distinct, sharpness * _log_probs(inputs, tokens, restrict=False), -jnp.inf)
    expected_risk = jnp.sum(jax.nn.softmax(scores, axis=0) * (1.0 - bleu), axis=0)
    return expected_risk, bleu[:samples].mean(0)

  return functools.partial(_with_likelihood, risk, likelihood, after)


class Baseline(NamedTuple):
  """Baseline of the rewards.

  Attributes:
    fn: (inputs, rewards [K, B] of K samples of each source) -> [K, B] or [1, B].
    min_samples: the smallest K.
  """

  fn: Callable[[ObjectiveInputs, jax.Array], jax.Array]
  min_samples: int = 1


def leave_one_out(inputs: ObjectiveInputs, rewards: jax.Array) -> jax.Array:
  """Mean reward of the other samples of the same source. Kool, van Hoof & Welling 2019."""
  return (rewards.sum(0, keepdims=True) - rewards) / (len(rewards) - 1)


def running_mean(inputs: ObjectiveInputs, rewards: jax.Array) -> jax.Array:
  """Running mean of BLEU over updates, each sentence weighted by the length of its target."""
  return jnp.full_like(rewards, inputs.running['bleu'])


def greedy_reward(inputs: ObjectiveInputs, rewards: jax.Array) -> jax.Array:
  """Reward of the greedy hypothesis. Rennie et al. 2017, self-critical."""
  return _bleu(inputs, _greedy(inputs))


BASELINES: Mapping[str, Baseline] = {
  'leave_one_out': Baseline(leave_one_out, min_samples=2),
  'running': Baseline(running_mean),
  'greedy': Baseline(greedy_reward),
}


def reinforce(
  *, samples: Repeats = 4, baseline: str = 'leave_one_out', likelihood: NonNegative = 0.017, after: Count = 0
) -> ObjectiveFn:
  """−E[BLEU(y)], y ~ p(y | x), by REINFORCE: −(BLEU(y) − b) log p(y | x), mean of samples. Ranzato et al. 2016.

  The gradient is unbiased: samples and gradient come from the same policy, that of the model at test time (no dropout,
  no PAD or BOS, EOS at the last step of the bucket). It is combined with the likelihood as in Wu et al. 2016.

  Args:
    samples: samples per source.
    baseline: b, a key of BASELINES.
    likelihood: as in minimum_risk.
    after: as in minimum_risk.

  Raises:
    UserError: for an unknown baseline, or too few samples for it.
  """
  row = BASELINES[choose(baseline, BASELINES, 'baseline of reinforce')]
  if samples < row.min_samples:
    expected = f'at least {row.min_samples} with baseline {baseline!r}'
    raise UserError(f'objective reinforce: option samples must be {expected}, got {samples}')

  def surrogate(inputs: ObjectiveInputs) -> tuple[jax.Array, jax.Array]:
    tokens = _samples(inputs, samples)
    bleu = _bleu(inputs, tokens)
    advantage = jax.lax.stop_gradient(bleu - row.fn(inputs, bleu))
    return -jnp.mean(advantage * _log_probs(inputs, tokens), axis=0), bleu.mean(0)

  return functools.partial(_with_likelihood, surrogate, likelihood, after)


def _with_likelihood(sample_loss: SampleLoss, weight: float, after: int, inputs: ObjectiveInputs) -> ObjectiveOutput:
  """Adds the loss of samples to `weight` times the likelihood; up to update `after`, returns the likelihood alone.

  The sum 'bleu' is weighted by the lengths of the targets, because it is divided by the number of target tokens.
  """
  forced_sums, passes = teacher_forcing(inputs)
  target_mask = inputs.batch.target_mask

  def sample_sums():
    loss, bleu = sample_loss(inputs)
    return jnp.sum(jnp.where(target_mask.any(-1), loss, 0.0)), jnp.sum(bleu * target_mask.sum(-1))

  def zeros():
    return jnp.zeros(()), jnp.zeros(())

  has_started = jnp.asarray(inputs.update > after)
  risk, bleu = jax.lax.cond(has_started, sample_sums, zeros) if after else sample_sums()
  total = jnp.where(has_started, weight, 1.0) * forced_sums['loss'] + risk
  sums = {**forced_sums, 'cross_entropy': forced_sums['loss'], 'risk': risk, 'bleu': bleu, 'loss': total}
  return ObjectiveOutput(sums, passes)


def _search_inputs(inputs: ObjectiveInputs) -> tuple[Callable, Any, Any]:
  """Step, first carry and memory of the model as a search needs them, without gradients."""
  variables = {'params': jax.lax.stop_gradient(inputs.params)}
  batch = inputs.batch
  max_length = batch.target.shape[1]
  carry, memory = inputs.model.apply(variables, batch.source, batch.source_mask, max_length, method='start')

  def step(*args):
    return inputs.model.apply(variables, *args, method='step')

  return step, carry, memory


def _samples(inputs: ObjectiveInputs, samples: int) -> jax.Array:
  """Sampled hypotheses [K, B, T], at most as long as the targets of the bucket, PAD after EOS."""
  batch = inputs.batch
  rngs = jax.random.split(inputs.rng, len(batch.target))
  hypotheses = sample(
    *_search_inputs(inputs),
    rngs,
    sampling=Sampling(samples),
    max_length=batch.target.shape[1],
    source_mask=batch.source_mask,
  )
  return jnp.moveaxis(hypotheses.tokens, 1, 0)


def _greedy(inputs: ObjectiveInputs) -> jax.Array:
  """Greedy hypotheses [1, B, T], PAD after EOS."""
  batch = inputs.batch
  hypotheses = search.greedy(*_search_inputs(inputs), max_length=batch.target.shape[1], source_mask=batch.source_mask)
  return jnp.moveaxis(hypotheses.tokens, 1, 0)


def _targets(inputs: ObjectiveInputs) -> jax.Array:
  return jnp.where(inputs.batch.target_mask, inputs.batch.target, PAD)


def _bleu(inputs: ObjectiveInputs, tokens: jax.Array) -> jax.Array:
  """BLEU [K, B] of hypotheses [K, B, T] against the batch's targets, both without EOS."""
  references = _targets(inputs)

  def is_word(ids):
    return (ids != PAD) & (ids != EOS)

  bleu_of_rows = jax.vmap(sentence_bleu)
  return jax.vmap(lambda ids: bleu_of_rows(ids, is_word(ids), references, is_word(references)))(tokens)


def _log_probs(inputs: ObjectiveInputs, tokens: jax.Array, restrict: bool = True) -> jax.Array:
  """log p(y | x) [K, B] of hypotheses [K, B, T], without dropout.

  Args:
    inputs: inputs of the objective.
    tokens: [K, B, T] ids, PAD after EOS.
    restrict: whether p is the sampling policy, which never emits PAD or BOS and emits EOS at the last step; otherwise
      it is the distribution of the model itself.
  """

  def log_prob(tokens):
    mask = tokens != PAD
    logits = masked_logits(inputs.forward(tokens, None).logits, mask)
    if restrict:
      ends, continues = end_and_continuation_masks(logits.shape[-1])
      is_last = jnp.arange(tokens.shape[1])[:, None] == tokens.shape[1] - 1
      allowed = jnp.where(is_last, ends[None], (continues | ends)[None])
      logits = jnp.where(allowed[None], logits, -jnp.inf)
    ids = jnp.where(mask, tokens, EOS)[..., None]  # EOS is allowed at every step, so that masked steps stay finite
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=-1)[..., 0]
    return jnp.sum(jnp.where(mask, chosen, 0.0), axis=-1)

  return jax.vmap(log_prob)(tokens)


def _is_first_occurrence(tokens: jax.Array) -> jax.Array:
  """Whether each hypothesis of [K, B, T] differs from the hypotheses of its source before it, [K, B]."""
  same = jnp.all(tokens[:, None] == tokens[None], axis=-1)
  return ~jnp.any(same & jnp.tril(jnp.ones(same.shape[:2], bool), -1)[..., None], axis=1)
