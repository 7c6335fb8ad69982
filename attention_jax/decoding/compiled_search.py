"""Searches with a model, compiled once for each shape of their inputs: greedy search, beam search and sampling."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attention_jax.decoding import search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.generate import IMPOSSIBLE_SCORE, Hypotheses
from attention_jax.decoding.prefix import force_prefix
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.decoding.sampling import Sampling
from attention_jax.functional.copying import emittable
from attention_jax.functional.masking import padding_mask
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.tokens import EOS
from attention_jax.training.partition import gather_recurrent, jit_on_mesh


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """Options of a search: greedy with one beam, else as in search.beam."""

  beams: int = 1
  groups: int = 1
  diversity: float = 0.5

  @property
  def hypotheses(self) -> int:
    """Number of hypotheses of each source."""
    return self.beams

  def make_search(self, rng_inputs: Any = None) -> Callable:
    """Returns the search with these options. It is not random, so `rng_inputs`, which Sampling needs, is not used."""
    if self.beams == self.groups == 1:
      return search.greedy
    return functools.partial(search.beam, beams=self.beams, groups=self.groups, diversity=self.diversity)


def compile_beam_search(model: EncoderDecoder, beams: int, max_length: int, ranking: Ranking = DEFAULT_RANKING):
  """Returns (params, source [B, S], source_mask [B, S]) -> Hypotheses, compiled once per shape; one beam is greedy.

  Arguments: see `compile_search`; `beams` is the beam size.
  """
  return compile_search(model, BeamSearch(beams), max_length, ranking)


def compile_search(
  model: EncoderDecoder,
  strategy: BeamSearch | Sampling,
  max_length: int,
  ranking: Ranking,
  mesh: Mesh | None = None,
  compiler_options: Mapping[str, Any] | None = None,
  constraints: Constraints = NO_CONSTRAINTS,
) -> Callable:
  """Returns a search that is compiled once for each shape of its inputs, at the first call with that shape.

  Args:
    model: the model.
    strategy: how hypotheses are searched or sampled.
    max_length: maximum length of hypotheses, EOS included.
    ranking: ranking of the hypotheses.
    mesh: the device mesh over which the sources are sharded, if any.
    compiler_options: see jax.jit and compiling.compiler_options.
    constraints: constraints on the hypotheses.

  Returns:
    (params, source, source_mask, rng_inputs, prefix) -> Hypotheses. `rng_inputs` are those of Sampling.make_search; a
    beam search ignores them. `prefix` [B, P] has the target ids with which the hypotheses begin, PAD after the end of
    each prefix; None for no prefix.
  """

  def run(params, source, source_mask, rng_inputs=None, prefix=None):
    variables = {'params': gather_recurrent(params, mesh) if mesh else params}
    carry, memory = model.apply(variables, source, source_mask, max_length, strategy.hypotheses, method='start')

    def step(carry, token, memory):
      return model.apply(variables, carry, token, memory, method='step')

    if model.copies:
      step = mask_impossible_ids(step)
    step = constraints.constrain(step)
    carry = constraints.start(carry, source.shape[0], max_length)
    if prefix is not None:
      step, carry, memory = force_prefix(step, carry, memory, prefix)
    find_hypotheses = strategy.make_search(rng_inputs)
    hypotheses = find_hypotheses(step, carry, memory, max_length=max_length, ranking=ranking, source_mask=source_mask)
    if model.traits.latent:
      weights = _posterior_weights(model, variables, source, source_mask, hypotheses)
      hypotheses = hypotheses._replace(weights=weights)
    return hypotheses

  jit = functools.partial(jit_on_mesh, mesh) if mesh else jax.jit
  return jit(run, compiler_options=compiler_options)


def mask_impossible_ids(step: Callable) -> Callable:
  """Masks ids that cannot be emitted, such as copy ids absent from the source; EOS is always allowed.

  Args:
    step: the step of a model that copies, see generate.py; its logits are log-probabilities of functional.copying.

  Returns:
    The step with IMPOSSIBLE_SCORE as the logit of each masked id.
  """

  def masked_step(carry, token, memory):
    carry, (logits, *outputs) = step(carry, token, memory)
    allowed = emittable(logits).at[..., EOS].set(True)
    return carry, (jnp.where(allowed, logits, IMPOSSIBLE_SCORE), *outputs)

  return masked_step


def _posterior_weights(
  model: EncoderDecoder, variables: Any, source: jax.Array, source_mask: jax.Array, hypotheses: Hypotheses
) -> jax.Array:
  """Posterior weights [B, K, T, S] given whole hypotheses; the weights of a search depend only on earlier tokens."""

  def posterior(hypothesis):
    tokens, lengths = hypothesis
    outputs = model.apply(variables, source, source_mask, tokens)
    return model.posterior(outputs, padding_mask(lengths, tokens.shape[-1]))

  by_beam = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hypotheses.tokens, hypotheses.lengths))
  return jnp.moveaxis(jax.lax.map(posterior, by_beam), 0, 1)
