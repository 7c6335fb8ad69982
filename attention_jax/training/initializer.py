"""The state before the first update: built with its final sharding, and its shapes alone."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attention_jax.training.compiling import compiler_options
from attention_jax.training.partition import constrain, state_shardings
from attention_jax.training.state import TrainState


class StateInitializer:
  """Callable that builds the state before the first update: of one run, or of several side by side.

  The state is created with its final sharding: no device holds it twice, or keeps the initial parameters beside it.

  Args:
    init_params: seed -> initial parameters.
    init: parameters -> state.
    mesh: the mesh of the devices.
    seed: the seed of one run, or the seeds of several.
  """

  def __init__(
    self, init_params: Callable[[int], Any], init: Callable[[Any], TrainState], mesh: Mesh, seed: int | Sequence[int]
  ):
    self._init_params = init_params
    self._is_stacked = np.ndim(seed) > 0
    self._seeds = seed if self._is_stacked else [seed]
    self._mesh = mesh

    def build_state(params: Sequence[Any]) -> TrainState:
      """The state of the initial parameters of each run; of several runs, with a leading axis."""
      if self._is_stacked:
        state = jax.vmap(init)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params))
      else:
        state = init(params[0])
      return constrain(state, self._shardings(state))

    self._build_state = build_state
    self._compiled = jax.jit(build_state, compiler_options=compiler_options(1))

  def __call__(self) -> TrainState:
    # Arrays of the host are the same in every process, whatever the sharding of the state.
    return self._compiled([jax.device_get(self._init_params(seed)) for seed in self._seeds])

  def with_seed(self, seed: int) -> 'StateInitializer':
    """Returns the initialiser of one run with another seed, which shares the compiled programs."""
    initializer = copy.copy(self)
    initializer._seeds = [seed]
    return initializer

  @functools.cached_property
  def shapes(self) -> TrainState:
    """The shapes, dtypes and shardings of the state, for which no values are computed."""
    state = jax.eval_shape(lambda: self._build_state([self._init_params(seed) for seed in self._seeds]))
    return jax.tree.map(
      lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), state, self._shardings(state)
    )

  def _shardings(self, state: TrainState) -> TrainState:
    return state_shardings(state, self._mesh, stacked=self._is_stacked)
