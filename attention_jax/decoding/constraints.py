"""Constraints on hypotheses, for every search: the step of the model is wrapped, see generate.py."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.decoding.generate import IMPOSSIBLE_SCORE
from attention_jax.decoding.top_k import log_sum_exp
from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32
from attention_jax.specs import Count, check_fields
from attention_jax.tokens import EOS, PAD


class ConstrainedCarry(NamedTuple):
  """Carry of a constrained step.

  Attributes:
    carry: carry of the model.
    tokens: [B, T] the tokens so far, BOS first, and PAD.
    repeats: [B, T] number of tokens up to each position that equal the last tokens so far: the length of an earlier
      n-gram with which the hypothesis ends.
    length: [B] number of tokens so far, without BOS.
  """

  carry: Any
  tokens: jax.Array
  repeats: jax.Array
  length: jax.Array


@dataclasses.dataclass(frozen=True)
class Constraints:
  """Constraints on hypotheses. Tokens are ids: a copied word has the same id each time, EOS does not count.

  Log-probabilities remain those of the model. The tokens of a required prefix count, but are not constrained
  themselves. A hypothesis that cannot be continued within the constraints is dropped.

  Attributes:
    no_repeat_ngram_size: no sequence of this number of tokens occurs twice in a hypothesis (Paulus, Xiong & Socher
      2018); 0 allows all.
    min_length: minimum number of tokens of a hypothesis, without EOS.

  Raises:
    UserError: for a negative number.
  """

  no_repeat_ngram_size: Count = 0
  min_length: Count = 0

  def __post_init__(self):
    check_fields(self, 'constraints')

  def check(self, max_length: int) -> None:
    """Raises UserError if no hypothesis of at most `max_length` tokens, EOS included, has the minimum length."""
    if self.min_length and self.min_length >= max_length:
      raise UserError(
        f'search: min_length must be less than max_length={max_length}, which includes EOS, got {self.min_length}'
      )

  def start(self, carry: Any, batch: int, max_length: int) -> Any:
    """Returns the first carry of a constrained step.

    Args:
      carry: the first carry of the model.
      batch: B, number of sources.
      max_length: T, maximum length of hypotheses, EOS included.

    Raises:
      UserError: as `check`.
    """
    self.check(max_length)
    if self == NO_CONSTRAINTS:
      return carry
    tokens = jnp.full((batch, max_length), PAD, jnp.int32)
    return ConstrainedCarry(carry, tokens, jnp.zeros_like(tokens), jnp.zeros((batch,), jnp.int32))

  def constrain(self, step: Callable) -> Callable:
    """Wraps the step of a model: tokens that violate a constraint get IMPOSSIBLE_SCORE as their logit.

    Their probability is added to that of PAD, which no search emits, so that the other log-probabilities do not change.
    """
    if self == NO_CONSTRAINTS:
      return step

    def constrained_step(state, token, memory):
      carry, (logits, *outputs) = step(state.carry, token, memory)
      logits = at_least_float32(logits)
      state = _append(state, token)
      blocked = self._blocked(state, logits)
      is_pad = jnp.arange(logits.shape[-1])[None] == PAD
      blocked_mass = log_sum_exp(jnp.where(blocked | is_pad, logits, -jnp.inf))
      logits = jnp.where(blocked, IMPOSSIBLE_SCORE, logits).at[:, PAD].set(blocked_mass)
      return state._replace(carry=carry, length=state.length + 1), (logits, *outputs)

    return constrained_step

  def _blocked(self, state: ConstrainedCarry, logits: jax.Array) -> jax.Array:
    """Which of the tokens [B, V] violate a constraint."""
    size = logits.shape[-1]
    blocked = jnp.zeros(logits.shape, bool).at[:, EOS].set(state.length < self.min_length)
    if not self.no_repeat_ngram_size:
      return blocked
    is_earlier = jnp.arange(state.tokens.shape[1])[None] < state.length[:, None]
    is_repeated = is_earlier & (state.repeats >= self.no_repeat_ngram_size - 1)
    following = jnp.where(is_repeated[:, :-1], state.tokens[:, 1:], size)  # the token `size` does not exist
    return jax.vmap(lambda blocked, ids: blocked.at[ids].set(True, mode='drop'))(blocked, following)


NO_CONSTRAINTS = Constraints()


def _append(state: ConstrainedCarry, token: jax.Array) -> ConstrainedCarry:
  """Appends the token [B] at position `length`, which remains unchanged."""
  position = jnp.arange(state.tokens.shape[1])[None]
  tokens = jnp.where(position == state.length[:, None], token[:, None], state.tokens)
  is_equal = (tokens == token[:, None]) & (position < state.length[:, None])
  before = jnp.pad(state.repeats[:, :-1], ((0, 0), (1, 0)))
  return state._replace(tokens=tokens, repeats=jnp.where(is_equal, before + 1, 0))
