"""Costs of a sweep: parameters and FLOP of each setting, and an estimate of the time with its source."""

import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.sweeps.ledger import COSTS, SweepState
from attention_jax.sweeps.resolve import Resolved
from attention_jax.systems.base import System
from attention_jax.systems.config import RunConfig
from attention_jax.systems.costs import update_flop
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.state import count_parameters

MATRIX_ROWS = 1024
REPETITIONS = 5


class Costs(NamedTuple):
  """Costs of a setting.

  Attributes:
    parameters: number of parameters.
    update_flop: FLOP of the matrix products of one update, see systems.costs.update_flop.
  """

  parameters: int
  update_flop: float


def measure_costs(configs: Iterable[tuple[str, RunConfig]], measured: Mapping[str, Any]) -> Iterable[tuple[str, Costs]]:
  """Counts parameters and FLOP; reads the data once for all settings that share them.

  Args:
    configs: (setting id, config) of each setting.
    measured: setting id -> 'costs' event; these settings are not measured again.

  Yields:
    (setting id, costs).
  """
  systems: dict[str, System] = {}
  for setting_id, config in configs:
    if setting_id in measured:
      yield setting_id, Costs(measured[setting_id]['parameters'], measured[setting_id]['update_flop'])
      continue
    key = (config.system, config.data)
    if key not in systems:
      systems[key] = SYSTEMS[config.system].load(config, None)
    system = systems[key].with_config(config)
    initializer = system.initializer()
    yield setting_id, Costs(count_parameters(jax.eval_shape(lambda: initializer(0))), update_flop(system))  # noqa: B023


def costs_event(setting_id: str, costs: Costs) -> dict[str, Any]:
  """Returns the fields of the event that stores costs in the ledger."""
  return {'event': COSTS, 'setting_id': setting_id, **costs._asdict()}


def matmul_rate() -> float:
  """Returns the rate of a square matrix product on the first device, in FLOP/s; the best of a few repetitions."""
  matrix = jnp.ones((MATRIX_ROWS, MATRIX_ROWS))
  multiply = jax.jit(jnp.matmul)
  multiply(matrix, matrix).block_until_ready()
  seconds = []
  for _ in range(REPETITIONS):
    start = time.perf_counter()
    multiply(matrix, matrix).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * MATRIX_ROWS**3 / min(seconds)


class TimeEstimate(NamedTuple):
  """Seconds of one seed of each setting.

  Attributes:
    seconds: by setting id; empty if nothing is known.
    source: what the estimate is based on.
  """

  seconds: Mapping[str, float]
  source: str


def estimate_seconds(
  state: SweepState, resolved: Sequence[Resolved], costs: Mapping[str, Costs], rate: Callable[[], float] | None
) -> TimeEstimate:
  """Estimates the time of one seed of each setting.

  Args:
    state: the state of the sweep; its finished units are the best source.
    resolved: the settings.
    costs: by setting id.
    rate: measures FLOP/s of the device that trains; None if it is not this process's device.
  """
  measured = [entry for entry in state.finished if entry.seconds]
  if measured:
    seconds_by_setting: dict[str, list[float]] = {}
    for entry in measured:
      seconds_by_setting.setdefault(entry.unit.setting_id, []).append(entry.seconds / len(entry.unit.seeds))
    means = {setting_id: sum(values) / len(values) for setting_id, values in seconds_by_setting.items()}
    mean = sum(means.values()) / len(means)
    seconds = {setting.id: means.get(setting.id, mean) for setting in resolved}
    return TimeEstimate(seconds, f'the time of {len(measured)} finished units of this sweep')
  if rate is None:
    return TimeEstimate({}, 'unknown until a unit has finished: the devices are not those of this process')
  flop_per_second = rate()
  seconds = {
    setting.id: costs[setting.id].update_flop * setting.config.training.steps / flop_per_second for setting in resolved
  }
  source = (
    'FLOP of the matrix products at the rate of a float32 matrix product on this machine, '
    f'{flop_per_second / 1e9:.0f} GFLOP/s, without compiling, reading, evaluating and saving'
  )
  return TimeEstimate(seconds, source)


def format_seconds(seconds: float) -> str:
  """Returns '0:01:30' for 90 seconds."""
  return str(datetime.timedelta(seconds=round(seconds)))
