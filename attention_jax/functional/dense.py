"""Alignments over the whole memory: softmax and its relatives. Their table is ALIGNMENTS in alignments.py."""

import functools
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from attention_jax.annotations import Array, Bool, Float
from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32, min_finite
from attention_jax.functional.table import SoftmaxTerms

Scores = Float[Array, ' S']
Mask = Bool[Array, ' S']
Weights = Float[Array, ' S']
Counts = int | Float[Array, '...']
NUMBERS = int | float | np.number  # options whose values are checked


def check_single_query(alignment: Callable) -> Callable:
  """Decorates an alignment: raises UserError unless scores and mask are [S], instead of mixing queries."""

  @functools.wraps(alignment)
  def checked(scores, mask, *args, **options):
    if jnp.ndim(scores) != 1 or jnp.shape(mask) != jnp.shape(scores):
      raise UserError(
        f'{alignment.__name__}: scores and mask must be [S], those of one query, got {list(jnp.shape(scores))} and '
        f'{list(jnp.shape(mask))}; for several queries use jax.vmap or attend'
      )
    # Not asarray: jax.vmap leaves NumPy arrays as they are, and custom derivatives in a scan do not accept them.
    return alignment(jnp.array(scores), jnp.array(mask), *args, **options)

  return checked


@check_single_query
def softmax(
  scores: Scores,
  mask: Mask,
  *,
  temperature: float | Float[Array, ''] = 1.0,
  length_scale: float | Float[Array, ''] | None = None,
  cap: float | Float[Array, ''] | None = None,
  sink: float | Float[Array, ''] | None = None,
) -> Weights:
  """wₛ = exp(fₛ) / Σ exp(f), f = e/τ. Bahdanau, Cho & Bengio 2015, equation 6.

  The options combine, and apply in the order of the arguments: f = e a log(n) / τ with a length scale a, as in
  `scalable_softmax`; then f = c tanh(f/c) with a cap c, as in `capped_softmax`; and wₛ = exp(fₛ) / (exp(b) + Σ exp(f))
  with a sink b, as in `sink_softmax`. A spec string makes a length scale or a sink a learned parameter by True:
  `'softmax(temperature=0.5, cap=30.0, sink=True)'`.

  Raises:
    UserError: if the temperature is a number that is not positive, or the cap one that is not positive and finite.
  """
  _check_options('softmax', temperature, length_scale, cap, sink)
  scores = at_least_float32(scores)
  scores = scores / jnp.asarray(temperature, scores.dtype)
  if length_scale is not None:
    count = jnp.maximum(jnp.sum(mask), 1).astype(scores.dtype)
    finite_scores = jnp.where(mask, clamp_to_finite(scores), 0.0)
    scores = jnp.asarray(length_scale, scores.dtype) * jnp.log(count) * finite_scores
  if cap is not None:
    scores = soft_cap(jnp.asarray(cap, scores.dtype), jnp.where(mask, scores, 0.0))
  if sink is None:
    return _softmax(scores, mask)
  return _softmax(jnp.append(scores, jnp.asarray(sink, scores.dtype)), jnp.append(mask, jnp.any(mask)))[:-1]


def _softmax(scores: Scores, mask: Mask) -> Weights:
  # Double where (the first one in subtract_max): exp of a masked score may be inf, and 0 · inf would make the gradient
  # NaN.
  return normalised(jnp.where(mask, jnp.exp(subtract_max(scores, mask)), 0.0))


def _check_options(name: str, temperature, length_scale, cap, sink) -> None:
  """Checks the options of `softmax`; `name` is that of the alignment, for error messages."""
  check_temperature(name, temperature)
  for option, value in (('length_scale', length_scale), ('sink', sink)):
    if value is not None:
      check_number(name, option, value)
  if cap is not None:
    check_cap(cap, name)


def strip_options(fn: Callable) -> Callable:
  """Returns the function of an alignment without the options that a spec string has bound to it."""
  return fn.func if isinstance(fn, functools.partial) and not fn.args else fn


def differs_from_softmax(fn: Callable) -> str:
  """Returns why `fn` is not `softmax` with no option but the temperature, or ''."""
  if strip_options(fn) is not softmax:
    return 'the alignment is not softmax or has an edit'
  options = inspect.signature(fn).parameters
  is_plain = all(options[name].default is None for name in ('length_scale', 'cap', 'sink'))
  return '' if is_plain else 'softmax has a length scale, a cap or a sink'


