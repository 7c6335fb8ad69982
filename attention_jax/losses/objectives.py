"""What training minimises, chosen by a spec string: `training.objective='minimum_risk(samples=8, after=2000)'`.

An objective is `f(*, options) -> (task -> ObjectiveOutput)`; its keyword defaults are what a spec may set, and it refuses what
they cannot be. Label smoothing and auxiliary losses are those of `losses.sequence_loss`, and go with all of them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from attention_jax.decoding import search
from attention_jax.decoding.sampling import Sampling, sample
from attention_jax.errors import UserError, choose
from attention_jax.losses.sentence_bleu import sentence_bleu
from attention_jax.specs import Count, NonNegative, Positive, Probability, Range, Size, bind, parse
from attention_jax.tokens import EOS, PAD
from attention_jax.training.loss import Sums


class ObjectiveInputs(NamedTuple):
  """What an objective works on.

  Attributes:
    model, params, batch: as everywhere.
    rngs: of the model. rng: of the objective itself.
    running: running means of what it sums, see Objective.
    update: the number of the update, from 1.
    score: Outputs for the batch's targets -> sums 'loss', 'accuracy' and 'tokens' of their cross entropy.
  """

  model: Any
  params: Any
  batch: Any
  rngs: Mapping[str, jax.Array]
  rng: jax.Array | None
  running: Sums
  update: int | jax.Array
  score: Callable[[Any], Sums]

  def read(self, target: jax.Array, rngs: Mapping[str, jax.Array] | None, params: Any = None):
    """Outputs of one pass over all steps, each of which reads the tokens of `target` before it. rngs: None for none."""
    variables, batch = {'params': self.params if params is None else params}, self.batch
    return self.model.apply(variables, batch.source, batch.source_mask, target, deterministic=rngs is None, rngs=rngs)


class ObjectiveOutput(NamedTuple):
  """Sums as a loss has them ('cross_entropy' where it is not the 'loss'), and the passes that auxiliary losses see.

  'loss' has the cross entropy of each pass once, and auxiliary losses are added for each.
  """

  sums: Sums
  passes: tuple[Any, ...]


Build = Callable[..., Callable[[ObjectiveInputs], ObjectiveOutput]]


class Objective(NamedTuple):
  """A row of OBJECTIVES.

  Attributes:
    running: those of its sums whose running means per token it uses.
    uses_references: whether it holds what the model says against the data's target, piece by piece.
  """

  build: Build
  running: tuple[str, ...] = ()
  uses_references: bool = False


def likelihood() -> Callable[[ObjectiveInputs], ObjectiveOutput]:
  """−log p(y | x): teacher forcing, each token after those of the data."""
  return _forced


def _forced(task: ObjectiveInputs) -> ObjectiveOutput:
  outputs = task.read(task.batch.target, task.rngs)
  return ObjectiveOutput(task.score(outputs), (outputs,))


# ---------------------------------------------------------------------------------------------- two passes, one penalty


def r_drop(*, alpha: NonNegative = 5.0) -> Callable[[ObjectiveInputs], ObjectiveOutput]:
  """−log p₁(y) − log p₂(y) + α/2 (KL(p₁‖p₂) + KL(p₂‖p₁)), two passes with dropout of their own. Liang et al. 2021.

  Per token, over the whole vocabulary. Both passes are one program, over twice the rows; it has the logits of both.

  Raises: UserError for a model whose passes are always the same.
  """

  def objective(task: ObjectiveInputs) -> ObjectiveOutput:
    if not _is_random(task):
      raise UserError('objective r_drop: the model drops nothing, so that both passes are one; set model.dropout')

    def one(i):
      return task.read(task.batch.target, _others(task.rngs, i))._replace(linear=())

    both = jax.vmap(one)(jnp.arange(2))  # without `linear`, whose kernel would be copied
    passes = tuple(jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))
    found = list(map(task.score, passes))
    mean = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    apart = divergence(passes[0].logits, passes[1].logits, task.batch.target_mask)
    sums = {'cross_entropy': mean['loss'], 'divergence': apart, 'loss': 2 * mean['loss'] + alpha * apart}
    return ObjectiveOutput(mean | sums, passes)

  return objective


def divergence(first: jax.Array, second: jax.Array, mask: jax.Array) -> jax.Array:
  """Σ over real tokens of ½ (KL(p‖q) + KL(q‖p)) = ½ Σ_v (p_v − q_v)(log p_v − log q_v); logits [B, T, V]."""
  log_p, log_q = (jax.nn.log_softmax(_shown(logits, mask)) for logits in (first, second))
  # Of a token that cannot come, the logarithm is -inf in both.
  ratio = jnp.maximum(log_p, search.IMPOSSIBLE_SCORE) - jnp.maximum(log_q, search.IMPOSSIBLE_SCORE)
  return jnp.sum(jnp.where(mask, jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * ratio, axis=-1) / 2, 0.0))


def _is_random(task: ObjectiveInputs) -> bool:
  """Whether a pass of training asks for randomness; told by shapes alone."""
  try:
    jax.eval_shape(lambda params: task.read(task.batch.target, {}, params), task.params)
  except InvalidRngError:
    return True
  return False


# -------------------------------------------------------------------------------------------------- scheduled sampling


def linear(*, start: Probability = 1.0, slope: NonNegative = 1e-4, least: Probability = 0.5) -> Callable:
  """ε_n = max(least, start − slope n)"""
  return lambda n: jnp.maximum(least, start - slope * n)


def exponential(*, base: Annotated[float, Range(0, 1, include_low=False, include_high=False)] = 0.9999) -> Callable:
  """ε_n = base^n"""
  return lambda n: jnp.exp(n * math.log(base))


def inverse_sigmoid(*, k: Annotated[float, Range(1)] = 1000.0) -> Callable:
  """ε_n = k / (k + exp(n / k))"""
  return lambda n: k / (k + jnp.exp(n / k))


# How likely the decoder is to read the data's token at update n. Bengio et al. 2015, section 2.4.
CURRICULA: Mapping[str, Callable[..., Callable]] = {
  'exponential': exponential,
  'inverse_sigmoid': inverse_sigmoid,
  'linear': linear,
}


def scheduled_sampling(
  *, schedule: str = 'linear', temperature: NonNegative = 1.0
) -> Callable[[ObjectiveInputs], ObjectiveOutput]:
  """−log p(y | x), each token after a mixture of the data's (with probability ε_n at update n) and the model's own.

  Bengio et al. 2015, but in two passes, the same for every decoder (Mihaylova & Martins 2019; Duckworth et al. 2019,
  parallel scheduled sampling): the model's own tokens are what it says after the *data's* tokens, not after its own
  ones. No gradient goes through them or through the pass that they come from. The sum 'own' says how many were read.

  Args: schedule, a spec of CURRICULA; temperature of what is drawn, 0 takes the likeliest.
  """
  curriculum = build_from_spec(schedule, CURRICULA, 'schedule of scheduled_sampling')

  def objective(task: ObjectiveInputs) -> ObjectiveOutput:
    batch, (which, what) = task.batch, jax.random.split(task.rng)
    said = task.read(batch.target, _others(task.rngs, 1), jax.lax.stop_gradient(task.params))
    own = _drawn(what, said.logits, temperature)
    swapped = batch.target_mask & ~jax.random.bernoulli(which, curriculum(task.update), batch.target.shape)
    outputs = task.read(jnp.where(swapped, own, batch.target), task.rngs)
    return ObjectiveOutput(task.score(outputs) | {'own': jnp.sum(swapped, dtype=jnp.float32)}, (outputs,))

  return objective


def _drawn(rng: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
  """A token [B, T] from each logits [B, T, V], of those after which a search goes on. Consumes rng."""
  _, continues = search.ending_and_continuing(logits.shape[-1])
  logits = jnp.where(continues[None, None], logits, -jnp.inf)
  found = jax.random.categorical(rng, logits / temperature) if temperature else logits.argmax(-1)
  return found.astype(jnp.int32)


# ---------------------------------------------------------------------------------- what sampled hypotheses are worth


def minimum_risk(
  *,
  samples: Annotated[int, Range(2)] = 8,
  sharpness: Positive = 0.005,
  gold: bool = True,
  likelihood: NonNegative = 0.0,
  after: Count = 0,
) -> Callable[[ObjectiveInputs], ObjectiveOutput]:
  """Σ_y Q(y | x) (1 − BLEU(y)), Q ∝ p(y | x)^sharpness over the different samples. Shen et al. 2016, minimum risk.

  A sentence counts once, whatever its length. Samples are drawn, and what is minimised is computed, without dropout;
  what is left of the likelihood has it. Logits of all samples are in memory at once (training.accumulate makes parts).

  Args:
    samples: of each source, 2 or more; those that were drawn twice count once.
    gold: whether the target of the data is among them, as in the paper.
    sharpness: the paper's. It is also a factor of the gradient, which it makes some thousand times smaller than that of
      the likelihood: Adam, which remembers the latter for as many updates, hardly moves after the change (measured on
      dates). A greater one, or a `likelihood` beside it, goes on.
    likelihood: factor of −log p of the data's target beside it.
    after: so many updates of likelihood alone come first. Nothing is drawn in them, but room for the gradient of the
      samples is made: they take 1.7 times as long as plain ones, and those after them 10 times (8 samples, dates, CPU).
  """

  def risk(task: ObjectiveInputs) -> tuple[jax.Array, jax.Array]:
    drawn = _samples(task, samples)
    tokens = jnp.concatenate([drawn, _targets(task)[None]]) if gold else drawn
    worth = _worth(task, tokens)
    scores = jnp.where(_first_of_equals(tokens), sharpness * _log_probs(task, tokens, goes_on_anyway=True), -jnp.inf)
    expected = jnp.sum(jax.nn.softmax(scores, axis=0) * (1.0 - worth), axis=0)
    return expected, worth[:samples].mean(0)

  return functools.partial(_mixed, risk, likelihood, after)


class Baseline(NamedTuple):
  """What rewards [K, B] are compared with: (task, rewards) -> [K, B] or [1, B]; samples, the fewest it needs."""

  fn: Callable[[ObjectiveInputs, jax.Array], jax.Array]
  samples: int = 1


BASELINES: Mapping[str, Baseline] = {
  # the mean of the other samples of the same source (Kool, van Hoof & Welling 2019)
  'others': Baseline(lambda task, rewards: (rewards.sum(0, keepdims=True) - rewards) / (len(rewards) - 1), samples=2),
  # the running mean over updates, each sentence weighted by its target's length
  'running': Baseline(lambda task, rewards: jnp.full_like(rewards, task.running['bleu'])),
  # what greedy search finds (Rennie et al. 2017, self-critical)
  'greedy': Baseline(lambda task, rewards: _worth(task, _greedy(task))),
}


def reinforce(
  *, samples: Size = 4, baseline: str = 'others', likelihood: NonNegative = 0.017, after: Count = 0
) -> Callable[[ObjectiveInputs], ObjectiveOutput]:
  """−E[BLEU(y)], y ~ p(y | x), by REINFORCE: −Σ (BLEU(y) − b) log p(y | x) of samples. Ranzato et al. 2016.

  The gradient is unbiased: what is drawn and what is differentiated is one policy, that of the model at test (without
  dropout, no PAD or BOS, EOS at the last step of the bucket). Mixed with the likelihood as by Wu et al. 2016.

  Args:
    samples: of each source.
    baseline: a row of BASELINES.
    likelihood, after: as of minimum_risk.
  """
  row = BASELINES[choose(baseline, BASELINES, 'baseline of reinforce')]
  if samples < row.samples:
    needed = f'at least {row.samples} with baseline {baseline!r}'
    raise UserError(f'objective reinforce: option samples must be {needed}, got {samples}')

  def surrogate(task: ObjectiveInputs) -> tuple[jax.Array, jax.Array]:
    tokens = _samples(task, samples)
    worth = _worth(task, tokens)
    better = jax.lax.stop_gradient(worth - row.fn(task, worth))
    return -jnp.mean(better * _log_probs(task, tokens), axis=0), worth.mean(0)

  return functools.partial(_mixed, surrogate, likelihood, after)


def _mixed(of_samples: Callable, weight: float, after: int, task: ObjectiveInputs) -> ObjectiveOutput:
  """Sums 'risk' and 'bleu' of samples [B] (BLEU times the target's length: a mean per token), beside the likelihood."""
  plain, passes = _forced(task)
  real = task.batch.target_mask

  def found():
    risk, bleu = of_samples(task)
    return jnp.sum(jnp.where(real.any(-1), risk, 0.0)), jnp.sum(bleu * real.sum(-1))

  then = jnp.asarray(task.update > after)
  nothing = lambda: (jnp.zeros(()), jnp.zeros(()))
  risk, bleu = jax.lax.cond(then, found, nothing) if after else found()
  total = jnp.where(then, weight, 1.0) * plain['loss'] + risk
  return ObjectiveOutput({**plain, 'cross_entropy': plain['loss'], 'risk': risk, 'bleu': bleu, 'loss': total}, passes)


def _stepping(task: ObjectiveInputs) -> tuple[Callable, Any, Any]:
  """The model's step, first carry and memory, as a search has them; no gradient goes through."""
  variables, batch = {'params': jax.lax.stop_gradient(task.params)}, task.batch
  steps = batch.target.shape[1]
  carry, memory = task.model.apply(variables, batch.source, batch.source_mask, steps, method='start')
  return lambda *given: task.model.apply(variables, *given, method='step'), carry, memory


def _samples(task: ObjectiveInputs, samples: int) -> jax.Array:
  """Hypotheses [K, B, T] of at most as many tokens as the bucket's targets have, PAD after their EOS."""
  steps, rngs = task.batch.target.shape[1], jax.random.split(task.rng, len(task.batch.target))
  given = {'sampling': Sampling(samples), 'max_length': steps, 'source_mask': task.batch.source_mask}
  return jnp.moveaxis(sample(*_stepping(task), rngs, **given).tokens, 1, 0)


def _greedy(task: ObjectiveInputs) -> jax.Array:
  given = {'max_length': task.batch.target.shape[1], 'source_mask': task.batch.source_mask}
  return jnp.moveaxis(search.greedy(*_stepping(task), **given).tokens, 1, 0)


def _targets(task: ObjectiveInputs) -> jax.Array:
  return jnp.where(task.batch.target_mask, task.batch.target, PAD)


def _worth(task: ObjectiveInputs, tokens: jax.Array) -> jax.Array:
  """BLEU [K, B] of hypotheses [K, B, T] against the batch's targets, both without their EOS."""
  wanted = _targets(task)
  real = lambda ids: (ids != PAD) & (ids != EOS)
  one = jax.vmap(sentence_bleu)
  return jax.vmap(lambda ids: one(ids, real(ids), wanted, real(wanted)))(tokens)


def _log_probs(task: ObjectiveInputs, tokens: jax.Array, goes_on_anyway: bool = False) -> jax.Array:
  """log p(y | x) [K, B] of hypotheses [K, B, T], without dropout.

  p is what they are drawn from, which says neither PAD nor BOS and ends at the last step; or, if the model
  `goes_on_anyway`, what it says itself.
  """

  def of(tokens):
    real = tokens != PAD
    logits = _shown(task.read(tokens, None).logits, real)
    if not goes_on_anyway:
      ends, continues = search.ending_and_continuing(logits.shape[-1])
      last = jnp.arange(tokens.shape[1])[:, None] == tokens.shape[1] - 1
      logits = jnp.where(jnp.where(last, ends[None], (continues | ends)[None])[None], logits, -jnp.inf)
    said = jnp.where(real, tokens, EOS)[..., None]  # EOS may come at any step
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), said, axis=-1)[..., 0]
    return jnp.sum(jnp.where(real, chosen, 0.0), axis=-1)

  return jax.vmap(of)(tokens)


