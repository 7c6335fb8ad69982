"""A while loop over decoding steps that drops finished sources from the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

MIN_SOURCES = 32  # smallest size to which a batch shrinks; a smaller batch takes almost as long


def select_sources(tree: Any, rows: jax.Array) -> Any:
  """Returns the rows of a tree with leaves [B, ...]."""
  return jax.tree.map(lambda x: x[rows], tree)


def shrinking_while_loop(
  body: Callable,
  is_active: Callable,
  select_result: Callable,
  steps: int,
  state: Any,
  history: Any,
  inputs: Any,
  first_step: int | jax.Array = 0,
  select_state: Callable = select_sources,
) -> tuple[Any, Any]:
  """Repeats body(step_index, state, history, inputs) -> state, history, until no source is active or T steps are made.

  Whenever half of the sources are finished, the loop continues with the other half, down to MIN_SOURCES sources.

  Args:
    body: one step; it receives the index of the step, from 0.
    is_active: (state, inputs) -> [B] bool, which sources are not finished.
    select_result: state -> the part of it that is returned.
    steps: T, the maximum number of steps.
    state: the values that change from step to step, leaves [B, ...] unless `select_state` is set.
    history: one record per step, leaves [T, B, ...], which `body` writes.
    inputs: the values that do not change, leaves [B, ...].
    first_step: index of the step to begin with; not 0 if the loop continues with a smaller batch.
    select_state: (state, rows) -> the state of these sources.

  Returns:
    The selected part of the last state, and the history, of all sources.
  """
  size = jax.tree.leaves(history)[0].shape[1]
  # An exported search for a symbolic number of sources does not shrink.
  smaller_size = 0 if is_symbolic_dim(size) or size < 2 * MIN_SOURCES else size // 2

  def condition(loop):
    step_index, state, _ = loop
    return (step_index < steps) & (jnp.sum(is_active(state, inputs)) > smaller_size)

  def step(loop):
    step_index, state, history = loop
    return step_index + 1, *body(step_index, state, history, inputs)

  next_step, state, history = jax.lax.while_loop(condition, step, (jnp.asarray(first_step), state, history))
  if not smaller_size:
    return select_result(state), history
  active = jnp.argsort(~is_active(state, inputs))[:smaller_size]  # a stable sort: active sources come first
  active_state = select_state(state, active)
  active_inputs = select_sources(inputs, active)
  active_history = jax.tree.map(lambda x: x[:, active], history)
  active_result, active_history = shrinking_while_loop(
    body, is_active, select_result, steps, active_state, active_history, active_inputs, next_step, select_state
  )
  result = jax.tree.map(lambda x, new: x.at[active].set(new), select_result(state), active_result)
  return result, jax.tree.map(lambda x, new: x.at[:, active].set(new), history, active_history)