def softmax_temperature(fn: Callable) -> float | Float[Array, '']:
  """Returns the temperature that is bound to `fn`, a plain softmax.

  Raises:
    UserError: if the temperature is a number that is not positive.
  """
  temperature = getattr(fn, 'keywords', {}).get('temperature', 1.0)
  check_temperature('softmax', temperature)
  return temperature


def softmax_terms(
  count: Counts,
  *,
  temperature: float | Float[Array, ''] = 1.0,
  length_scale: float | Float[Array, ''] | None = None,
  cap: float | Float[Array, ''] | None = None,
  sink: float | Float[Array, ''] | None = None,
) -> SoftmaxTerms:
  """The terms of `softmax`. Raises UserError as `softmax`."""
  _check_options('softmax', temperature, length_scale, cap, sink)
  scale = 1 / jnp.asarray(temperature)
  if length_scale is not None:
    scale = scale * jnp.asarray(length_scale) * jnp.log(jnp.maximum(count, 1))
  transform = None if cap is None else Partial(soft_cap, cap)
  return SoftmaxTerms(scale, transform, None if sink is None else jnp.asarray(sink))


@check_single_query
def sigmoid(scores: Scores, mask: Mask) -> Weights:
  """wₛ = 1 / (1 + exp(-eₛ)): independent positions, whose weights need not sum to 1."""
  return jnp.where(mask, jax.nn.sigmoid(jnp.where(mask, at_least_float32(scores), 0.0)), 0.0)


@check_single_query
def sigmoid_by_length(scores: Scores, mask: Mask) -> Weights:
  """wₛ = 1 / (1 + n exp(-eₛ)), n the number of unmasked positions: a sigmoid of eₛ - log n. Ramapuram et al. 2025.

  Scores of 0 get weights 1 / (1 + n): their sum is near 1, as with softmax, unless there are few positions.
  """
  scores = at_least_float32(scores)
  return sigmoid(scores - jnp.log(jnp.maximum(jnp.sum(mask), 1).astype(scores.dtype)), mask)


@check_single_query
def softpick(scores: Scores, mask: Mask) -> Weights:
  """wₛ = max(exp(eₛ) - 1, 0) / Σ |exp(e) - 1|: 0 for scores below 0, so that no position has to take weight.

  Zuhri, Fuadi & Aji 2025. The sum of the weights is below 1 if a score is negative.
  """
  scores = jnp.where(mask, clamp_to_finite(at_least_float32(scores)), 0.0)
  top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores), 0.0))
  # (exp(e) - 1) exp(-top) without overflow, and without cancellation near 0.
  distance = -jnp.expm1(-jnp.abs(scores))
  terms = jnp.where(scores > 0, jnp.exp(scores - top), -jnp.exp(-top)) * distance
  largest = jax.lax.stop_gradient(jnp.max(jnp.abs(terms)))
  terms = terms / jnp.where(largest > 0, largest, 1.0)  # the square of a small sum would be 0 in its gradient
  total = jnp.sum(jnp.abs(terms))
  return jax.nn.relu(terms) / jnp.where(total > 0, total, 1.0)


@check_single_query
def smoothed(scores: Scores, mask: Mask) -> Weights:
  """wₛ = σ(eₛ) / Σ σ(e): σ is bounded, so several positions share the weight. Chorowski et al. 2015 (smoothing)."""
  # In logs, because sigmoids of low scores would underflow before they are normalised.
  logs = jax.nn.log_sigmoid(jnp.where(mask, at_least_float32(scores), 0.0))
  return softmax(logs, mask)


def smoothed_terms(count: Counts) -> SoftmaxTerms:
  """The terms of `smoothed`."""
  return SoftmaxTerms(1.0, Partial(jax.nn.log_sigmoid))


@check_single_query
def sink_softmax(scores: Scores, mask: Mask, *, sink: float | Float[Array, '']) -> Weights:
  """wₛ = exp(eₛ) / (exp(b) + Σ exp(e)): a learned sink b takes the weight that no position gets. OpenAI 2025, gpt-oss.

  With `sink_softmax(sink=0.0)` it is softmax-off-by-one (Miller 2023), and softmax in the limit of b = -∞.
  """
  check_number('sink_softmax', 'sink', sink)
  return softmax(scores, mask, sink=sink)


