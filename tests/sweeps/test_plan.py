"""Units: which seeds are trained together, in which folders, by which command."""

from pathlib import Path

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import SweepState, UnitState
from attention_jax.sweeps.plan import command, plan_units, run_folders, setting_folder, trains_seeds_together
from attention_jax.sweeps.resolve import resolve
from tests.sweeps.helpers import PATH, make_base

TRAIN = ('python', '-m', 'experiments.train')


@pytest.fixture
def resolved():
  return [resolve(make_base(), {'model.attention.score': score}) for score in ('dot', 'low_rank(rank=2)')]


def state_with(units):
  return SweepState({unit.id: UnitState(unit) for unit in units})


def test_units_are_ordered_by_seed_then_setting(resolved):
  units = plan_units(SweepState(), resolved, [0, 1], together=False)
  assert [unit.seeds for unit in units] == [(0,), (0,), (1,), (1,)]
  assert [unit.setting['model.attention.score'] for unit in units[:2]] == ['dot', 'low_rank(rank=2)']
  assert units[1].folder == f'score=low_rank-rank=2.{resolved[1].id}/seed_0'


def test_more_seeds_and_more_settings_extend_a_plan(resolved):
  units = plan_units(SweepState(), resolved[:1], [0, 1], together=False)
  added = plan_units(state_with(units), resolved, [0, 1, 2], together=False)
  first, second = (setting.id for setting in resolved)
  expected = [(second, (0,)), (second, (1,)), (first, (2,)), (second, (2,))]
  assert [(unit.setting_id, unit.seeds) for unit in added] == expected
  assert plan_units(state_with([*units, *added]), resolved, [0, 1, 2], together=False) == []


def test_missing_seeds_are_trained_together_where_they_are_consecutive(resolved):
  first = plan_units(SweepState(), resolved[:1], [2], together=True)
  units = plan_units(state_with(first), resolved[:1], range(5), together=True)
  assert [unit.seeds for unit in units] == [(0, 1), (3, 4)]
  assert units[0].folder.endswith('/seeds_0-1')
  assert run_folders(units[0], Path('s')) == {seed: Path('s') / units[0].folder / f'seed_{seed}' for seed in (0, 1)}
  assert run_folders(first[0], Path('s')) == {2: Path('s') / first[0].folder}


def test_the_command_trains_the_seeds_of_a_unit(resolved):
  (unit,) = plan_units(SweepState(), resolved[:1], [3, 4], together=True, plugins='mine.py,other.py')
  assert command(unit, Path('runs/s'), TRAIN) == [
    *TRAIN,
    '--plugins=mine.py,other.py',
    f'--config={PATH}',
    f'--workdir=runs/s/{unit.folder}',
    '--config.model.attention.score=dot',
    '--config.training.seed=3',
    '--config.seeds=2',
  ]


@pytest.mark.parametrize(
  ('choice', 'backend', 'settings', 'seeds', 'slots', 'expected'),
  [
    ('auto', 'cpu', 9, 3, 1, False),
    ('auto', 'gpu', 9, 3, 1, True),
    ('auto', 'gpu', 9, 1, 1, False),
    ('auto', 'gpu', 2, 3, 4, False),  # two of the four devices would be idle
    ('yes', 'cpu', 1, 3, 4, True),
    ('no', 'tpu', 9, 3, 1, False),
  ],
)
def test_seeds_are_trained_together_by_choice_or_by_default_on_accelerators(
  choice, backend, settings, seeds, slots, expected
):
  assert trains_seeds_together(choice, backend, settings, seeds, slots) is expected
  with pytest.raises(UserError, match="unknown value of --together 'maybe'"):
    trains_seeds_together('maybe', backend, settings, seeds, slots)


def test_names_of_folders_need_no_quotes_and_no_commas():
  name = setting_folder("score=dot, buckets=((1, 2),), text='é/x'", 'abcd')
  assert name == 'score=dot+buckets=-1+2-+text=-é-x.abcd'
  assert len(setting_folder('x' * 500, 'abcd')) < 100
