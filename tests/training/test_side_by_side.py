"""Updates of runs side by side."""

import jax
import numpy as np
import pytest
from attention_jax.training.side_by_side import prepare_side_by_side

from attention_jax.training import side_by_side
from attention_jax.training.config import Training
from attention_jax.training.partition import make_mesh
from tests.training.test_seeds import FIELDS, LOSS, RUNS, SEEDS, init_params, stacked_stream


@pytest.mark.parametrize('devices', [1, 4])
def test_an_update_leaves_stopped_runs_unchanged(devices):
  mesh = make_mesh(jax.devices()[:devices], RUNS)
  runs = prepare_side_by_side(Training(**FIELDS), LOSS, init_params, mesh, SEEDS)
  batch = next(stacked_stream(0, 1))

  def update(live):
    states, metrics = runs(runs.init_states(), batch, live)
    return jax.device_get(runs.stack(states)), {name: np.asarray(value) for name, value in metrics.items()}

  before = jax.device_get(runs.stack(runs.init_states()))
  all_updated, all_metrics = update(np.full(RUNS, True))
  live = np.arange(RUNS) != 1
  states, metrics = update(live)
  stopped = before._replace(step=all_updated.step)

  def run_leaves(tree, i):
    return [x[i] for x in jax.tree.leaves(tree)]

  for i in range(RUNS):
    expected = all_updated if live[i] else stopped
    jax.tree.map(np.testing.assert_array_equal, run_leaves(states, i), run_leaves(expected, i))
    expected_metrics = [x * live[i] for x in run_leaves(all_metrics, i)]
    jax.tree.map(np.testing.assert_array_equal, run_leaves(metrics, i), expected_metrics)


def test_updates_in_several_threads_equal_those_of_one(monkeypatch):
  def states_after_updates(num_threads):
    monkeypatch.setattr(side_by_side, 'program_threads', lambda: num_threads)
    runs = prepare_side_by_side(Training(**FIELDS), LOSS, init_params, make_mesh(jax.devices()[:1]), SEEDS)
    states = runs.init_states()
    for batch in stacked_stream(0, 3):
      states, metrics = runs(states, batch, np.full(RUNS, True))
    return jax.device_get((runs.stack(states), metrics))

  jax.tree.map(np.testing.assert_array_equal, states_after_updates(2), states_after_updates(1))