def sink_terms(count: Counts, *, sink: float | Float[Array, '']) -> SoftmaxTerms:
  """The terms of `sink_softmax`."""
  check_number('sink_softmax', 'sink', sink)
  return softmax_terms(count, sink=sink)


@check_single_query
def scalable_softmax(scores: Scores, mask: Mask, *, scale: float | Float[Array, '']) -> Weights:
  """wₛ = n^(a eₛ) / Σ n^(a e), n the number of unmasked positions: as sharp for long sources as for short ones.

  Nakanishi 2025, Scalable-Softmax, without the bias parameter. The initial scale is 0.43, for which it is softmax over
  ten positions.
  """
  check_number('scalable_softmax', 'scale', scale)
  return softmax(scores, mask, length_scale=scale)


def scalable_terms(count: Counts, *, scale: float | Float[Array, '']) -> SoftmaxTerms:
  """The terms of `scalable_softmax`."""
  check_number('scalable_softmax', 'scale', scale)
  return softmax_terms(count, length_scale=scale)


@check_single_query
def capped_softmax(scores: Scores, mask: Mask, *, cap: float | Float[Array, ''] = 50.0) -> Weights:
  """softmax(c tanh(eₛ/c)): scores stay between -c and c. Bello et al. 2017; Gemma Team 2024, Gemma 2.

  Raises:
    UserError: if the cap c is a number that is not positive and finite.
  """
  check_cap(cap)
  return softmax(scores, mask, cap=cap)


def capped_terms(count: Counts, *, cap: float | Float[Array, ''] = 50.0) -> SoftmaxTerms:
  """The terms of `capped_softmax`. Raises UserError if the cap is a number that is not positive and finite."""
  check_cap(cap)
  return softmax_terms(count, cap=cap)


def soft_cap(cap: float | Float[Array, ''], scores: Float[Array, '...']) -> Float[Array, '...']:
  """Returns c tanh(e/c), between -c and c and near e where |e| is small."""
  return cap * jnp.tanh(scores / cap)


def check_cap(cap: float | Array, name: str = 'capped_softmax') -> None:
  """Raises UserError unless `cap` is one number, positive and finite; the value of an array is not checked."""
  check_number(name, 'cap', cap)
  if isinstance(cap, NUMBERS) and not 0 < cap < math.inf:
    raise UserError(f'{name}: cap must be greater than 0 and finite, got {cap}')


@check_single_query
def proportional(scores: Scores, mask: Mask) -> Weights:
  """wₛ = [eₛ]₊ / Σ [e]₊: for scores that are not negative, such as `elu_dot`. Katharopoulos et al. 2020, equation 3."""
  positive = jnp.maximum(jnp.where(mask, clamp_to_finite(at_least_float32(scores)), 0.0), 0.0)
  top = jax.lax.stop_gradient(jnp.max(positive))
  return normalised(positive / jnp.where(top > 0, top, 1.0))  # the sum of large scores would overflow


@check_single_query
def stick_breaking(scores: Scores, mask: Mask) -> Weights:
  """wₛ = σ(eₛ) Π_{r>s} (1 - σ(eᵣ)): from the last position back, each takes a share of what is left. Tan et al. 2025.

  Weights need not sum to 1. Of equal scores, that of the last position gets the largest weight, so that a causal
  decoder needs no positions. In the paper a token does not attend to itself; here the mask alone decides.
  """
  scores = jnp.where(mask, clamp_to_finite(at_least_float32(scores)), 0.0)
  log_rest = jnp.where(mask, jax.nn.log_sigmoid(-scores), 0.0)
  log_rest_after = jax.lax.cumsum(jnp.append(log_rest[1:], jnp.zeros_like(scores[:1])), reverse=True)
  return jnp.where(mask, jnp.exp(jax.nn.log_sigmoid(scores) + log_rest_after), 0.0)