def _first_of_equals(tokens: jax.Array) -> jax.Array:
  """[K, B]: which hypotheses [K, B, T] are not among those before them."""
  same = jnp.all(tokens[:, None] == tokens[None], axis=-1)
  return ~jnp.any(same & jnp.tril(jnp.ones(same.shape[:2], bool), -1)[..., None], axis=1)


# --------------------------------------------------------------------------------------------------------------- specs

OBJECTIVES: Mapping[str, Objective] = {
  'likelihood': Objective(likelihood),
  'minimum_risk': Objective(minimum_risk, uses_references=True),
  'r_drop': Objective(r_drop),
  'reinforce': Objective(reinforce, ('bleu',), uses_references=True),
  'scheduled_sampling': Objective(scheduled_sampling),
}


def make_objective(spec: str) -> tuple[Callable[[ObjectiveInputs], ObjectiveOutput], tuple[str, ...]]:
  """The objective that `spec` names, and those of its sums whose running means it uses.

  Raises: UserError for an unknown name or option, or a value that means nothing.
  """
  builders = {name: row.build for name, row in OBJECTIVES.items()}
  return build_from_spec(spec, builders, 'objective'), OBJECTIVES[parse(spec)[0]].running


def build_from_spec(spec: str, table: Mapping[str, Callable], what: str) -> Callable:
  """Calls the function of `table` that `spec` selects with the options that it sets."""
  _, build, options = bind(spec, table, what)
  return build(**options)


def _others(rngs: Mapping[str, jax.Array], number: int | jax.Array) -> dict[str, jax.Array]:
  """Randomness of a pass of its own."""
  return {name: jax.random.fold_in(rng, number) for name, rng in rngs.items()}


def _shown(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """float32 logits [B, T, V], 0 behind the mask."""
  return jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
