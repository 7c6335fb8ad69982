"""The table of analyses of one source and one target by a trained model: what `inspect_attention --analyses` computes.

An analysis is `f(subject, *, ...) -> Measurement`; its keyword-only arguments are the options of its spec string.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import agreement, alignment, attributions, heads, norms, statistics, through_layers
from attention_jax.analysis.interventions import (
  AnalysedPair,
  edited_model,
  encoder_weights,
  output_log_probs,
  source_updates,
  source_vectors,
  target_log_probs,
  value_vectors,
  with_vectors,
)
from attention_jax.analysis.reading import Measurement
from attention_jax.errors import UserError
from attention_jax.functional.edits import check_indices, replace_weights
from attention_jax.specs import Positive, Size, bind, schema_of


class Subject(NamedTuple):
  """Input of an analysis: a model with one source and one target.

  Attributes:
    pair: model, parameters, source and target.
    source_tokens: S tokens, EOS included.
    target_tokens: T tokens, EOS included.
    weights: attention weights [T, S] of the target by teacher forcing.
  """

  pair: AnalysedPair
  source_tokens: Sequence[str]
  target_tokens: Sequence[str]
  weights: np.ndarray


class Analysis(NamedTuple):
  """A row of ANALYSES.

  Attributes:
    fn: (subject, *, ...) -> Measurement.
    description: what it measures, in one line.
  """

  fn: Callable[..., Measurement]
  description: str


def _by_target(subject: Subject, values: Any) -> Measurement:
  return Measurement(np.asarray(values, np.float64), (subject.target_tokens,))


def _by_pair(subject: Subject, values: Any) -> Measurement:
  return Measurement(np.asarray(values, np.float64), (subject.target_tokens, subject.source_tokens), is_map=True)


def _entropy(subject: Subject) -> Measurement:
  return _by_target(subject, [alignment.entropy(row[None]).sum() if row.any() else np.nan for row in subject.weights])


def _coverage(subject: Subject) -> Measurement:
  return Measurement(statistics.coverage(subject.weights), (subject.source_tokens,))


def _distance(subject: Subject) -> Measurement:
  return _by_target(subject, statistics.distance(subject.weights))


def _monotonicity(subject: Subject) -> Measurement:
  steps = alignment.monotonicity(subject.weights, len(subject.source_tokens) - 1, len(subject.target_tokens) - 1)
  return Measurement(np.asarray(steps.mean() if len(steps) else np.nan), ())


def _norms(subject: Subject) -> Measurement:
  return _by_pair(subject, norms.weighted_norms(jnp.asarray(subject.weights), value_vectors(subject.pair)))


def _select_layer(values: np.ndarray, layer: int) -> np.ndarray:
  if not -len(values) <= layer < len(values):
    raise UserError(f'layer must be from {-len(values)} to {len(values) - 1}, got {layer}')
  return values[layer]


def _self_attention(subject: Subject, *, layer: int = -1) -> Measurement:
  weights = np.asarray(_compiled(encoder_weights, subject.pair)).mean(1)
  return Measurement(_select_layer(weights, layer), (subject.source_tokens, subject.source_tokens))


def _updates(subject: Subject, *, layer: int = -1) -> Measurement:
  updates = np.asarray(_compiled(source_updates, subject.pair))
  return Measurement(_select_layer(updates, layer), (subject.source_tokens,))


def _through_encoder(fn: Callable[[np.ndarray], np.ndarray], subject: Subject) -> Measurement:
  """Applies fn to the self-attention weights [L, S, S] of the encoder; each row is then divided by its sum."""
  weights = np.asarray(_compiled(encoder_weights, subject.pair)).mean(1)
  encoder = subject.pair.model.encoder
  layers = encoder.layers
  if getattr(encoder, 'differential', False):
    raise UserError('rollout and flow add the weights of all heads; this encoder (differential=True) subtracts some')
  if len(weights) != layers:
    raise UserError(
      f'rollout and flow follow one direction through all layers; this encoder has {len(weights) // layers}'
    )
  result = fn(weights)
  return Measurement(result / result.sum(-1, keepdims=True), (subject.source_tokens, subject.source_tokens))


def _rollout(subject: Subject) -> Measurement:
  return _through_encoder(lambda weights: through_layers.rollout(weights)[-1], subject)


def _flow(subject: Subject) -> Measurement:
  return _through_encoder(through_layers.flow, subject)


def _compiled(fn: Callable[[AnalysedPair], Any], pair: AnalysedPair) -> Any:
  """Returns fn(pair), compiled; the model is not an array, and therefore no argument of the compiled function."""
  return jax.jit(lambda params, source, target: fn(AnalysedPair(pair.model, params, source, target)))(*pair[1:])


def _by_vectors(attribute: Callable, subject: Subject) -> Measurement:
  """Attributes the log-probability of each target token to the source embeddings: attribute(fn, vectors) -> [T, S]."""

  def fn(vectors):
    return target_log_probs(with_vectors(subject.pair, vectors))

  return _by_pair(subject, jax.jit(functools.partial(attribute, fn))(source_vectors(subject.pair)))


def _gradient_times_input(subject: Subject) -> Measurement:
  return _by_vectors(attributions.gradient_times_input, subject)


def _integrated_gradients(subject: Subject, *, steps: Size = 32) -> Measurement:
  return _by_vectors(functools.partial(attributions.integrated_gradients, steps=steps), subject)


def _leave_one_out(subject: Subject) -> Measurement:
  def fn(mask):
    return target_log_probs(subject.pair, mask)

  mask = jnp.ones(subject.pair.source.shape, bool)
  return _by_pair(subject, jax.jit(functools.partial(attributions.leave_one_out, fn))(mask))


def _kendall(subject: Subject, *, other: str = 'gradient_times_input') -> Measurement:
  measured = analyse(other, subject)
  if not measured.is_map:
    raise UserError(f'kendall: other={other!r} must measure pairs of target and source tokens, such as leave_one_out')
  return _by_target(subject, agreement.kendall(subject.weights, np.abs(measured.values)))


def _for_each_step(fn: Callable, subject: Subject, seed: int) -> Measurement:
  """Measures fn(outputs, weights [S], mask [S], rng) -> [] at each step.

  outputs(weights [S]) is the distribution [V] of the token of the step when only the weights of that step change.
  """
  pair = subject.pair
  weights = jnp.asarray(subject.weights)

  def measure(inputs):
    step, rng = inputs

    def outputs(row):
      rows = jnp.full(weights.shape, jnp.nan).at[step].set(row)
      edited = edited_model(pair.model, replace_weights(rows))
      return jnp.exp(output_log_probs(pair._replace(model=edited))[step])

    return fn(outputs, weights[step], jnp.ones(weights.shape[1], bool), rng)

  steps = jnp.arange(len(weights))
  rngs = jax.random.split(jax.random.key(seed), len(weights))
  return _by_target(subject, jax.jit(lambda inputs: jax.lax.map(measure, inputs))((steps, rngs)))


def _permutation(subject: Subject, *, count: Size = 100, seed: int = 0) -> Measurement:
  return _for_each_step(functools.partial(agreement.permutation_effect, count=count), subject, seed)


def _adversarial(subject: Subject, *, epsilon: Positive = 0.05, steps: Size = 100, seed: int = 0) -> Measurement:
  def divergence(*inputs):
    return agreement.adversarial_weights(*inputs, epsilon=epsilon, steps=steps).divergence

  return _for_each_step(divergence, subject, seed)


def _what_if(subject: Subject, *, edit: str = 'uniform') -> Measurement:
  edited = edited_model(subject.pair.model, edit)
  check_indices(edit, len(subject.target_tokens), len(subject.source_tokens))

  def change(pair):
    return target_log_probs(pair._replace(model=edited)) - target_log_probs(pair)

  return _by_target(subject, _compiled(change, subject.pair))


def _head_importance(subject: Subject) -> Measurement:
  def sensitivity(pair):
    return heads.head_sensitivity(lambda params: -target_log_probs(pair._replace(params=params)).sum(), pair.params)

  importance = _compiled(sensitivity, subject.pair)
  if not importance:
    raise UserError('head_importance: this model has no attention with several heads; expected one with heads > 1')
  names = [f'{path} {head}' for path, values in importance.items() for head in range(len(values))]
  return Measurement(np.concatenate([np.asarray(values) for values in importance.values()]), (names,))


ANALYSES: Mapping[str, Analysis] = {
  'entropy': Analysis(_entropy, 'entropy of the weights of each target token, in nats'),
  'coverage': Analysis(_coverage, 'total weight of each source token (Tu et al. 2016)'),
  'distance': Analysis(_distance, 'mean distance of the weights from the diagonal, in positions (Vig & Belinkov 2019)'),
  'monotonicity': Analysis(
    _monotonicity, 'share of steps whose largest weight does not move backwards; steps from or to EOS do not count'
  ),
  'norms': Analysis(_norms, 'length of each weighted value vector (Kobayashi et al. 2020)'),
  'self_attention': Analysis(_self_attention, 'self-attention weights of a layer of the encoder, the mean over heads'),
  'updates': Analysis(_updates, "number of updates of each source token in a layer of the encoder 'act'"),
  'rollout': Analysis(_rollout, "the encoder's self-attention through all layers (Abnar & Zuidema 2020)"),
  'flow': Analysis(_flow, "maximum flow through the encoder's self-attention (Abnar & Zuidema 2020)"),
  'gradient_times_input': Analysis(
    _gradient_times_input, 'gradient of each log-probability times each source embedding, in nats'
  ),
  'integrated_gradients': Analysis(
    _integrated_gradients,
    'gradient_times_input, with the mean gradient on the line from embeddings of zeros (Sundararajan et al. 2017)',
  ),
  'leave_one_out': Analysis(_leave_one_out, 'decrease of each log-probability when a source token is masked, in nats'),
  'kendall': Analysis(
    _kendall, "Kendall's tau between the weights and the absolute values of another analysis (Jain & Wallace 2019)"
  ),
  'permutation': Analysis(
    _permutation,
    'median total variation distance of the output when weights are permuted (Jain & Wallace 2019)',
  ),
  'adversarial': Analysis(
    _adversarial,
    'Jensen-Shannon divergence of the most distant weights with nearly the same output, in nats (Jain & Wallace 2019)',
  ),
  'what_if': Analysis(_what_if, 'change of each log-probability under an edit of the weights, in nats'),
  'head_importance': Analysis(_head_importance, 'sensitivity of the loss to a gate of each head (Michel et al. 2019)'),
}


def analyse(spec: str, subject: Subject) -> Measurement:
  """Computes an analysis.

  Args:
    spec: a spec string of ANALYSES, such as 'what_if(edit="fixed(at=2, position=5)")'.
    subject: the model, source and target.

  Raises:
    UserError: for an unknown analysis or option, for an option out of range, and for a model to which the analysis does
      not apply.
  """
  name, row, options = parse_analysis(spec)
  try:
    return row.fn(subject, **options)
  except UserError as error:
    raise UserError(f'analysis {name!r}: {error}') from error


def parse_analysis(spec: str) -> tuple[str, Analysis, dict[str, Any]]:
  """Returns name, row and options of a spec string of ANALYSES. Raises UserError for an unknown analysis or option."""
  return bind(spec, ANALYSES, 'analysis', lambda row: schema_of(row.fn))