@check_single_query
def hardmax(scores: Scores, mask: Mask) -> Weights:
  """1 at the largest score (the first of equals), 0 elsewhere; no gradient."""
  # Clamped, so that an unmasked score of -inf is still larger than those of masked positions.
  scores = jnp.where(mask, clamp_to_finite(at_least_float32(scores)), -jnp.inf)
  return jnp.where(mask, jax.nn.one_hot(jnp.argmax(scores), scores.size, dtype=scores.dtype), 0.0)


@check_single_query
def coverage_penalised(
  scores: Scores, mask: Mask, *, coverage: Float[Array, ' S'], penalty: float | Float[Array, ''] = 1.0
) -> Weights:
  """softmax(eₛ - λ cₛ): positions get less weight the more weight they had before; c is the sum of all weights so far.

  Raises:
    UserError: if the penalty λ is a negative number.
  """
  check_at_least('coverage_penalised', 'penalty', penalty, 0)
  scores = at_least_float32(scores)
  return softmax(scores - penalty * coverage.astype(scores.dtype), mask)


def subtract_max(scores: Scores, mask: Mask) -> Scores:
  """Returns scores minus the largest unmasked one (constant for the gradient), and 0 where masked; never above 0."""
  scores = clamp_to_finite(scores)
  top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, min_finite(scores.dtype))))
  return jnp.where(mask, scores - top, 0.0)


@jax.custom_jvp
def clamp_to_finite(scores: Scores) -> Scores:
  """Returns finite scores unchanged and infinite ones as the nearest finite number, with the gradient of the identity.

  The clamp also prevents the compiler from combining the last product of a score and the subtraction of the maximum
  into a fused multiply-add. That would not round the product, while the maximum is rounded: a large score could exceed
  its own maximum.
  """
  info = jnp.finfo(scores.dtype)
  return jax.lax.clamp(jnp.asarray(info.min, scores.dtype), scores, jnp.asarray(info.max, scores.dtype))


@clamp_to_finite.defjvp
def _(primals, tangents):
  return clamp_to_finite(*primals), tangents[0]


def normalised(weights: Weights) -> Weights:
  """Returns weights divided by their sum, or zeros if all of them are 0."""
  total = jnp.sum(weights)
  return weights / jnp.where(total > 0, total, 1.0)


def log_softmax(scores: Scores, mask: Mask) -> Scores:
  """Returns the logarithms of the softmax weights, and 0 where masked."""
  scores = at_least_float32(scores)
  shifted = subtract_max(scores, mask)
  total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0.0))
  return jnp.where(mask, shifted - jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


def log_sum_exp(scores: Scores, mask: Mask) -> Float[Array, '']:
  """Returns log Σ exp(e) over the unmasked scores, at least float32; -inf, without gradient, if there are none."""
  scores = at_least_float32(scores)
  shifted = subtract_max(scores, mask)  # top - top is 0: adding the top back has no gradient of its own
  total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0.0))
  top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, clamp_to_finite(scores), min_finite(scores.dtype))))
  return jnp.where(jnp.any(mask), top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def check_number(name: str, option: str, value: float | Array) -> None:
  """Raises UserError for a vector: it would be one number per position, or in some implementations per query."""
  if isinstance(value, bool):
    raise UserError(f'{name}: {option} must be one number, got {value}; only a spec string makes it learned by True')
  if shape := jnp.shape(value):
    raise UserError(f'{name}: {option} must be one number, got an array of shape {list(shape)}')


def check_temperature(name: str, temperature: float | Array) -> None:
  """Raises UserError unless `temperature` is one number and positive; the value of an array is not checked."""
  check_number(name, 'temperature', temperature)
  if isinstance(temperature, NUMBERS) and not temperature > 0:
    hint = " ('hardmax' is the limit at 0)" if name == 'softmax' else ''
    raise UserError(f'{name}: temperature must be greater than 0, got {temperature}{hint}')


def check_at_least(name: str, option: str, value: float | Array, minimum: float) -> None:
  """Checks that an option is one number; the value of an array is not checked.

  Args:
    name: name of the variant, for the error message.
    option: name of the option, for the error message.
    value: the value of the option.
    minimum: the smallest allowed value.

  Raises:
    UserError: for a number below `minimum`, and for a vector.
  """
  check_number(name, option, value)
  if isinstance(value, NUMBERS) and not value >= minimum:
    raise UserError(f'{name}: {option} must be at least {minimum}, got {value}')
