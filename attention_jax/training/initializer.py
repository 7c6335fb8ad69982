"""The state of a run before the first update: built with its final sharding, and its shapes alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from attention_jax.training.compiling import compiler_options
from attention_jax.training.partition import constrain, state_shardings
from attention_jax.training.state import TrainState


class StateInitializer:
  """Callable that builds the state before the first update from a seed.

  The state is created with its final sharding: no device holds it twice, or keeps the initial parameters beside it.

  Args:
    init_params: seed -> initial parameters.
    init: parameters -> state.
    mesh: the mesh of the devices.
  """

  def __init__(self, init_params: Callable[[int], Any], init: Callable[[Any], TrainState], mesh: Mesh):
    self._init_params = init_params
    self._mesh = mesh

    def build_state(params: Any) -> TrainState:
      state = init(params)
      return constrain(state, state_shardings(state, mesh))

    self._build_state = build_state
    self._compiled = jax.jit(build_state, compiler_options=compiler_options(1))

  def __call__(self, seed: int) -> TrainState:
    # Arrays of the host are the same in every process, whatever the sharding of the state.
    return self._compiled(jax.device_get(self._init_params(seed)))

  @functools.cached_property
  def shapes(self) -> TrainState:
    """The shapes, dtypes and shardings of the state, for which no values are computed."""
    state = jax.eval_shape(lambda: self._build_state(self._init_params(0)))
    return jax.tree.map(
      lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
      state,
      state_shardings(state, self._mesh),
    )
